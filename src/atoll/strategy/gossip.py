"""Gossip of packed local models: in every update each mixes its weights with those of its peers.

Shapes: N local models, K updates of one period.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from atoll.config.strategy import StrategyConfig
from atoll.model.arena import Arena
from atoll.network.topology import mixing_schedule
from atoll.optim.adamw import Mixing
from atoll.strategy.base import Round, Traffic
from atoll.strategy.packed import average, check_saved, consensus_measures, named_weights
from atoll.tensors import Snapshot


@final
class PackedGossip:
    """Mixes before the inner update (awc) or after it (atc), by the schedule of a topology.

    It has no state: the matrix of an update is a pure function of its number. The inner update
    reads it from one buffer on the device, which `before_update` fills without waiting.
    """

    def __init__(
        self,
        arena: Arena,
        config: StrategyConfig,
        *,
        weight: Callable[[int], float] | None = None,
    ) -> None:
        """Put the matrices of one period on the device.

        Args:
            arena: The local models.
            config: Topology and scheme.
            weight: Share of an update's exchange that is applied, in [0, 1]; None for all of it.
        """
        assert config.topology is not None
        assert config.scheme is not None
        assert (weight is None) == (config.consensus_power is None), "gamma needs the schedule"
        self._arena, self._weight = arena, weight
        self._schedule = mixing_schedule(config.topology, arena.num_models)
        device = arena.data_NP.device
        period_KNN = np.stack(self._schedule.matrices)
        self._period_KNN = torch.from_numpy(_rounded(period_KNN)).to(device)
        self._eye_NN = torch.eye(arena.num_models, device=device)
        self._mixing = Mixing(torch.empty_like(self._eye_NN), before=config.scheme == "awc")
        self._facts: dict[str, Any] = {
            "kind": "gossip",
            "models": arena.num_models,
            "topology": config.topology,
            "scheme": config.scheme,
            "consensus_power": config.consensus_power,
            "consensus_start_fraction": config.consensus_start_fraction,
        }

    def wrap(self, model: nn.Module) -> nn.Module:
        return model

    def microbatch(self, *, last: bool) -> AbstractContextManager[None]:
        return nullcontext()

    def loss_divisor(self, *, local_weight: float, update_weight: float) -> float:
        return local_weight

    def before_update(self, round: Round) -> Traffic:
        """Fill in the shares of this update; they are mixed by the inner update itself."""
        assert round.members == tuple(range(self._arena.num_models)), round.members
        matrix_NN = self._period_KNN[(round.step - 1) % self._schedule.period]
        if self._weight is None:
            self._mixing.shares_NN.copy_(matrix_NN)
        else:
            gamma = self._weight(round.step)
            torch.lerp(self._eye_NN, matrix_NN, gamma, out=self._mixing.shares_NN)
        return self._traffic(round) if self._mixing.before else Traffic()

    def mixing(self, round: Round) -> Mixing | None:
        return self._mixing

    def after_update(self, round: Round) -> Traffic:
        return Traffic() if self._mixing.before else self._traffic(round)

    def exchanges_after(self, step: int) -> bool:
        """Return False: also atc mixes inside the inner update."""
        return False

    def evaluation_weights(self, step: int) -> Mapping[str, Tensor]:
        """Return the float32 average; equal models give their own bits."""
        return named_weights(self._arena, average(self._arena.data_NP))

    def measures(self, step: int) -> Mapping[str, Tensor | float]:
        """Return the distances to the mean, and the share of the exchange of `step` applied."""
        weight = 1.0 if self._weight is None else self._weight(step)
        return {**consensus_measures(self._arena.data_NP), "mixing_weight": weight}

    def shared_names(self, step: int) -> frozenset[str]:
        """Return nothing: even an exact average is rounded for each model on its own."""
        return frozenset()

    def snapshot(self) -> Snapshot:
        """Return only what the schedule was, so that no other one goes on with these weights."""
        return Snapshot(facts=dict(self._facts))

    def restore(self, saved: Snapshot) -> None:
        check_saved(saved, tensors={}, facts=self._facts)

    def close(self) -> None:
        return None

    def _traffic(self, round: Round) -> Traffic:
        sent = self._schedule.sent(round.step, num_parameters=self._arena.num_parameters)
        return Traffic(sent.payload_bytes, sent.wire_bytes, exchanges=sent.exchanges)


def _rounded(matrices_KNN: NDArray[np.float64]) -> NDArray[np.float32]:
    """Round shares to float32; what is missing in a row goes to the model itself.

    Rounded one by one, equal shares err to the same side, and the mean of the models would creep.
    """
    rounded_KNN = matrices_KNN.astype(np.float32)
    own = np.arange(rounded_KNN.shape[-1])
    missing_KN = 1 - rounded_KNN.astype(np.float64).sum(axis=-1)
    rounded_KNN[:, own, own] += missing_KN.astype(np.float32)
    return rounded_KNN

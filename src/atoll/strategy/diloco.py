"""DiLoCo of packed local models: they train alone, and every so often a parent takes their mean.

Shapes: N local models, P parameters of one model, C columns of a piece.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import torch
from torch import Tensor, nn

from atoll.config.strategy import StrategyConfig
from atoll.model.arena import Arena
from atoll.network.topology import WEIGHT_BYTES, all_reduce_sent
from atoll.optim.adamw import Mixing
from atoll.strategy.base import Round, Traffic
from atoll.strategy.packed import (
    average,
    check_saved,
    consensus_measures,
    named_weights,
    piece_size,
    square_sum,
)
from atoll.tensors import Snapshot, copy_to_cpu


@final
class PackedDiloco:
    """Every `local_steps` updates the parent makes an outer step, from which all models go on.

    With x the parent, y_i the local models and d the mean of x - y_i: v = mu v + d, then
    x = x - eta (d + mu v), which is Nesterov's momentum. Inner moments stay as they are.

    Source: Douillard et al., DiLoCo: Distributed Low-Communication Training of Language Models,
    algorithm 1.
    """

    def __init__(self, arena: Arena, config: StrategyConfig) -> None:
        """Take the weights of the first model as the parent; all start equal.

        Args:
            arena: The local models.
            config: Updates between two outer steps, and the outer rate and momentum.
        """
        self._arena = arena
        self._local_steps, self._rate = config.local_steps, config.outer_lr
        self._momentum = config.outer_momentum
        self._parent_P = arena.data_NP[0].clone()
        self._momentum_P = torch.zeros_like(self._parent_P) if self._momentum else None
        self._last_outer: tuple[int, Tensor] | None = None
        self._facts: dict[str, Any] = {
            "kind": "diloco",
            "models": arena.num_models,
            "local_steps": config.local_steps,
            "outer_lr": config.outer_lr,
            "outer_momentum": config.outer_momentum,
        }

    def wrap(self, model: nn.Module) -> nn.Module:
        return model

    def microbatch(self, *, last: bool) -> AbstractContextManager[None]:
        return nullcontext()

    def loss_divisor(self, *, local_weight: float, update_weight: float) -> float:
        return local_weight

    def before_update(self, round: Round) -> Traffic:
        return Traffic()

    def mixing(self, round: Round) -> Mixing | None:
        return None

    @torch.no_grad()
    def after_update(self, round: Round) -> Traffic:
        """Take the outer step where one is due."""
        models = self._arena.num_models
        assert round.members == tuple(range(models)), round.members
        if not self.exchanges_after(round.step):
            return Traffic()
        squares = [self._outer_step(*piece) for piece in self._pieces()]
        self._last_outer = round.step, torch.stack(squares).sum().sqrt()
        sent = all_reduce_sent(self._arena.num_parameters * WEIGHT_BYTES, members=models)
        return Traffic(sent.payload_bytes, sent.wire_bytes, exchanges=sent.exchanges)

    def exchanges_after(self, step: int) -> bool:
        return step % self._local_steps == 0

    def evaluation_weights(self, step: int) -> Mapping[str, Tensor]:
        """Return the parent itself after an outer step, else the local models' float32 average."""
        at_parent = self.exchanges_after(step)
        weights_P = self._parent_P if at_parent else average(self._arena.data_NP)
        return named_weights(self._arena, weights_P)

    def measures(self, step: int) -> Mapping[str, Tensor | float]:
        """Return the distances to the mean and, after an outer step, `outer_step_norm`: its length.

        Right after an outer step the distances are zero, since all models are the parent.
        """
        found: dict[str, Tensor | float] = {**consensus_measures(self._arena.data_NP)}
        if self._last_outer is not None and self._last_outer[0] == step:
            found["outer_step_norm"] = self._last_outer[1]
        return found

    def shared_names(self, step: int) -> frozenset[str]:
        """Return the parent and its momentum and, right after an outer step, the weights too."""
        return frozenset({"strategy", "model"} if self.exchanges_after(step) else {"strategy"})

    def snapshot(self) -> Snapshot:
        """Return copies of the parent and, where there is any, of its momentum; [P] each."""
        tensors = {name: copy_to_cpu(tensor) for name, tensor in self._tensors().items()}
        return Snapshot(tensors, dict(self._facts))

    def restore(self, saved: Snapshot) -> None:
        own = self._tensors()
        check_saved(saved, tensors=own, facts=self._facts)
        for name, tensor in own.items():
            tensor.copy_(saved.tensors[name])

    def close(self) -> None:
        return None

    def _tensors(self) -> dict[str, Tensor]:
        found = {"parent": self._parent_P}
        return found if self._momentum_P is None else found | {"momentum": self._momentum_P}

    def _pieces(self) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        """Yield weights [N, C], parent [C] and momentum [C] of each piece; all share storage."""
        size, total = piece_size(self._parent_P), self._arena.num_parameters
        for start in range(0, total, size):
            piece = slice(start, start + size)
            momentum_C = None if self._momentum_P is None else self._momentum_P[piece]
            yield self._arena.data_NP[:, piece], self._parent_P[piece], momentum_C

    def _outer_step(self, data_NC: Tensor, parent_C: Tensor, momentum_C: Tensor | None) -> Tensor:
        """Move one piece of the parent, put all models there, return the move's squared length."""
        move_C = (parent_C - data_NC).mean(dim=0)
        if momentum_C is not None:
            momentum_C.mul_(self._momentum).add_(move_C)
            move_C.add_(momentum_C, alpha=self._momentum)
        move_C.mul_(self._rate)
        parent_C.sub_(move_C)
        data_NC.copy_(parent_C)
        return square_sum(move_C)

"""One local model: nothing is exchanged."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import final

import torch
from torch import nn

from atoll.errors import StateMismatchError
from atoll.optim.adamw import Mixing
from atoll.strategy.base import Round, Traffic
from atoll.tensors import Snapshot


@final
class Single:
    """Trains `model` alone; it has no state of its own."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

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

    def after_update(self, round: Round) -> Traffic:
        return Traffic()

    def exchanges_after(self, step: int) -> bool:
        return False

    def measures(self, step: int) -> Mapping[str, torch.Tensor | float]:
        return {}

    def evaluation_weights(self, step: int) -> Mapping[str, torch.Tensor]:
        """Return the live weights themselves."""
        return {name: weight.detach() for name, weight in self._model.named_parameters()}

    def shared_names(self, step: int) -> frozenset[str]:
        """Return everything: the one model is all models."""
        return frozenset({"model", "optimizer", "strategy"})

    def snapshot(self) -> Snapshot:
        return Snapshot()

    def restore(self, saved: Snapshot) -> None:
        found = sorted({*saved.tensors, *saved.facts})
        if found:
            raise StateMismatchError(
                f"the saved strategy holds {', '.join(found)}; strategy.kind single holds nothing.",
                hint="resume with the strategy that made the checkpoint",
            )

    def close(self) -> None:
        return None

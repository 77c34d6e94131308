"""Losses and gradient norms of every update, and the first of them that is not a number.

Shapes: N local models.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from atoll.errors import NonFiniteError

HINT = (
    "lower optimizer.lr (with diloco also strategy.outer_lr), lengthen lr_schedule.warmup_steps, "
    "or set optimizer.grad_clip; a checkpoint from well before this update may be sound"
)


@dataclass(frozen=True, slots=True)
class Scalars:
    """What one update measured.

    Attributes:
        step: The update.
        cursor: Rows consumed before it.
        losses: Mean loss in nats per target of each local model.
        grad_norms: Gradient norm of each local model before clipping.
    """

    step: int
    cursor: int
    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]


class Guard:
    """Keeps the scalars of each update on the device until somebody reads them.

    On a CPU a bad update is found at once. On a GPU asking would stop it after every update, so
    that a flag on the device is raised instead: from the first bad update on, the optimizer
    changes nothing, and the weights stay those that made it. `read` then names it.

    Attributes:
        skip: float32 scalar on the device, 1 from the first bad update on; None on a CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._pending: list[tuple[int, int, Tensor]] = []
        self.skip = None if device.type == "cpu" else torch.zeros((), device=device)

    def mark(self, scalars_2N: Tensor) -> None:
        """Raise the flag where a loss or a gradient norm is not finite; may be captured."""
        if self.skip is not None:
            bad = ~torch.isfinite(scalars_2N).all()
            self.skip.copy_(torch.maximum(self.skip, bad.float()))

    def note(self, step: int, cursor: int, scalars_2N: Tensor) -> bool:
        """Remember one update's losses and norms; return whether it is known by now to be bad."""
        self._pending.append((step, cursor, scalars_2N))
        return self.skip is None and not bool(torch.isfinite(scalars_2N).all())

    def tripped(self) -> bool:
        """Return whether an update was bad; waits for the device."""
        return self.skip is not None and bool(self.skip)

    def read(self) -> tuple[list[Scalars], Scalars | None]:
        """Return the scalars since the last read, and the first bad one; waits for the device."""
        if not self._pending:
            return [], None
        values = torch.stack([scalars for *_, scalars in self._pending]).tolist()  # the one wait
        found = [
            Scalars(step, cursor, tuple(losses), tuple(norms))
            for (step, cursor, _), (losses, norms) in zip(self._pending, values, strict=True)
        ]
        self._pending.clear()
        return found, next((scalars for scalars in found if not _finite(scalars)), None)


def raise_non_finite(scalars: Scalars, names: Callable[[], list[tuple[int, str]]]) -> NoReturn:
    """Stop the run with the update and the parameters that are to blame.

    Args:
        scalars: What the bad update measured.
        names: Returns (local model, parameter) of every gradient that is not finite.
    """
    blamed = names()
    models = len(scalars.losses)
    losses = ", ".join(f"{loss:.6g}" for loss in scalars.losses)
    if blamed:
        model, name = blamed[0]
        where = f" of local model {model}" if models > 1 else ""
        more = f" (and of {len(blamed) - 1} more parameters)" if len(blamed) > 1 else ""
        what = f"the gradient of parameter {name}{where}{more} is not finite"
    elif all(map(_is_finite, scalars.grad_norms)):
        what = "the loss is not finite"
    else:
        what = "a gradient norm is not finite, though every single gradient is"
    raise NonFiniteError(
        f"update {scalars.step}: {what}; the loss was {losses} nats per target.", hint=HINT
    )


def _finite(scalars: Scalars) -> bool:
    return all(map(_is_finite, (*scalars.losses, *scalars.grad_norms)))


def _is_finite(value: float) -> bool:
    return abs(value) < float("inf")

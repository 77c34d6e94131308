"""One update: microbatches, gradients, clipping, the optimizer, and what the strategy adds.

Shapes: N local models, B rows of one microbatch, T tokens.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from atoll.data.batch import Batch, Loader
from atoll.optim.clip import clip_factors, gradient_norms, non_finite_names
from atoll.strategy.base import Round, Traffic
from atoll.train.guard import Guard, Scalars, raise_non_finite
from atoll.train.state import TrainState

COMPILE_OPTIONS: dict[str, str | int | bool | Callable[..., Any]] = {
    # On CUDA it gives the gradient of a norm scale as [D] where [1, D] is right (pytorch #178080,
    # open; seen with torch 2.11), so that the backward pass fails.
    "triton.mix_order_reduction": False,
}


@dataclass(frozen=True, slots=True)
class UpdatePlan:
    """What every update of a run has in common.

    Attributes:
        rows: Sequences of one update, over all local models.
        micro_rows: Sequences of one backward of one local model; divides rows / N, or exceeds it.
        grad_clip: Largest gradient norm of a local model, None for no limit.
        amp: Autocast type of matrix products, None for none.
        compiled: Whether forward and backward are compiled.
        generation: Group starts so far.
        members: Ranks or packed models that exchange, ascending.
    """

    rows: int
    micro_rows: int
    grad_clip: float | None
    amp: torch.dtype | None = None
    compiled: bool = False
    generation: int = 1
    members: tuple[int, ...] = (0,)


class Update:
    """Makes updates of one state from one loader, each from rest to rest."""

    def __init__(self, state: TrainState, loader: Loader, plan: UpdatePlan) -> None:
        """Wrap the model as its strategy wants; nothing is computed yet."""
        models = state.model.arena.num_models
        assert plan.rows % models == 0, (plan.rows, models)
        self._local_rows = plan.rows // models
        self._micro_rows = min(plan.micro_rows, self._local_rows)
        assert self._local_rows % self._micro_rows == 0, (self._local_rows, self._micro_rows)
        self._state, self._loader, self._plan = state, loader, plan
        self._device = state.model.arena.data_NP.device
        module = state.strategy.wrap(state.model)
        # dynamic=False: every microbatch of a run has one shape.
        self._module: Callable[..., tuple[Tensor, Tensor]] = (
            torch.compile(module, dynamic=False, options=COMPILE_OPTIONS)
            if plan.compiled
            else module
        )
        self._guard = Guard(self._device)

    def run(self, *, lr: float) -> Traffic:
        """Make the next update; the device may still be at work on it when this returns.

        Args:
            lr: Rate of this update.

        Raises:
            NonFiniteError: A loss or gradient is not finite (on a CPU: of this update, which has
                then changed no weight; elsewhere `read` says so later).
            CacheError: The loader met damage or the end of its data.
        """
        state, plan = self._state, self._plan
        step = state.step + 1
        moment = Round(step, plan.generation, plan.members)
        loss_N = self._backward(state.cursor)
        traffic = state.strategy.before_update(moment)
        norm_N = gradient_norms(state.model.arena.grad_NP)
        if self._guard.note(step, state.cursor, loss_N, norm_N):
            self.read()
        clip = plan.grad_clip
        state.optimizer.step(
            lr=lr,
            step=step,
            factor_N=None if clip is None else clip_factors(norm_N, max_norm=clip),
            mixing=state.strategy.mixing(moment),
            skip=self._guard.skip,
        )
        if state.strategy.exchanges_after(step) and self._guard.tripped():
            self.read()
        traffic += state.strategy.after_update(moment)
        state.step, state.cursor = step, state.cursor + plan.rows
        return traffic

    def read(self) -> list[Scalars]:
        """Return the scalars of the updates since the last read; waits for the device.

        Raises:
            NonFiniteError: One of them is not finite; names the first such update and parameter.
                The state is then that before it.
        """
        found, bad = self._guard.read()
        if bad is None:
            return found
        self._state.step, self._state.cursor = bad.step - 1, bad.cursor
        raise_non_finite(bad, lambda: self._blame(bad))

    def weight(self, cursor: int) -> float:
        """Return the summed target weight of the update that begins at `cursor`."""
        return self._loader.weight(cursor, self._plan.rows)

    def _backward(self, cursor: int) -> Tensor:
        """Leave the gradients of one update in the arena and return the mean losses, [N]."""
        state, rows = self._state, self._local_rows
        models = state.model.arena.num_models
        local = [self._loader.weight(cursor + i * rows, rows) for i in range(models)]
        divisors = [
            state.strategy.loss_divisor(local_weight=weight, update_weight=sum(local))
            for weight in local
        ]
        state.model.zero_grad()
        loss_N = torch.zeros(models, device=self._device)
        for start in range(0, rows, self._micro_rows):
            batches = [
                self._loader.batch(cursor + i * rows + start, self._micro_rows)
                for i in range(models)
            ]
            last = start + self._micro_rows == rows
            with state.strategy.microbatch(last=last):
                with self._autocast():
                    sum_N, _ = self._module(*_stacked(batches))
                _scaled(sum_N, divisors).sum().backward()
            loss_N += _scaled(sum_N.detach(), local)
        return loss_N

    def _blame(self, bad: Scalars) -> list[tuple[int, str]]:
        """Return (local model, parameter) of every gradient of the bad update that is not finite.

        On a CPU its gradients are still there. Elsewhere later updates have overwritten them, but
        the weights have not moved since, so they can be computed again.
        """
        arena = self._state.model.arena
        if self._guard.skip is not None:
            self._backward(bad.cursor)
        return non_finite_names(arena.grad_NP, arena.slices)

    def _autocast(self) -> Any:
        if self._plan.amp is None:
            return nullcontext()
        return torch.autocast(self._device.type, dtype=self._plan.amp)


def _scaled(values_N: Tensor, divisors: list[float]) -> Tensor:
    """Divide each local model's value by its own number, without a copy to the device for one."""
    if len(divisors) == 1:
        return values_N / divisors[0]
    return values_N / values_N.new_tensor(divisors)


def _stacked(batches: list[Batch]) -> list[Tensor | None]:
    """Give the rows of N local models a leading N axis, in the order of `Llama.forward`."""
    columns = [
        (b.inputs_BT, b.targets_BT, b.weights_BT, b.positions_BT, b.documents_BT) for b in batches
    ]
    stacked: list[Tensor | None] = []
    for parts in zip(*columns, strict=True):
        given = [part for part in parts if part is not None]
        assert len(given) in (0, len(parts)), "all local models have a column, or none has"
        if not given:
            stacked.append(None)
        else:
            stacked.append(given[0].unsqueeze(0) if len(given) == 1 else torch.stack(given))
    return stacked

"""Gradients of one update: its rows by microbatch, forward and backward, the way the plan says.

Shapes: N local models, B rows of one microbatch, T tokens.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from atoll.data.batch import Batch, Loader
from atoll.model import gpu
from atoll.model.walk import Compiler, Walk
from atoll.train.capture import Columns
from atoll.train.plan import UpdatePlan
from atoll.train.state import TrainState

COMPILE_OPTIONS: dict[str, str | int | bool | Callable[..., Any]] = {
    # On CUDA it gives the gradient of a norm scale as [D] where [1, D] is right (pytorch #178080,
    # open; seen with torch 2.11), so that the backward pass fails.
    "triton.mix_order_reduction": False,
}


class Gradients:
    """Leaves the gradients of an update in the model's arena."""

    def __init__(self, state: TrainState, loader: Loader, plan: UpdatePlan) -> None:
        """Wrap the model as its strategy wants; nothing is computed yet."""
        models = state.model.arena.num_models
        assert plan.rows % models == 0, (plan.rows, models)
        self._local_rows = plan.rows // models
        self._micro_rows = min(plan.micro_rows, self._local_rows)
        assert self._local_rows % self._micro_rows == 0, (self._local_rows, self._micro_rows)
        self._state, self._loader, self._plan = state, loader, plan
        self._device = state.model.arena.data_NP.device
        module, compiler = state.strategy.wrap(state.model), _compiler(plan)
        self._module = module if compiler is None else compiler(module)
        self._walk: Walk | None = None
        if models > 1 and self._device.type == "cpu":
            self._walk = Walk(state.model, amp=plan.amp, compiler=compiler)
        # Neither goes through what a strategy wraps around the model.
        bare = plan.kernels or self._walk is not None
        assert module is state.model or not bare, "a wrapped model has no kernels and no walk"
        self._divisors = _Divisors(models, self._device)

    def microbatches(self, cursor: int) -> Iterator[Columns]:
        """Yield what the forward takes for each microbatch of the update that begins at `cursor`.

        Every local model reads rows of its own: model i those from cursor + i * rows / N on.
        """
        state, rows = self._state, self._local_rows
        models = state.model.arena.num_models
        local = [self._loader.weight(cursor + i * rows, rows) for i in range(models)]
        self._divisors.set(
            local,
            [
                state.strategy.loss_divisor(local_weight=weight, update_weight=sum(local))
                for weight in local
            ],
        )
        if self._micro_rows == rows:
            yield _folded(self._loader.batch(cursor, models * rows), models)
            return
        for start in range(0, rows, self._micro_rows):
            yield _stacked(
                [
                    self._loader.batch(cursor + i * rows + start, self._micro_rows)
                    for i in range(models)
                ]
            )

    def compute(self, microbatches: Iterable[Columns]) -> Tensor:
        """Leave the gradients of one update in the arena and return the mean losses, [N]."""
        state = self._state
        loss_N = torch.zeros(state.model.arena.num_models, device=self._device)
        count = self._local_rows // self._micro_rows
        for number, columns in enumerate(microbatches, start=1):
            with state.strategy.microbatch(last=number == count):
                sum_N = self._add(columns, first=number == 1)
            loss_N += sum_N / self._divisors.weight_N
        return loss_N

    def _add(self, columns: Columns, *, first: bool) -> Tensor:
        """Leave the gradients of one microbatch in the arena, the first alone, others added.

        Returns:
            Each model's weighted loss sum, [N].
        """
        model, divisor_N = self._state.model, self._divisors.loss_N
        inputs, targets, weights, positions, documents = columns
        if self._plan.kernels and documents is None:
            assert inputs is not None
            assert targets is not None
            return gpu.gradients(
                model, inputs, targets, weights, positions, divisor_N=divisor_N, add=not first
            )
        if first:
            model.zero_grad()
        if self._walk is not None:
            return self._walk.gradients(columns, divisor_N=divisor_N)
        with self._autocast():
            sum_N, _ = self._module(*columns)
        (sum_N / divisor_N).sum().backward()
        return sum_N.detach()

    def _autocast(self) -> AbstractContextManager[object]:
        if self._plan.amp is None:
            return nullcontext()
        return torch.autocast(self._device.type, dtype=self._plan.amp)


def _compiler(plan: UpdatePlan) -> Compiler | None:
    if not plan.compiled:
        return None
    # dynamic=False: every microbatch of a run has one shape.
    return partial(torch.compile, dynamic=False, options=COMPILE_OPTIONS)


class _Divisors:
    """What losses are divided by, where kernels read it; written only when it changes.

    Attributes:
        weight_N: float32 weights of each local model's rows: a loss divided by it is a mean.
        loss_N: float32 divisors of the loss sums that gradients are formed of.
    """

    def __init__(self, num_models: int, device: torch.device) -> None:
        self.weight_N = torch.ones(num_models, device=device)
        self.loss_N = torch.ones(num_models, device=device)
        self._held: tuple[list[float], list[float]] = ([], [])

    def set(self, weights: list[float], divisors: list[float]) -> None:
        """Hold these, one for each local model; does not wait for the device."""
        if self._held == (weights, divisors):
            return
        self._held = (weights, divisors)
        for place_N, values in ((self.weight_N, weights), (self.loss_N, divisors)):
            for place, value in zip(place_N, values, strict=True):
                place.fill_(value)


def _folded(batch: Batch, models: int) -> Columns:
    """Give consecutive rows a leading axis of N local models, without a copy."""
    columns = (
        batch.inputs_BT,
        batch.targets_BT,
        batch.weights_BT,
        batch.positions_BT,
        batch.documents_BT,
    )
    return [None if c is None else c.unflatten(0, (models, -1)) for c in columns]


def _stacked(batches: list[Batch]) -> Columns:
    """Give the rows of N local models a leading N axis, in the order of `Llama.forward`."""
    columns = [
        (b.inputs_BT, b.targets_BT, b.weights_BT, b.positions_BT, b.documents_BT) for b in batches
    ]
    stacked: Columns = []
    for parts in zip(*columns, strict=True):
        given = [part for part in parts if part is not None]
        assert len(given) in (0, len(parts)), "all local models have a column, or none has"
        if not given:
            stacked.append(None)
        else:
            stacked.append(given[0].unsqueeze(0) if len(given) == 1 else torch.stack(given))
    return stacked

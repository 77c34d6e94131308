"""One update: microbatches, gradients, clipping, the optimizer, and what the strategy adds.

Shapes: N local models, B rows of one microbatch, T tokens.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from atoll.data.batch import Batch, Loader
from atoll.model import gpu
from atoll.model.walk import Compiler, Walk
from atoll.optim.clip import clip_factors, gradient_norms, non_finite_names
from atoll.strategy.base import Round, Traffic
from atoll.train.capture import WARM_UPDATES, Capture, Columns
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
        kernels: Whether forward and backward go through `atoll.model.gpu`, in bfloat16, wherever
            rows carry no document numbers.
        captured: Whether the whole update is recorded as a CUDA graph; the optimizer then has its
            kernels, and the strategy exchanges nothing but what its `mixing` says.
        generation: Group starts so far.
        members: Ranks or packed models that exchange, ascending.
    """

    rows: int
    micro_rows: int
    grad_clip: float | None
    amp: torch.dtype | None = None
    compiled: bool = False
    kernels: bool = False
    captured: bool = False
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
        compiler = _compiler(plan)
        self._module = module if compiler is None else compiler(module)
        self._walk: Walk | None = None
        if models > 1 and self._device.type == "cpu":
            self._walk = Walk(state.model, amp=plan.amp, compiler=compiler)
        self._guard = Guard(self._device)
        self._divisors = _Divisors(models, self._device)
        self._capture: Capture | None = None
        self._warm = 0

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
        microbatches = self._microbatches(state.cursor)
        if plan.captured:
            traffic = self._run_captured(microbatches, moment, lr)
        else:
            traffic = self._run_plain(microbatches, moment, lr)
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

    def _run_plain(self, microbatches: Iterable[Columns], moment: Round, lr: float) -> Traffic:
        state = self._state
        loss_N = self._backward(microbatches)
        traffic = state.strategy.before_update(moment)
        scalars_2N = self._judge(loss_N)
        if self._guard.note(moment.step, state.cursor, scalars_2N):
            self.read()
        state.optimizer.step(
            lr=lr,
            step=moment.step,
            factor_N=self._clip_factors(scalars_2N),
            mixing=state.strategy.mixing(moment),
            skip=self._guard.skip,
        )
        return traffic

    def _run_captured(self, microbatches: Iterable[Columns], moment: Round, lr: float) -> Traffic:
        """Make the update by replaying a graph, which holds all but what depends on the step."""
        state = self._state

        def work(columns: list[Columns]) -> Tensor:
            scalars_2N = self._judge(self._backward(columns))
            state.optimizer.apply(
                factor_N=self._clip_factors(scalars_2N),
                mixing=state.strategy.mixing(moment),
                skip=self._guard.skip,
            )
            return scalars_2N

        traffic = state.strategy.before_update(moment)
        state.optimizer.prepare(lr=lr, step=moment.step)
        columns = list(microbatches)
        if self._warm < WARM_UPDATES:
            self._warm += 1
            scalars_2N = work(columns)
        else:
            self._capture = self._capture or Capture(columns, work)
            scalars_2N = self._capture.run(columns)
        self._guard.note(moment.step, state.cursor, scalars_2N)
        return traffic

    def _microbatches(self, cursor: int) -> Iterator[Columns]:
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

    def _backward(self, microbatches: Iterable[Columns]) -> Tensor:
        """Leave the gradients of one update in the arena and return the mean losses, [N]."""
        state = self._state
        loss_N = torch.zeros(state.model.arena.num_models, device=self._device)
        count = self._local_rows // self._micro_rows
        for number, columns in enumerate(microbatches, start=1):
            with state.strategy.microbatch(last=number == count):
                sum_N = self._gradients(columns, first=number == 1)
            loss_N += sum_N / self._divisors.weight_N
        return loss_N

    def _gradients(self, columns: Columns, *, first: bool) -> Tensor:
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

    def _judge(self, loss_N: Tensor) -> Tensor:
        """Return losses and gradient norms, [2, N]; a bad one holds the weights still."""
        scalars_2N = torch.stack((loss_N, gradient_norms(self._state.model.arena.grad_NP)))
        self._guard.mark(scalars_2N)
        return scalars_2N

    def _clip_factors(self, scalars_2N: Tensor) -> Tensor | None:
        max_norm = self._plan.grad_clip
        return None if max_norm is None else clip_factors(scalars_2N[1], max_norm=max_norm)

    def _blame(self, bad: Scalars) -> list[tuple[int, str]]:
        """Return (local model, parameter) of every gradient of the bad update that is not finite.

        On a CPU its gradients are still there. Elsewhere later updates have overwritten them, but
        the weights have not moved since, so they can be computed again.
        """
        arena = self._state.model.arena
        if self._guard.skip is not None:
            self._backward(self._microbatches(bad.cursor))
        return non_finite_names(arena.grad_NP, arena.slices)

    def _autocast(self) -> Any:
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

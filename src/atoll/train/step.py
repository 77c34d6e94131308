"""One update: gradients, clipping, the optimizer, and what the strategy adds.

Shapes: N local models.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from atoll.data.batch import Loader
from atoll.optim.clip import clip_factors, gradient_norms, non_finite_names
from atoll.strategy.base import Round, Traffic
from atoll.train.capture import WARM_UPDATES, Capture, Columns
from atoll.train.gradients import Gradients
from atoll.train.guard import Guard, Scalars, raise_non_finite
from atoll.train.plan import UpdatePlan
from atoll.train.state import TrainState


class Update:
    """Makes updates of one state from one loader, each from rest to rest."""

    def __init__(self, state: TrainState, loader: Loader, plan: UpdatePlan) -> None:
        """Wrap the model as its strategy wants; nothing is computed yet."""
        self._state, self._loader, self._plan = state, loader, plan
        self._gradients = Gradients(state, loader, plan)
        self._guard = Guard(state.model.arena.data_NP.device)
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
        microbatches = self._gradients.microbatches(state.cursor)
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
        loss_N = self._gradients.compute(microbatches)
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
            scalars_2N = self._judge(self._gradients.compute(columns))
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
            self._gradients.compute(self._gradients.microbatches(bad.cursor))
        return non_finite_names(arena.grad_NP, arena.slices)

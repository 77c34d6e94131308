"""The training loop: a generator that makes updates and yields at rest after each."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import perf_counter

from atoll.config.optimizer import LrScheduleConfig, OptimizerConfig
from atoll.data.batch import Loader
from atoll.faults import reach
from atoll.optim.schedule import learning_rate
from atoll.strategy.base import Traffic
from atoll.train.guard import Scalars
from atoll.train.plan import UpdatePlan
from atoll.train.state import TrainState
from atoll.train.step import Update


@dataclass(frozen=True, slots=True)
class TrainPlan:
    """A whole run, as far as the loop needs it.

    Attributes:
        total_steps: Updates of the whole run.
        update: What every update has in common.
        optimizer: Peak rate.
        schedule: How the rate changes.
        log_every: Updates between two reads of the device's scalars.
        rest_steps: Updates after which the caller evaluates or saves; scalars are read there too,
            so that nothing is ever judged or kept after a bad update.
    """

    total_steps: int
    update: UpdatePlan
    optimizer: OptimizerConfig
    schedule: LrScheduleConfig
    log_every: int
    rest_steps: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Window:
    """What is known about the updates since the last read.

    Attributes:
        scalars: Loss and gradient norm of each update.
        targets: Summed target weight of these updates.
        seconds: Time they took, without what the caller did at rest.
    """

    scalars: list[Scalars]
    targets: float
    seconds: float

    @property
    def loss_nats_per_token(self) -> float:
        """Mean loss over the updates and local models of the window."""
        losses = [loss for scalars in self.scalars for loss in scalars.losses]
        return sum(losses) / len(losses)

    @property
    def targets_per_second(self) -> float:
        return self.targets / self.seconds


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One finished update; the state is at rest and may be read, saved or evaluated.

    Attributes:
        step: Its number.
        cursor: Rows consumed so far.
        lr: Its rate.
        traffic: What its exchanges sent.
        window: The updates since the last read, where this update ends with a read.
    """

    step: int
    cursor: int
    lr: float
    traffic: Traffic
    window: Window | None


def train(
    state: TrainState,
    loader: Loader,
    plan: TrainPlan,
    *,
    should_stop: Callable[[], bool] = lambda: False,
    clock: Callable[[], float] = perf_counter,
) -> Iterator[StepRecord]:
    """Make updates from `state.step` + 1 on and yield after each, until the plan or a stop ends it.

    Between two yields nothing waits for the device except at a read: every `log_every` updates,
    at `rest_steps`, at the last update, and when `should_stop` says so after an update, which is
    then the last one.

    Args:
        state: Changed in place; at rest whenever the caller has control.
        loader: Gives the rows; stays open.
        plan: The run.
        should_stop: Asked after each update.
        clock: Seconds from any origin.

    Raises:
        NonFiniteError: A loss or a gradient is not finite; the state is that before the update.
        CacheError: The loader met damage or the end of its data.
    """
    update = Update(state, loader, plan.update)
    targets, started = 0.0, clock()
    while state.step < plan.total_steps:
        rate = learning_rate(
            state.step + 1,
            total_steps=plan.total_steps,
            optimizer=plan.optimizer,
            schedule=plan.schedule,
        )
        targets += update.weight(state.cursor)
        traffic = update.run(lr=rate)
        step = state.step
        reach("train.after_update")
        stopping = should_stop()
        window = None
        if (
            stopping
            or step % plan.log_every == 0
            or step in plan.rest_steps
            or step == plan.total_steps
        ):
            scalars = update.read()
            window = Window(scalars, targets, clock() - started)
            targets, started = 0.0, clock()
        rested = clock()
        yield StepRecord(step, state.cursor, rate, traffic, window)
        started += clock() - rested
        if stopping:
            return

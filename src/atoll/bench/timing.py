"""Wall time of one window of work, and how many calls make a window worth timing."""

import gc
import math
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter


@dataclass(frozen=True, slots=True)
class Stopwatch:
    """How windows are timed; a test gives its own.

    Attributes:
        clock: Returns seconds from any fixed moment.
        settle: Runs before each window, untimed, so that none pays for another's garbage.
    """

    clock: Callable[[], float] = perf_counter
    settle: Callable[[], object] = gc.collect


SYSTEM = Stopwatch()
"""Wall time, after a garbage collection."""


def nothing() -> None:
    """Do nothing: the reset of work that leaves nothing behind."""


@dataclass(frozen=True, slots=True)
class Condition:
    """One of two things that are compared.

    Attributes:
        name: Shown in results.
        work: One call of what is timed; finishes all it starts, device work included.
        reset: Runs before each window, untimed.
    """

    name: str
    work: Callable[[], object]
    reset: Callable[[], object] = nothing


def time_window(condition: Condition, *, repeats: int, stopwatch: Stopwatch) -> float:
    """Return the wall seconds of `repeats` calls, after the reset."""
    return time_halves(condition, repeats=repeats, stopwatch=stopwatch)[0]


def time_halves(
    condition: Condition, *, repeats: int, stopwatch: Stopwatch
) -> tuple[float, float | None]:
    """Return the wall seconds of `repeats` calls and of the first half of them, after the reset.

    The half is None where there is one call only. The garbage collector stays on: what it costs
    belongs to the work that made the garbage.
    """
    condition.reset()
    stopwatch.settle()
    work, clock = condition.work, stopwatch.clock
    started = clock()
    if repeats < 2:
        work()
        return clock() - started, None
    half = repeats // 2
    for _ in range(half):
        work()
    middle = clock()
    for _ in range(repeats - half):
        work()
    return clock() - started, middle - started


def calls_per_window(
    conditions: list[Condition], *, window_seconds: float, stopwatch: Stopwatch
) -> int:
    """Warm every condition up and return how many calls of the fastest fill `window_seconds`.

    All conditions get the same number, so that windows of one block hold equal work.

    Args:
        conditions: Each is called twice: the first call, which may compile, does not count.
        window_seconds: Shortest window that is wanted.
    """
    fastest_seconds = math.inf
    for condition in conditions:
        time_window(condition, repeats=1, stopwatch=stopwatch)
        fastest_seconds = min(
            fastest_seconds, time_window(condition, repeats=1, stopwatch=stopwatch)
        )
    if fastest_seconds <= 0:
        return 1000
    return max(1, math.ceil(window_seconds / fastest_seconds))

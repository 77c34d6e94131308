"""Two conditions in counterbalanced windows, and what their blocks say about the ratio of times.

The unit of evidence is the block (ABBA or BAAB): d = mean log time of its two A windows minus mean
log time of its two B windows. The ratio of times is exp(mean d), its interval comes from Student's
t over blocks. Windows inside a block are not independent, so they make no interval of their own.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev
from typing import Literal

from atoll.bench.order import Block
from atoll.bench.timing import SYSTEM, Condition, Stopwatch, time_halves

Letter = Literal["A", "B"]

VOID_FACTOR = 2.0
VOID_RULE = (
    f"A block is void if any of its windows took more than {VOID_FACTOR:g} times the median window "
    "of the same condition; declared before the run. The ratio over all blocks is given beside it."
)


@dataclass(frozen=True, slots=True)
class Sample:
    """One timed window.

    Attributes:
        block: Number of its block, counted from 0.
        position: Place in the block, 0 to 3.
        condition: A or B.
        seconds: Wall time of the window.
        first_half_seconds: Wall time of the first half of its calls; None where it was one call.
    """

    block: int
    position: int
    condition: Letter
    seconds: float
    first_half_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Interval:
    """A ratio of times, A over B, and its interval.

    Attributes:
        ratio: Geometric mean over blocks.
        low: Lower end; 0 where fewer than two blocks make no interval.
        high: Upper end; infinite where fewer than two blocks make no interval.
        level: Confidence, 0 < level < 1.
        num_blocks: Blocks that it comes from.
    """

    ratio: float
    low: float
    high: float
    level: float
    num_blocks: int

    def covers(self, ratio: float) -> bool:
        """Whether `ratio` lies inside or on the border."""
        return self.low <= ratio <= self.high

    def inverse(self) -> "Interval":
        """The same for B over A: of times it makes speeds."""
        high = math.inf if self.low == 0 else 1 / self.low
        return Interval(1 / self.ratio, 1 / self.high, high, self.level, self.num_blocks)


def run_blocks(
    a: Condition,
    b: Condition,
    *,
    order: Sequence[Block],
    repeats: int,
    stopwatch: Stopwatch = SYSTEM,
    after_block: Callable[[int], object] = lambda done: None,
) -> list[Sample]:
    """Time `a` and `b` in the given order; every window is kept.

    Args:
        a: Condition A.
        b: Condition B; may be `a` itself (an A/A run).
        order: From `atoll.bench.order.counterbalanced`.
        repeats: Calls in each window.
        after_block: Told the number of finished blocks.
    """
    samples: list[Sample] = []
    for number, block in enumerate(order):
        for position, letter in enumerate(block):
            condition, name = (a, "A") if letter == "A" else (b, "B")
            seconds, half = time_halves(condition, repeats=repeats, stopwatch=stopwatch)
            samples.append(Sample(number, position, name, seconds, half))
        after_block(number + 1)
    return samples


def void_blocks(samples: Sequence[Sample]) -> list[int]:
    """Return the blocks that `VOID_RULE` leaves out, ascending."""
    limits = {
        letter: VOID_FACTOR * median(s.seconds for s in samples if s.condition == letter)
        for letter in ("A", "B")
    }
    return sorted({s.block for s in samples if s.seconds > limits[s.condition]})


def block_log_ratios(samples: Sequence[Sample], *, leave_out: Sequence[int] = ()) -> list[float]:
    """Return mean log time of A minus that of B for each block, in order."""
    blocks: dict[int, dict[Letter, list[float]]] = {}
    for sample in samples:
        if sample.block not in leave_out:
            times = blocks.setdefault(sample.block, {"A": [], "B": []})
            times[sample.condition].append(math.log(sample.seconds))
    return [fmean(blocks[number]["A"]) - fmean(blocks[number]["B"]) for number in sorted(blocks)]


def ratio_interval(log_ratios: Sequence[float], *, level: float = 0.95) -> Interval:
    """Return the geometric mean ratio with Student's t interval over blocks.

    Args:
        log_ratios: One for each block; at least 1, and 2 for an interval.
        level: Confidence, 0 < level < 1.
    """
    from scipy.stats import t  # 0.5 s of import that `--help` does not need

    count = len(log_ratios)
    middle = fmean(log_ratios)
    if count < 2:
        return Interval(math.exp(middle), 0.0, math.inf, level, count)
    reach = float(t.ppf(0.5 + level / 2, count - 1)) * stdev(log_ratios) / math.sqrt(count)
    low, high = math.exp(middle - reach), math.exp(middle + reach)
    return Interval(math.exp(middle), low, high, level, count)

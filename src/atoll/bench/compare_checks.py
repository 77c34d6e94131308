"""What could make a ratio wrong although its interval is narrow: carry-over and position.

Windows 1 and 2 of a block are of one condition; window 1 always follows the other condition and
window 2 always follows its own. So log time 1 minus log time 2 is B's carry-over plus an effect of
position in ABBA, A's carry-over plus the same effect in BAAB. Their difference is free of position,
and only that difference shifts the ratio: what both conditions leave behind alike cancels.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import fmean, variance
from typing import Any

from atoll.bench.compare import Interval, Letter, Sample, block_log_ratios, ratio_interval

CHECK_LEVEL = 0.99
"""Confidence of every check, so that an honest run is doubted once in a hundred."""

FEWEST_FOR_SERIAL = 8
"""Blocks that a correlation of neighbours needs."""


@dataclass(frozen=True, slots=True)
class Checks:
    """What was found beside the ratio; all in ratios of times, where 1 means no effect.

    Attributes:
        carry_over: A's time after B over its time after A, divided by the same of B.
        shift: What that does to the ratio of times A over B.
        late_start: Carry-over that fades inside a window, by condition: how much more of a window's
            time its first half takes after the other condition than after its own. None: one call.
        trend: Time of the last two windows of a block over that of the first two.
        outer: Time of windows 0 and 3 over that of windows 1 and 2, whatever the condition.
        outer_shift: What that does to the ratio of times, as ABBA and BAAB are not equally many.
        a_slower: Blocks in which A took longer.
        sign_p: Two-sided exact probability of such a split, or a less even one, by a fair coin.
        serial: Correlation of the ratios of neighbouring blocks; None for too few blocks.
    """

    carry_over: Interval
    shift: Interval
    late_start: dict[Letter, Interval | None]
    trend: Interval
    outer: Interval
    outer_shift: float
    a_slower: int
    sign_p: float
    serial: float | None

    def doubts(self) -> list[str]:
        """Return what speaks against the ratio, one line each."""
        lines = []
        if not self.shift.covers(1.0):
            lines.append(
                f"carry-over: what runs before changes A and B unequally, and moves the ratio of "
                f"times by {100 * (self.shift.ratio - 1):+.2f}%; use longer windows"
            )
        blocks = self.trend.num_blocks
        if self.serial is not None and self.serial > 2 / math.sqrt(blocks):
            lines.append(
                f"neighbouring blocks are alike (correlation {self.serial:.2f}): they say less "
                "than their number, and the interval is too narrow"
            )
        return lines


def check(samples: Sequence[Sample], *, leave_out: Sequence[int] = ()) -> Checks:
    """Return the checks of one run of blocks.

    Args:
        samples: Whole blocks, in the order in which they ran.
        leave_out: Void blocks.
    """
    from scipy.stats import binomtest  # 0.5 s of import that `--help` does not need

    blocks = [block for block in _blocks(samples) if block[0].block not in leave_out]
    by_first: dict[Letter, list[list[Sample]]] = {"A": [], "B": []}
    for block in blocks:
        by_first[block[0].condition].append(block)
    inner_a, inner_b = ([_inner(block) for block in by_first[letter]] for letter in ("B", "A"))
    carried = difference_interval(inner_a, inner_b)
    ratios = {
        letter: [_mean_log(block, "A") - _mean_log(block, "B") for block in by_first[letter]]
        for letter in ("A", "B")
    }
    outer = _power(difference_interval(ratios["A"], ratios["B"]), 0.5)
    uneven = (len(ratios["A"]) - len(ratios["B"])) / max(1, len(blocks))
    log_ratios = block_log_ratios(samples, leave_out=leave_out)
    slower = sum(ratio > 0 for ratio in log_ratios)
    unequal = sum(ratio != 0 for ratio in log_ratios)
    return Checks(
        carry_over=carried,
        shift=_power(carried, _switched_share(samples)),
        late_start={"A": _late_start(by_first["B"]), "B": _late_start(by_first["A"])},
        trend=ratio_interval([_trend(block) for block in blocks], level=CHECK_LEVEL),
        outer=outer,
        outer_shift=outer.ratio**uneven,
        a_slower=slower,
        sign_p=float(binomtest(slower, unequal).pvalue) if unequal else 1.0,
        serial=_serial(log_ratios),
    )


def difference_interval(
    ours: Sequence[float], theirs: Sequence[float], *, level: float = CHECK_LEVEL
) -> Interval:
    """Return exp(mean of `ours` - mean of `theirs`) with Welch's interval.

    Args:
        ours: Logarithms from blocks of one order.
        theirs: Those from blocks of the other; fewer than 2 of either make no interval.
        level: Confidence, 0 < level < 1.
    """
    from scipy.stats import t

    count = len(ours) + len(theirs)
    if not ours or not theirs:
        return Interval(1.0, 0.0, math.inf, level, count)
    middle = fmean(ours) - fmean(theirs)
    if min(len(ours), len(theirs)) < 2:
        return Interval(math.exp(middle), 0.0, math.inf, level, count)
    parts = [variance(side) / len(side) for side in (ours, theirs)]
    error = math.sqrt(sum(parts))
    if error == 0:
        return Interval(math.exp(middle), math.exp(middle), math.exp(middle), level, count)
    freedom = sum(parts) ** 2 / sum(
        part**2 / (len(side) - 1) for part, side in zip(parts, (ours, theirs), strict=True)
    )
    reach = float(t.ppf(0.5 + level / 2, freedom)) * error
    low, high = math.exp(middle - reach), math.exp(middle + reach)
    return Interval(math.exp(middle), low, high, level, count)


def checks_record(checks: Checks) -> dict[str, Any]:
    """Return the checks as JSON values; an end without a bound is None."""
    return {
        "carry_over": interval_record(checks.carry_over),
        "carry_over_shifts_time_ratio": interval_record(checks.shift),
        "carry_over_inside_windows": {
            letter: None if found is None else interval_record(found)
            for letter, found in checks.late_start.items()
        },
        "last_half_of_block_over_first": interval_record(checks.trend),
        "outer_windows_over_inner": interval_record(checks.outer),
        "outer_windows_shift_time_ratio": checks.outer_shift,
        "blocks_with_a_slower": checks.a_slower,
        "sign_test_p": checks.sign_p,
        "correlation_of_neighbouring_blocks": checks.serial,
        "doubts": checks.doubts(),
    }


def interval_record(interval: Interval) -> dict[str, Any]:
    """Return an interval as JSON values; an end without a bound is None."""
    high = None if math.isinf(interval.high) else interval.high
    return {**asdict(interval), "high": high}


def _blocks(samples: Sequence[Sample]) -> list[list[Sample]]:
    blocks: dict[int, list[Sample]] = {}
    for sample in samples:
        blocks.setdefault(sample.block, []).append(sample)
    return [blocks[number] for number in sorted(blocks)]


def _inner(block: Sequence[Sample]) -> float:
    return math.log(block[1].seconds) - math.log(block[2].seconds)


def _mean_log(block: Sequence[Sample], letter: Letter) -> float:
    return fmean(math.log(sample.seconds) for sample in block if sample.condition == letter)


def _trend(block: Sequence[Sample]) -> float:
    logs = [math.log(sample.seconds) for sample in block]
    return (logs[2] + logs[3] - logs[0] - logs[1]) / 2


def _late_start(blocks: Sequence[Sequence[Sample]]) -> Interval | None:
    contrasts = []
    for block in blocks:
        halves = [_first_over_second(sample) for sample in block[1:3]]
        if halves[0] is None or halves[1] is None:
            return None
        contrasts.append(halves[0] - halves[1])
    return ratio_interval(contrasts, level=CHECK_LEVEL) if contrasts else None


def _first_over_second(sample: Sample) -> float | None:
    first = sample.first_half_seconds
    if first is None or not 0 < first < sample.seconds:
        return None
    return math.log(first) - math.log(sample.seconds - first)


def _switched_share(samples: Sequence[Sample]) -> float:
    """Return the share of windows that follow the other condition, as a mean over A and B."""
    followed: dict[Letter, list[bool]] = {"A": [], "B": []}
    for before, sample in pairwise(samples):
        followed[sample.condition].append(before.condition != sample.condition)
    return fmean(fmean(switched) for switched in followed.values())


def _serial(log_ratios: Sequence[float]) -> float | None:
    if len(log_ratios) < FEWEST_FOR_SERIAL:
        return None
    middle = fmean(log_ratios)
    deviations = [ratio - middle for ratio in log_ratios]
    total = sum(deviation**2 for deviation in deviations)
    if total == 0:
        return None
    return sum(one * other for one, other in pairwise(deviations)) / total


def _power(interval: Interval, exponent: float) -> Interval:
    """Return the interval of the ratio raised to a power; 0 < exponent."""
    low, high = interval.low**exponent, interval.high**exponent
    return Interval(interval.ratio**exponent, low, high, interval.level, interval.num_blocks)

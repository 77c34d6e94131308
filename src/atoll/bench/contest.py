"""One contest: A/A first, then A against B, a verdict, and the record of all of it."""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from atoll.bench.compare import (
    Interval,
    Sample,
    block_log_ratios,
    carry_over,
    ratio_interval,
    run_blocks,
    void_blocks,
)
from atoll.bench.order import Block, counterbalanced
from atoll.bench.timing import SYSTEM, Condition, Stopwatch, calls_per_window

Verdict = Literal["pass", "fail", "undecided", "void", "measured"]

AA_LEVEL = 0.99
LARGEST_VOID_SHARE = 1 / 3
VERDICT_RULE = (
    "void: the 99% interval of A/A leaves out 1, or more than a third of its or of A/B's blocks "
    "are void; "
    "pass or fail: the whole 95% interval lies on that side of the target; undecided: it holds "
    "the target; measured: there is no target."
)


@dataclass(frozen=True, slots=True)
class Target:
    """What the ratio has to reach.

    Attributes:
        quantity: `speed`, A's over B's, at least `bound`; or `time`, A's over B's, at most `bound`.
        bound: The ratio.
    """

    quantity: Literal["speed", "time"]
    bound: float


@dataclass(frozen=True, slots=True)
class Contest:
    """Two conditions that do equal work.

    Attributes:
        name: What is compared, in a few words.
        a: Ours.
        b: The alternative.
        target: What the ratio has to reach, or None to measure only.
        window_seconds: Shortest window; 0 makes every window one call.
        facts: What was checked or chosen before timing; JSON values.
    """

    name: str
    a: Condition
    b: Condition
    target: Target | None = None
    window_seconds: float = 0.0
    facts: dict[str, Any] = field(default_factory=dict)


def hold_contest(
    contest: Contest,
    *,
    seed: int,
    num_blocks: int,
    stopwatch: Stopwatch = SYSTEM,
    note: Callable[[str], object] = lambda line: None,
) -> dict[str, Any]:
    """Measure a contest and return its record, A/A first, every sample in it.

    Args:
        contest: What to compare.
        seed: Decides both orders.
        num_blocks: Blocks of A against B; A/A gets half as many, at least 4.
        note: Takes lines for people.
    """
    aa_order = counterbalanced(seed, max(4, num_blocks // 2), purpose="A/A")
    ab_order = counterbalanced(seed, num_blocks, purpose="A/B")
    both = [contest.a, contest.b]
    repeats = calls_per_window(both, window_seconds=contest.window_seconds, stopwatch=stopwatch)
    aa = run_blocks(contest.a, contest.a, order=aa_order, repeats=repeats, stopwatch=stopwatch)
    aa_record = _record(aa, aa_order, quantity="time", level=AA_LEVEL)
    note(f"{contest.name}: A/A {_words(_interval(aa, AA_LEVEL))}, {repeats} calls a window")
    ab = run_blocks(contest.a, contest.b, order=ab_order, repeats=repeats, stopwatch=stopwatch)
    quantity = contest.target.quantity if contest.target else "speed"
    verdict = judge(aa, ab, contest.target)
    interval = _oriented(_interval(ab, 0.95), quantity)
    note(
        f"{contest.name}: {quantity} of {contest.a.name} / {contest.b.name} {_words(interval)}"
        f"{_aim(contest.target)}: {verdict}"
    )
    return {
        "name": contest.name,
        "a": contest.a.name,
        "b": contest.b.name,
        "facts": contest.facts,
        "calls_per_window": repeats,
        "target": dataclasses.asdict(contest.target) if contest.target else None,
        "a_a": aa_record,
        "a_b": _record(ab, ab_order, quantity=quantity, level=0.95),
        "verdict": verdict,
    }


def judge(aa: list[Sample], ab: list[Sample], target: Target | None) -> Verdict:
    """Return the verdict of a contest; see `VERDICT_RULE`."""
    too_many_void = any(
        len(void_blocks(samples)) > LARGEST_VOID_SHARE * (samples[-1].block + 1)
        for samples in (aa, ab)
    )
    if too_many_void or not _interval(aa, AA_LEVEL).covers(1.0):
        return "void"
    if target is None:
        return "measured"
    found = _oriented(_interval(ab, 0.95), target.quantity)
    if target.quantity == "speed":
        reached, missed = found.low >= target.bound, found.high < target.bound
    else:
        reached, missed = found.high <= target.bound, found.low > target.bound
    return "pass" if reached else "fail" if missed else "undecided"


def _interval(samples: list[Sample], level: float) -> Interval:
    log_ratios = block_log_ratios(samples, leave_out=void_blocks(samples))
    return ratio_interval(log_ratios, level=level)


def _oriented(times: Interval, quantity: str) -> Interval:
    return times.inverse() if quantity == "speed" else times


def _record(
    samples: list[Sample], order: list[Block], *, quantity: str, level: float
) -> dict[str, Any]:
    everything = ratio_interval(block_log_ratios(samples), level=level)
    return {
        "order": order,
        "ratio_of": quantity,
        "ratio": _numbers(_oriented(_interval(samples, level), quantity)),
        "void_blocks": void_blocks(samples),
        "ratio_with_void_blocks": _numbers(_oriented(everything, quantity)),
        "block_log_time_ratios": block_log_ratios(samples),
        "carry_over": carry_over(samples),
        "samples": [dataclasses.astuple(sample) for sample in samples],
    }


def _numbers(interval: Interval) -> dict[str, Any]:
    high = None if math.isinf(interval.high) else interval.high
    return {**dataclasses.asdict(interval), "high": high}


def _words(interval: Interval) -> str:
    ends = f"[{interval.low:.3f}, {interval.high:.3f}]"
    return f"{interval.ratio:.3f} {ends} over {interval.num_blocks} blocks"


def _aim(target: Target | None) -> str:
    if target is None:
        return ""
    return f", target {'>=' if target.quantity == 'speed' else '<='} {target.bound:g}"

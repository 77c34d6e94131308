"""One contest: A/A first, then A against B, a verdict, and the record of all of it."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from atoll.bench.compare import (
    Interval,
    Sample,
    block_log_ratios,
    ratio_interval,
    run_blocks,
    void_blocks,
)
from atoll.bench.compare_checks import check, checks_record, interval_record
from atoll.bench.order import Block, counterbalanced
from atoll.bench.timing import (
    SYSTEM,
    Condition,
    Stopwatch,
    calls_per_window,
    nothing,
    time_window,
)

Verdict = Literal["pass", "fail", "undecided", "too few", "void", "measured"]
Finding = Literal["slower", "faster", "undecided", "too few", "void"]

AA_LEVEL = 0.99
AB_LEVEL = 0.95
LARGEST_VOID_SHARE = 1 / 3
FEWEST_BLOCKS = 4
"""Sound blocks of A/B that decide something."""

VERDICT_RULE = (
    "void: the 99% interval of A/A leaves out 1, or more than a third of its or of A/B's blocks "
    f"are void; too few: fewer than {FEWEST_BLOCKS} blocks of A/B are sound; "
    "pass or fail: the whole 95% interval lies on that side of the target; undecided: it holds "
    "the target; measured: there is no target. The finding about A is slower or faster where the "
    "whole 95% interval lies on that side of 1, and undecided, too few or void as above."
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
        meet: Runs between A/A and A/B, untimed: brings B to where A has come.
        outcome: Asked after timing for what came out; JSON values.
    """

    name: str
    a: Condition
    b: Condition
    target: Target | None = None
    window_seconds: float = 0.0
    facts: dict[str, Any] = field(default_factory=dict)
    meet: Callable[[], object] = nothing
    outcome: Callable[[], dict[str, Any]] = dict


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
    aa_order = counterbalanced(seed, num_aa_blocks(num_blocks), purpose="A/A")
    ab_order = counterbalanced(seed, num_blocks, purpose="A/B")
    both = [contest.a, contest.b]
    repeats = calls_per_window(both, window_seconds=contest.window_seconds, stopwatch=stopwatch)
    # A whole window of each that does not count comes first: a call or two are no window's warmth.
    warm_up = {"A": time_window(contest.a, repeats=repeats, stopwatch=stopwatch)}
    aa = run_blocks(contest.a, contest.a, order=aa_order, repeats=repeats, stopwatch=stopwatch)
    note(f"{contest.name}: A/A {_words(sound_interval(aa, AA_LEVEL))}, {repeats} calls a window")
    contest.meet()
    warm_up["B"] = time_window(contest.b, repeats=repeats, stopwatch=stopwatch)
    ab = run_blocks(contest.a, contest.b, order=ab_order, repeats=repeats, stopwatch=stopwatch)
    quantity = contest.target.quantity if contest.target else "speed"
    verdict = judge(aa, ab, contest.target)
    record = {
        "name": contest.name,
        "a": contest.a.name,
        "b": contest.b.name,
        "facts": contest.facts,
        "calls_per_window": repeats,
        "warm_up_seconds": warm_up,
        "target": dataclasses.asdict(contest.target) if contest.target else None,
        "a_a": _record(aa, aa_order, quantity="time", level=AA_LEVEL),
        "a_b": _record(ab, ab_order, quantity=quantity, level=AB_LEVEL),
        "outcome": contest.outcome(),
        "finding": finding(aa, ab),
        "void_reasons": void_reasons(aa, ab),
        "verdict": verdict,
    }
    _tell(contest, record, _oriented(sound_interval(ab, AB_LEVEL), quantity), note)
    return record


def num_aa_blocks(num_blocks: int) -> int:
    """Return the blocks of A/A that come before `num_blocks` of A/B."""
    return max(4, num_blocks // 2)


def judge(aa: list[Sample], ab: list[Sample], target: Target | None) -> Verdict:
    """Return the verdict of a contest; see `VERDICT_RULE`."""
    if void_reasons(aa, ab):
        return "void"
    if target is None:
        return "measured"
    times = sound_interval(ab, AB_LEVEL)
    if times.num_blocks < FEWEST_BLOCKS:
        return "too few"
    found = _oriented(times, target.quantity)
    if target.quantity == "speed":
        reached, missed = found.low >= target.bound, found.high < target.bound
    else:
        reached, missed = found.high <= target.bound, found.low > target.bound
    return "pass" if reached else "fail" if missed else "undecided"


def finding(aa: list[Sample], ab: list[Sample]) -> Finding:
    """Return what the samples say about A beside B, whatever the target; see `VERDICT_RULE`."""
    if void_reasons(aa, ab):
        return "void"
    times = sound_interval(ab, AB_LEVEL)
    if times.num_blocks < FEWEST_BLOCKS:
        return "too few"
    return "slower" if times.low > 1 else "faster" if times.high < 1 else "undecided"


def void_reasons(aa: list[Sample], ab: list[Sample]) -> list[str]:
    """Return why nothing may be concluded, one line each; empty where something may."""
    reasons = []
    for name, samples in (("A/A", aa), ("A/B", ab)):
        void, total = len(void_blocks(samples)), samples[-1].block + 1
        if void > LARGEST_VOID_SHARE * total:
            reasons.append(f"{void} of {total} blocks of {name} are void")
    same = sound_interval(aa, AA_LEVEL)
    if not same.covers(1.0):
        reasons.append(f"A beside itself gives {_words(same)}, which leaves out 1")
    return reasons


def sound_interval(samples: list[Sample], level: float) -> Interval:
    """Return the ratio of times A over B from the blocks that are not void."""
    log_ratios = block_log_ratios(samples, leave_out=void_blocks(samples))
    return ratio_interval(log_ratios, level=level)


def _oriented(times: Interval, quantity: str) -> Interval:
    return times.inverse() if quantity == "speed" else times


def _record(
    samples: list[Sample], order: list[Block], *, quantity: str, level: float
) -> dict[str, Any]:
    everything = ratio_interval(block_log_ratios(samples), level=level)
    void = void_blocks(samples)
    return {
        "order": order,
        "ratio_of": quantity,
        "ratio": interval_record(_oriented(sound_interval(samples, level), quantity)),
        "void_blocks": void,
        "ratio_with_void_blocks": interval_record(_oriented(everything, quantity)),
        "block_log_time_ratios": block_log_ratios(samples),
        "checks": checks_record(check(samples, leave_out=void)),
        "samples": [dataclasses.astuple(sample) for sample in samples],
    }


def _tell(
    contest: Contest,
    record: dict[str, Any],
    interval: Interval,
    note: Callable[[str], object],
) -> None:
    quantity, verdict = record["a_b"]["ratio_of"], record["verdict"]
    said = f"A is {record['finding']}" if record["finding"] in ("slower", "faster") else ""
    said = said or record["finding"]
    note(
        f"{contest.name}: {quantity} of {contest.a.name} / {contest.b.name} {_words(interval)}"
        f"{_aim(contest.target)}: {verdict if contest.target or verdict == 'void' else said}"
    )
    for reason in record["void_reasons"]:
        note(f"{contest.name}: void, since {reason}")
    for doubt in record["a_b"]["checks"]["doubts"]:
        note(f"{contest.name}: doubtful: {doubt}")


def _words(interval: Interval) -> str:
    ends = f"[{interval.low:.3f}, {interval.high:.3f}]"
    return f"{interval.ratio:.3f} {ends} over {interval.num_blocks} blocks"


def _aim(target: Target | None) -> str:
    if target is None:
        return ""
    return f", target {'>=' if target.quantity == 'speed' else '<='} {target.bound:g}"

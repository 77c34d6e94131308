"""Slowdowns of known size, planted blindly: how often a comparison finds them, and how often none.

Each run compares two conditions that repeat one and the same piece of work; one of them repeats it
a known percentage more often. Sizes and sides come in an order that a seed decides. `measure` and
`judge_run` see samples only; what was planted is laid beside the findings at the end, by `score`.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple, dataclass
from statistics import median
from typing import Any, Literal

from atoll.bench.compare import Letter, Sample, run_blocks
from atoll.bench.contest import (
    AA_LEVEL,
    AB_LEVEL,
    Finding,
    finding,
    num_aa_blocks,
    sound_interval,
    void_reasons,
)
from atoll.bench.order import counterbalanced
from atoll.bench.timing import Condition, Stopwatch, time_window
from atoll.errors import UsageError
from atoll.seeds import derive_seed

Repeat = Callable[[int], object]
"""Does one and the same piece of work that many times."""

Outcome = Literal["found", "other way", "none", "undecided", "too few", "void"]

RATE_LEVEL = 0.95

OUTCOMES = (
    "found: the finding names the condition that was slowed down. other way: it names the other "
    "one; where nothing was planted, a finding of either is a false alarm and counted as `other "
    "way`. undecided: the interval holds 1, which is right where nothing was planted. Rates are of "
    "runs that are neither void nor too few, with exact (Clopper-Pearson) 95% intervals."
)


@dataclass(frozen=True, slots=True)
class Plant:
    """What one run hides.

    Attributes:
        percent: Additional work of one condition; 0 for none.
        side: Which one has it.
    """

    percent: int
    side: Letter


@dataclass(frozen=True, slots=True)
class Measured:
    """One run's windows.

    Attributes:
        warm_up: Seconds of one window of each condition, which count nowhere.
        aa: Of A beside itself.
        ab: Of A beside B.
    """

    warm_up: tuple[float, float]
    aa: list[Sample]
    ab: list[Sample]


def planting(percents: Sequence[int], *, runs: int, seed: int) -> list[Plant]:
    """Return what is planted, run by run, in a shuffled order.

    Each size is there `runs` times, on either side as often, up to one.

    Args:
        percents: Sizes, each once; 0 <= percent.
        runs: Of each size.
        seed: Published with the result.
    """
    if len(set(percents)) < len(percents):
        raise UsageError(f"a size was given twice: {list(percents)}.", hint="give each once")
    generator = random.Random(derive_seed(seed, "bench", "planted"))
    plants = []
    for percent in percents:
        sides: list[Letter] = ["A", "B"] * ((runs + 1) // 2)
        generator.shuffle(sides)
        plants += [Plant(percent, side) for side in sides[:runs]]
    generator.shuffle(plants)
    return plants


def conditions(plant: Plant, repeat: Repeat, *, pieces: int) -> tuple[Condition, Condition]:
    """Return A and B; their names say nothing about what is planted.

    Args:
        plant: What one of them has.
        repeat: The work.
        pieces: Repetitions of the other one, a multiple of 100, so that percents are whole.
    """
    counts = dict.fromkeys(("A", "B"), pieces)
    counts[plant.side] += pieces * plant.percent // 100
    return (
        Condition("A", lambda: repeat(counts["A"])),
        Condition("B", lambda: repeat(counts["B"])),
    )


def measure(
    a: Condition, b: Condition, *, seed: int, num_blocks: int, stopwatch: Stopwatch
) -> Measured:
    """Time one run: A beside itself, then A beside B, as a comparison does."""
    aa_order = counterbalanced(seed, num_aa_blocks(num_blocks), purpose="A/A")
    ab_order = counterbalanced(seed, num_blocks, purpose="A/B")
    first = time_window(a, repeats=1, stopwatch=stopwatch)
    aa = run_blocks(a, a, order=aa_order, repeats=1, stopwatch=stopwatch)
    second = time_window(b, repeats=1, stopwatch=stopwatch)
    ab = run_blocks(a, b, order=ab_order, repeats=1, stopwatch=stopwatch)
    return Measured((first, second), aa, ab)


def judge_run(run: Measured) -> dict[str, Any]:
    """Return what the samples of one run say."""
    interval = sound_interval(run.ab, AB_LEVEL)
    return {
        "finding": finding(run.aa, run.ab),
        "void_reasons": void_reasons(run.aa, run.ab),
        "time_ratio": interval.ratio,
        "low": interval.low,
        "high": None if interval.num_blocks < 2 else interval.high,
        "a_a_time_ratio": sound_interval(run.aa, AA_LEVEL).ratio,
    }


def outcome(plant: Plant, found: Finding) -> Outcome:
    """Return how a finding compares with what was planted; see `OUTCOMES`."""
    if found in ("undecided", "too few", "void"):
        return found
    slower: Letter = "A" if found == "slower" else "B"
    return "found" if plant.percent and slower == plant.side else "other way"


def score(plants: Sequence[Plant], judged: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rates for each size, smallest first.

    Args:
        plants: What was planted, by run.
        judged: What was found, by run.
    """
    sizes = []
    for percent in sorted({plant.percent for plant in plants}):
        pairs = [(p, j) for p, j in zip(plants, judged, strict=True) if p.percent == percent]
        outcomes = [outcome(plant, found["finding"]) for plant, found in pairs]
        counts = {name: outcomes.count(name) for name in ("found", "other way", "undecided")}
        decided = sum(counts.values())
        apart = {name: outcomes.count(name) for name in ("void", "too few")}
        alarms = counts["other way"]
        sizes.append(
            {
                "percent": percent,
                "runs": len(pairs),
                **{name.replace(" ", "_"): count for name, count in (counts | apart).items()},
                "sound_runs": decided,
                "detection_rate": rate(counts["found"], decided) if percent else None,
                "false_alarm_rate": rate(alarms, decided),
                **_recovered(pairs),
            }
        )
    return sizes


def rate(count: int, total: int, *, level: float = RATE_LEVEL) -> dict[str, Any] | None:
    """Return a share with its exact interval, None where there is nothing to share.

    Args:
        count: Of `total`.
        total: Runs.
        level: Confidence, 0 < level < 1.
    """
    from scipy.stats import binomtest

    if total == 0:
        return None
    interval = binomtest(count, total).proportion_ci(level, method="exact")
    ends = {"low": float(interval.low), "high": float(interval.high)}
    return {"share": count / total, **ends, "level": level}


def run_record(plant: Plant, run: Measured, judged: dict[str, Any]) -> dict[str, Any]:
    """Return all of one run as JSON values, every sample in it."""
    return {
        "planted": asdict(plant),
        **judged,
        "outcome": outcome(plant, judged["finding"]),
        "warm_up_seconds": list(run.warm_up),
        "a_a": [list(astuple(sample)) for sample in run.aa],
        "a_b": [list(astuple(sample)) for sample in run.ab],
    }


def _recovered(pairs: Sequence[tuple[Plant, dict[str, Any]]]) -> dict[str, Any]:
    """Return the slowdown found, slowed over other, and how many intervals hold the planted one."""
    ratios, held, sound = [], 0, 0
    for plant, found in pairs:
        if found["finding"] in ("void", "too few"):
            continue
        truth = (1 + plant.percent / 100) ** (1 if plant.side == "A" else -1)
        sound += 1
        held += found["low"] <= truth <= found["high"]
        ratios.append(found["time_ratio"] ** (1 if plant.side == "A" else -1))
    return {
        "median_percent_found": 100 * (median(ratios) - 1) if ratios else None,
        "intervals_that_hold_the_planted_ratio": rate(held, sound),
    }

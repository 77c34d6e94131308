"""Windows in the given order, and statistics against SciPy and closed forms."""

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from atoll.bench.compare import (
    Interval,
    Sample,
    block_log_ratios,
    ratio_interval,
    run_blocks,
    void_blocks,
)
from atoll.bench.contest import Contest, Target, finding, hold_contest, judge, void_reasons
from atoll.bench.order import counterbalanced
from atoll.bench.timing import Condition, Stopwatch, calls_per_window, nothing


class FakeMachine:
    """A clock that only work moves: each call takes its seconds, times noise, plus a drift."""

    def __init__(self, *, noise: float = 0.02, drift: float = 0.0, seed: int = 0) -> None:
        self.now = 0.0
        self._random = random.Random(seed)
        self._noise, self._drift = noise, drift
        self.stopwatch = Stopwatch(lambda: self.now, nothing)

    def condition(self, name: str, seconds: float) -> Condition:
        def work() -> None:
            noisy = seconds * math.exp(self._random.gauss(0.0, self._noise))
            self.now += noisy * (1 + self._drift * self.now)

        return Condition(name, work)


def samples_of(*blocks: tuple[str, tuple[float, ...]]) -> list[Sample]:
    return [
        Sample(number, place, letter, seconds)
        for number, (order, times) in enumerate(blocks)
        for place, (letter, seconds) in enumerate(zip(order, times, strict=True))
    ]


def test_windows_run_in_the_published_order():
    seen: list[str] = []
    a, b = Condition("a", lambda: seen.append("A")), Condition("b", lambda: seen.append("B"))
    ticks = iter(range(1000))
    ticking = Stopwatch(lambda: float(next(ticks)), nothing)
    order = counterbalanced(3, 5)
    samples = run_blocks(a, b, order=order, repeats=2, stopwatch=ticking)
    assert "".join(seen) == "".join(letter * 2 for block in order for letter in block)
    assert "".join(sample.condition for sample in samples) == "".join(order)


def test_the_reset_runs_before_each_window_and_is_not_timed():
    machine = FakeMachine(noise=0.0)
    work = machine.condition("a", 1.0).work

    def reset() -> None:
        machine.now += 100.0

    a = Condition("a", work, reset)
    samples = run_blocks(a, a, order=["ABBA"], repeats=3, stopwatch=machine.stopwatch)
    assert [sample.seconds for sample in samples] == pytest.approx([3.0] * 4, rel=1e-12)
    assert machine.now == pytest.approx(412.0)


def test_block_ratio_is_the_quotient_of_geometric_means():
    samples = samples_of(("ABBA", (8.0, 1.0, 4.0, 2.0)), ("BAAB", (1.0, 3.0, 3.0, 1.0)))
    assert block_log_ratios(samples) == pytest.approx([math.log(2.0), math.log(3.0)], rel=1e-12)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(-1, 1), min_size=2, max_size=30), st.sampled_from([0.9, 0.95, 0.99]))
def test_interval_equals_scipys_one_sample_t(log_ratios, level):
    found = ratio_interval(log_ratios, level=level)
    error = stats.sem(log_ratios)
    if error < 1e-9:
        return  # SciPy returns NaN for equal values
    low, high = stats.t.interval(level, len(log_ratios) - 1, np.mean(log_ratios), error)
    assert (found.low, found.high) == pytest.approx((math.exp(low), math.exp(high)), rel=1e-9)
    assert found.ratio == pytest.approx(math.exp(np.mean(log_ratios)), rel=1e-9)


def test_two_blocks_give_the_cauchy_quantile():
    # One degree of freedom: t at 97.5% is tan(0.475 pi); the standard error of 0 and 2 is 1.
    found = ratio_interval([0.0, 2.0])
    assert math.log(found.high) == pytest.approx(1 + math.tan(0.475 * math.pi), rel=1e-9)


def test_one_block_makes_no_interval():
    found = ratio_interval([0.1])
    assert (found.low, found.high) == (0.0, math.inf)
    assert found.inverse() == Interval(math.exp(-0.1), 0.0, math.inf, 0.95, 1)


def test_the_interval_covers_the_truth_as_often_as_it_says():
    # 2,000 intervals at 95%: 1,900 +- 4 binomial standard deviations; the seed is fixed.
    numbers = np.random.default_rng(0).normal(0.05, 0.1, size=(2000, 12))
    covered = sum(ratio_interval(row.tolist()).covers(math.exp(0.05)) for row in numbers)
    assert abs(covered - 1900) <= 4 * math.sqrt(2000 * 0.95 * 0.05)


def test_a_drifting_machine_does_not_favour_a_condition():
    machine = FakeMachine(noise=0.0, drift=0.001)
    a, b = machine.condition("a", 1.0), machine.condition("b", 1.0)
    samples = run_blocks(a, b, order=counterbalanced(0, 40), repeats=1, stopwatch=machine.stopwatch)
    assert samples[-1].seconds > 1.1 * samples[0].seconds
    assert ratio_interval(block_log_ratios(samples)).ratio == pytest.approx(1.0, abs=1e-5)


def test_a_disturbed_window_voids_its_block_whatever_its_condition():
    quiet = ("ABBA", (1.0, 1.0, 1.0, 1.0))
    slow_a, slow_b = ("ABBA", (2.5, 1.0, 1.0, 1.0)), ("ABBA", (1.0, 2.5, 1.0, 1.0))
    assert void_blocks(samples_of(quiet, slow_a, quiet, slow_b, quiet)) == [1, 3]


def test_a_steadily_slower_condition_voids_nothing():
    assert void_blocks(samples_of(*[("ABBA", (5.0, 1.0, 1.0, 5.0))] * 4)) == []


def test_comparing_a_thing_with_itself_covers_one():
    machine = FakeMachine()
    a = machine.condition("a", 1.0)
    record = hold_contest(Contest("same", a, a), seed=0, num_blocks=12, stopwatch=machine.stopwatch)
    for part in ("a_a", "a_b"):
        assert record[part]["ratio"]["low"] <= 1.0 <= record[part]["ratio"]["high"]
    assert record["verdict"] == "measured"


@pytest.mark.parametrize(
    ("bound", "verdict"), [(0.85, "pass"), (1.0, "fail"), (1 / 1.1, "undecided")]
)
def test_a_slowdown_of_a_tenth_is_found(bound, verdict):
    machine = FakeMachine(noise=0.03)
    contest = Contest(
        "planted",
        machine.condition("ours", 1.1),
        machine.condition("theirs", 1.0),
        Target("speed", bound),
    )
    record = hold_contest(contest, seed=0, num_blocks=16, stopwatch=machine.stopwatch)
    found = record["a_b"]["ratio"]
    assert found["low"] <= 1 / 1.1 <= found["high"] < 1.0
    assert record["verdict"] == verdict


def test_a_time_target_is_met_from_below():
    machine = FakeMachine()
    contest = Contest(
        "gather",
        machine.condition("ours", 1.2),
        machine.condition("bare", 1.0),
        Target("time", 1.3),
    )
    record = hold_contest(contest, seed=0, num_blocks=12, stopwatch=machine.stopwatch)
    assert record["verdict"] == "pass"
    assert record["a_b"]["ratio"]["ratio"] == pytest.approx(1.2, rel=0.03)


def test_the_record_keeps_every_sample_and_puts_a_a_first():
    machine = FakeMachine()
    a = machine.condition("a", 1.0)
    record = hold_contest(Contest("same", a, a), seed=5, num_blocks=10, stopwatch=machine.stopwatch)
    names = list(record)
    assert names.index("a_a") < names.index("a_b")
    assert len(record["a_a"]["samples"]) == 4 * 5
    assert len(record["a_b"]["samples"]) == 4 * 10
    assert record["a_b"]["order"] == counterbalanced(5, 10, purpose="A/B")


def test_a_biased_a_a_run_voids_the_verdict():
    biased = samples_of(*[("ABBA", (1.2 + 0.01 * i, 1.0, 1.0, 1.2)) for i in range(8)])
    good = samples_of(*[("ABBA", (1.0 + 0.01 * i, 2.0, 2.0, 1.0)) for i in range(8)])
    assert judge(biased, good, Target("speed", 1.0)) == "void"


def test_too_many_void_blocks_void_the_verdict():
    even = samples_of(*[("ABBA", (1.0 + 0.01 * (i % 3), 1.0, 1.0, 1.0)) for i in range(8)])
    disturbed = samples_of(*[("ABBA", (3.0 if i < 3 else 1.0, 2.0, 2.0, 1.0)) for i in range(8)])
    assert judge(even, disturbed, Target("speed", 1.0)) == "void"


def test_a_window_holds_enough_calls_of_the_fastest():
    machine = FakeMachine(noise=0.0)
    pair = [machine.condition("slow", 0.5), machine.condition("fast", 0.0625)]
    assert calls_per_window(pair, window_seconds=1.0, stopwatch=machine.stopwatch) == 16
    assert calls_per_window(pair, window_seconds=0.0, stopwatch=machine.stopwatch) == 1


def test_few_sound_blocks_decide_nothing():
    even = samples_of(*[("ABBA", (1.0 + 0.01 * (i % 3), 1.0, 1.0, 1.0)) for i in range(4)])
    clear = samples_of(*[("ABBA", (2.0 + 0.01 * i, 1.0, 1.0, 2.0)) for i in range(3)])
    assert judge(even, clear, Target("speed", 1.0)) == "too few"
    assert finding(even, clear) == "too few"


def test_a_void_contest_says_why():
    biased = samples_of(*[("ABBA", (1.2 + 0.01 * i, 1.0, 1.0, 1.2)) for i in range(8)])
    disturbed = samples_of(*[("ABBA", (3.0 if i < 3 else 1.0, 2.0, 2.0, 1.0)) for i in range(8)])
    reasons = void_reasons(biased, disturbed)
    assert [reason.split()[:4] for reason in reasons] == [
        ["3", "of", "8", "blocks"],
        ["A", "beside", "itself", "gives"],
    ]


@pytest.mark.parametrize(
    ("seconds", "word"), [(1.1, "slower"), (0.9, "faster"), (1.0, "undecided")]
)
def test_the_finding_is_about_a_beside_b(seconds, word):
    machine = FakeMachine(seed=3)
    contest = Contest("planted", machine.condition("a", seconds), machine.condition("b", 1.0))
    record = hold_contest(contest, seed=0, num_blocks=12, stopwatch=machine.stopwatch)
    assert (record["finding"], record["verdict"]) == (word, "measured")


def test_b_is_brought_to_a_and_the_outcome_is_asked_for_last():
    machine, seen = FakeMachine(), []
    a, b = machine.condition("a", 1.0), machine.condition("b", 1.0)

    def work_of(letter, condition):
        return lambda: (seen.append(letter), condition.work())

    contest = Contest(
        "order",
        Condition("a", work_of("A", a)),
        Condition("b", work_of("B", b)),
        meet=lambda: seen.append("meet"),
        outcome=lambda: {"calls": len(seen)},
    )
    record = hold_contest(contest, seed=0, num_blocks=2, stopwatch=machine.stopwatch)
    met = seen.index("meet")
    # Two calls each to size windows, then A's warm-up window and 4 blocks of A/A.
    assert "".join(seen[:met]) == "AABB" + "A" + "A" * 16
    assert "".join(seen[met + 1 :]) == "B" + "".join(record["a_b"]["order"])
    assert record["outcome"] == {"calls": len(seen)}


def test_a_window_of_several_calls_is_also_timed_by_halves():
    machine = FakeMachine(noise=0.0)
    a = machine.condition("a", 1.0)
    (sample, *_) = run_blocks(a, a, order=["ABBA"], repeats=5, stopwatch=machine.stopwatch)
    assert (sample.seconds, sample.first_half_seconds) == pytest.approx((5.0, 2.0))
    (single, *_) = run_blocks(a, a, order=["ABBA"], repeats=1, stopwatch=machine.stopwatch)
    assert single.first_half_seconds is None

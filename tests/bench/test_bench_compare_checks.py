"""Carry-over, position and dependence of blocks, each planted into samples and found again."""

import math

import numpy as np
import pytest
from scipy import stats

from atoll.bench.compare import Sample, block_log_ratios, ratio_interval
from atoll.bench.compare_checks import check, checks_record, difference_interval
from atoll.bench.order import counterbalanced


def simulated(
    seed,
    *,
    blocks=24,
    noise=0.01,
    ratio=1.0,
    carry=(0.0, 0.0),
    places=(0.0, 0.0, 0.0, 0.0),
    fading=True,
    wander=0.0,
):
    """Return samples whose logarithms have the given parts.

    `carry` is added to A's and to B's windows that follow the other condition, `places` to windows
    by position, and `wander` is the spread of a slow walk from block to block in A's favour.
    """
    generator = np.random.default_rng(seed)
    before, samples, favour = None, [], 0.0
    for number, order in enumerate(counterbalanced(seed, blocks)):
        favour = 0.95 * favour + generator.normal(0.0, wander) if wander else 0.0
        for place, letter in enumerate(order):
            left = carry["AB".index(letter)] if before not in (None, letter) else 0.0
            log = math.log(ratio) + favour if letter == "A" else 0.0
            log += left + places[place] + generator.normal(0.0, noise)
            seconds = math.exp(log)
            # What fades is all in the first half; what stays is in both alike.
            extra = seconds * (1 - math.exp(-left)) if fading else 0.0
            samples.append(Sample(number, place, letter, seconds, (seconds - extra) / 2 + extra))
            before = letter
    return samples


def test_unequal_carry_over_is_found_with_its_shift_of_the_ratio():
    samples = simulated(1, blocks=200, carry=(0.05, 0.01))
    found = check(samples)
    assert found.carry_over.covers(math.exp(0.04))
    assert not found.shift.covers(1.0)
    # With equal conditions, all that the ratio is away from 1 is the shift.
    assert found.shift.covers(ratio_interval(block_log_ratios(samples)).ratio)
    assert any("carry-over" in line for line in found.doubts())


def test_what_fades_inside_a_window_is_told_by_condition():
    found = check(simulated(2, blocks=100, carry=(0.06, 0.0))).late_start
    # All extra time is in the first half: (1/2 + 1/2 x) / (1/2 - 1/2 x) with x = 1 - exp(-0.06).
    extra = 1 - math.exp(-0.06)
    assert found["A"].ratio == pytest.approx((1 + extra) / (1 - extra), rel=1e-9)
    assert found["B"].ratio == pytest.approx(1.0, rel=1e-9)


def test_carry_over_that_both_share_leaves_the_ratio_alone():
    samples = simulated(3, blocks=200, carry=(0.05, 0.05))
    assert check(samples).shift.covers(1.0)
    # Each condition follows the other in 5 of 8 windows, up to those at the ends of blocks.
    assert ratio_interval(block_log_ratios(samples), level=0.99).covers(1.0)


def test_an_effect_of_position_is_not_taken_for_carry_over():
    found = check(simulated(4, blocks=40, places=(0.0, 0.09, 0.02, 0.05), noise=1e-6))
    assert found.carry_over.ratio == pytest.approx(1.0, abs=1e-5)
    assert found.trend.ratio == pytest.approx(math.exp((0.02 + 0.05 - 0.09) / 2), rel=1e-5)
    assert found.outer.ratio == pytest.approx(math.exp((0.05 - 0.11) / 2), rel=1e-5)


def test_the_shift_by_position_is_what_uneven_orders_leave():
    samples = simulated(5, blocks=7, places=(0.08, 0.0, 0.0, 0.08), noise=1e-9)
    assert check(samples).outer_shift == pytest.approx(
        ratio_interval(block_log_ratios(samples)).ratio, rel=1e-6
    )
    even = simulated(5, blocks=8, places=(0.08, 0.0, 0.0, 0.08), noise=1e-9)
    assert check(even).outer_shift == pytest.approx(1.0, rel=1e-9)


def test_honest_runs_are_doubted_as_seldom_as_declared():
    # 400 runs; 1% by carry-over, and of neighbours alike 2.3% at most (one-sided, 2 standard
    # deviations): 13 expected, 13 + 4 sqrt(13) = 28 allowed. The seeds are fixed.
    runs = [check(simulated(seed, carry=(0.01, 0.01), noise=0.03)) for seed in range(400)]
    carried = sum(not run.shift.covers(1.0) for run in runs)
    assert carried <= 4 + 4 * math.sqrt(4)
    assert sum(bool(run.doubts()) for run in runs) <= 28


def test_blocks_that_are_like_their_neighbours_are_doubted():
    found = check(simulated(6, blocks=60, wander=0.05))
    assert found.serial > 0.5
    assert any("neighbouring blocks are alike" in line for line in found.doubts())


def test_the_sign_test_counts_blocks_and_equals_the_binomial():
    found = check(simulated(7, blocks=10, ratio=1.2))
    assert (found.a_slower, found.sign_p) == (10, pytest.approx(2 * 0.5**10, rel=1e-12))


def test_welchs_interval_equals_scipys():
    generator = np.random.default_rng(0)
    ours, theirs = generator.normal(0.1, 0.2, 9).tolist(), generator.normal(0, 0.05, 5).tolist()
    found = difference_interval(ours, theirs, level=0.9)
    expected = stats.ttest_ind(ours, theirs, equal_var=False).confidence_interval(0.9)
    assert (math.log(found.low), math.log(found.high)) == pytest.approx(tuple(expected), rel=1e-9)


def test_two_blocks_are_checked_without_intervals():
    record = checks_record(check(simulated(8, blocks=2)))
    assert record["carry_over"]["high"] is None
    assert record["correlation_of_neighbouring_blocks"] is None
    assert record["doubts"] == []


def test_void_blocks_stay_out_of_every_check():
    samples = simulated(9, blocks=12)
    disturbed = [
        Sample(s.block, s.position, s.condition, s.seconds * (9 if s.block == 4 else 1))
        if s.position == 1
        else s
        for s in samples
    ]
    assert check(disturbed, leave_out=[4]).carry_over == check(samples, leave_out=[4]).carry_over
    assert check(disturbed).carry_over != check(samples).carry_over

"""Figures of a loader trial are pure functions of its samples, to the last digit."""

import math

import numpy as np
import pytest

from atoll.bench.loader_figures import (
    EXPOSED_SHARE,
    comparison,
    distribution,
    figures,
    percentile,
    update_of_call,
)
from atoll.errors import AtollError

PUBLISHED = [
    # Batch mean and p99 and rate of the baseline and of the candidate, then what was derived.
    (
        (0.0004572830584002077, 0.0008424869253212819, 1496256.6350916135),
        (0.00039020749638439154, 0.0005971061506716068, 1496316.4758053015),
        {
            "baseline_batch_mean_ms": 0.45728305840020766,
            "candidate_batch_mean_ms": 0.39020749638439156,
            "batch_mean_reduction_fraction": 0.14668280572317327,
            "baseline_batch_p99_ms": 0.8424869253212819,
            "candidate_batch_p99_ms": 0.5971061506716069,
            "throughput_change_fraction": 3.9993616258504616e-05,
        },
    ),
    (
        (0.0003700476621161215, 0.0006976879097055642, 1538975.9066220173),
        (0.00031356989163032267, 0.0004260226049518678, 1538599.8988047072),
        {
            "baseline_batch_mean_ms": 0.3700476621161215,
            "candidate_batch_mean_ms": 0.3135698916303227,
            "batch_mean_reduction_fraction": 0.15262296257414543,
            "baseline_batch_p99_ms": 0.6976879097055643,
            "candidate_batch_p99_ms": 0.42602260495186783,
            "throughput_change_fraction": -0.0002443233943378864,
        },
    ),
]
"""Two comparisons of a published profile of a loader of this kind."""


def raw_trial(**changes):
    """Return 6 updates of two calls each, the first 2 updates excluded, groups changing in 3."""
    raw = {
        "steps": 6,
        "excluded_initial_steps": 2,
        "copy_sample_interval": 4,
        "windows": [
            {"step": 2, "targets": 20, "seconds": 9.0, "loss_nats_per_token": 3.0},
            {"step": 4, "targets": 20, "seconds": 1.5, "loss_nats_per_token": 2.0},
            {"step": 6, "targets": 20, "seconds": 0.5, "loss_nats_per_token": 1.5},
        ],
        "activations": [
            {"batch": 1, "prefetched": False, "seconds": 5.0},
            {"batch": 6, "prefetched": True, "seconds": 0.25},
        ],
        "calls_after_update": {
            "batch": [2, 4, 6, 8, 10, 12],
            "pin": [2, 4, 6, 8, 10, 12],
            "copy_enqueue": [2, 4, 6, 8, 10, 12],
        },
        "samples": {
            "batch": [5.0, 0.01, 0.01, 0.01, 0.01, 0.26, *[0.01] * 6],
            "pin": [float(number) for number in range(12)],
            "copy_enqueue": [float(number) for number in range(12)],
            "copy_gpu": [0.5, 0.25, 0.125],
        },
    }
    return raw | changes


@pytest.mark.parametrize(("baseline", "candidate", "derived"), PUBLISHED)
def test_published_figures_come_out_to_the_last_digit(baseline, candidate, derived):
    trials = [
        {"batch_seconds": {"mean": mean, "p99": p99}, "tokens_per_second": rate}
        for mean, p99, rate in (baseline, candidate)
    ]
    assert comparison(*trials) == derived


@pytest.mark.parametrize(
    ("targets", "seconds", "rate"),
    [
        (131_072_000, 85.64768061699579, 1530362.5160164617),
        (131_072_000, 85.93172681000215, 1525303.9228433575),
    ],
)
def test_published_rates_come_out_to_the_last_digit(targets, seconds, rate):
    windows = [
        {"step": 2, "targets": 1, "seconds": 100.0, "loss_nats_per_token": 9.0},
        {"step": 6, "targets": targets, "seconds": seconds, "loss_nats_per_token": 3.7},
    ]
    assert figures(raw_trial(windows=windows))["tokens_per_second"] == rate


@pytest.mark.parametrize(
    ("count", "total", "mean"),
    [
        (2000, 0.9104561179410666, 0.00045522805897053333),
        (2000, 1.0262410120340064, 0.0005131205060170032),
        (4000, 0.2264867175836116, 5.6621679395902904e-05),
        (62, 0.0031557759996503594, 5.0899612897586444e-05),
    ],
)
def test_published_means_come_out_to_the_last_digit(count, total, mean):
    """Halves and doubles of one number add up without rounding, so that the total is exact."""
    found = distribution([total, *[0.0] * (count - 1)])
    assert (found["count"], found["total"], found["mean"]) == (count, total, mean)


def test_percentiles_lie_between_the_two_closest_ranks():
    assert percentile([4.0, 0.0, 2.0], 0.5) == 2.0
    assert percentile([4.0, 0.0, 2.0], 0.75) == 3.0
    assert percentile([7.0], 0.99) == 7.0
    samples = np.random.default_rng(1).random(2000).tolist()
    for q in (0.95, 0.99):
        # numpy rounds the same interpolation in another order: one unit in the last place.
        assert percentile(samples, q) == pytest.approx(np.quantile(samples, q), rel=2.3e-16)


def test_distributions_hold_the_updates_after_the_excluded_ones():
    found = figures(raw_trial())
    assert found["batch_seconds"]["count"] == 4
    assert found["batch_seconds"]["maximum"] == 0.27
    assert found["pin_seconds"]["count"] == found["copy_enqueue_seconds"]["count"] == 8
    assert found["pin_seconds"]["total"] == sum(range(4, 12))
    # Copies 0, 4 and 8 were sampled; 0 belongs to an excluded update.
    assert found["copy_gpu_seconds"]["count"] == 2
    assert found["copy_gpu_seconds"]["total"] == 0.375
    assert found["gather_seconds"] is None
    assert found["tokens_per_second"] == 20.0
    assert found["training_targets"] == 60
    assert found["last_training_window_loss"] == 1.5


def test_a_stage_that_never_ran_has_no_mean():
    samples = raw_trial()["samples"] | {"copy_gpu": [0.5]}
    found = figures(raw_trial(samples=samples))["copy_gpu_seconds"]
    assert found == {"count": 0, "total": 0}


def test_a_wait_for_a_group_is_named_with_what_it_cost():
    found = figures(raw_trial())["exposure"]
    assert found["stage"] == "group_wait"
    assert found["seconds_lost"] == 0.25
    assert found["share_of_window"] == 0.125
    assert found["worth_tokens_per_second"] == pytest.approx(40 / 1.75 - 20, rel=1e-12)
    assert found["seconds_by_stage"]["group_read"] == 0
    assert found["seconds_of_all_stages"] == math.fsum([0.27, 0.02, 0.02, 0.02])


def test_a_read_in_the_foreground_is_told_from_a_wait():
    activations = [{"batch": 6, "prefetched": False, "seconds": 0.25}]
    assert figures(raw_trial(activations=activations))["exposure"]["stage"] == "group_read"


@pytest.mark.parametrize(("factor", "stage"), [(0.99, "none"), (1.01, "batch_assembly")])
def test_a_stage_is_exposed_from_the_declared_share_on(factor, stage):
    each = factor * EXPOSED_SHARE * 2.0 / 8
    samples = raw_trial()["samples"] | {"batch": [each] * 12}
    found = figures(raw_trial(samples=samples, activations=[]))["exposure"]
    assert found["stage"] == stage
    lost = 0 if stage == "none" else 8 * each
    assert found["seconds_lost"] == pytest.approx(lost, rel=1e-12)


def test_on_a_gpu_only_the_time_that_it_stood_still_counts():
    samples = raw_trial()["samples"] | {"device_gap": [9.0, *[0.0001] * 11]}
    found = figures(raw_trial(samples=samples))["exposure"]
    assert found["stage"] == "none"
    assert found["basis"] == "events on the GPU"

    samples["device_gap"][5] = 0.2  # of the 0.25 s that the host waited, it computed for 0.05 s
    found = figures(raw_trial(samples=samples))["exposure"]
    assert found["stage"] == "group_wait"
    assert found["seconds_lost"] == pytest.approx(0.2001, rel=1e-12)


def test_calls_are_put_to_the_update_that_made_them():
    assert [update_of_call(raw_trial(), call) for call in (1, 2, 3, 12)] == [1, 1, 2, 6]


def test_windows_that_do_not_begin_after_the_excluded_updates_are_refused():
    with pytest.raises(AtollError, match="one must end after the 3 excluded updates"):
        figures(raw_trial(excluded_initial_steps=3))

"""The rate of every update, against values worked out by hand."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.config.optimizer import LrScheduleConfig, OptimizerConfig
from atoll.optim.schedule import learning_rate, same_rates

OPTIMIZER = OptimizerConfig(lr=0.0056)


def rate(step: int, total: int, **schedule) -> float:
    return learning_rate(
        step, total_steps=total, optimizer=OPTIMIZER, schedule=LrScheduleConfig(**schedule)
    )


def test_warmup_counts_updates_from_one():
    assert rate(1, 2180) == pytest.approx(0.0056 / 312, rel=1e-15)
    assert rate(312, 2180) == 0.0056


def test_cosine_ends_at_its_minimum():
    assert rate(2180, 2180) == pytest.approx(0.00056, rel=1e-12)
    assert rate(312 + 934, 2180) == pytest.approx(0.0056 * 0.55, rel=1e-12)


def test_wsd_holds_then_falls_as_one_minus_root():
    wsd = {"name": "wsd", "warmup_steps": 10, "decay_fraction": 0.25}
    assert {rate(step, 400, **wsd) for step in range(10, 302)} == {0.0056}
    assert rate(326, 400, **wsd) == pytest.approx(0.0056 * (1 - math.sqrt(0.25)), rel=1e-12)
    assert 0 < rate(400, 400, **wsd) < 0.0056 * 0.006


@settings(deadline=None)
@given(
    total=st.integers(1, 500),
    warmup=st.integers(0, 100),
    name=st.sampled_from(["cosine", "wsd"]),
    share=st.floats(0.01, 1.0),
)
def test_every_update_of_every_run_has_a_rate_in_range(total, warmup, name, share):
    rates = [
        rate(step, total, name=name, warmup_steps=warmup, decay_fraction=share)
        for step in range(1, total + 1)
    ]
    assert all(0 < value <= 0.0056 for value in rates)
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True)


def test_longer_budget_changes_a_cosine_from_its_first_falling_update():
    found = same_rates(
        40,
        old_total=100,
        new_total=200,
        optimizer=OPTIMIZER,
        schedule=LrScheduleConfig(warmup_steps=10),
    )
    assert found == 11


def test_longer_budget_keeps_the_rates_of_a_wsd_hold():
    schedule = LrScheduleConfig(name="wsd", warmup_steps=10, decay_fraction=0.2)
    kept = {"old_total": 100, "new_total": 200, "optimizer": OPTIMIZER, "schedule": schedule}
    assert same_rates(81, **kept) is None
    assert same_rates(82, **kept) == 82

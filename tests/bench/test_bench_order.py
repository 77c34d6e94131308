"""Laws of counterbalanced orders."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.bench.order import counterbalanced
from atoll.errors import UsageError

seeds = st.integers(0, 2**63)
counts = st.integers(1, 60)


@settings(deadline=None, max_examples=60)
@given(seeds, counts)
def test_a_linear_drift_cancels_in_every_block(seed, count):
    for block in counterbalanced(seed, count):
        places = {letter: [i for i, x in enumerate(block) if x == letter] for letter in "AB"}
        assert len(places["A"]) == len(places["B"]) == 2
        assert sum(places["A"]) == sum(places["B"])


@settings(deadline=None, max_examples=60)
@given(seeds, counts)
def test_each_condition_begins_as_often_as_the_other(seed, count):
    begun = Counter(block[0] for block in counterbalanced(seed, count))
    assert abs(begun["A"] - begun["B"]) == count % 2


@settings(deadline=None, max_examples=60)
@given(seeds, counts, counts)
def test_a_longer_order_begins_with_the_shorter_one(seed, one, other):
    short, long = sorted((one, other))
    assert counterbalanced(seed, long)[:short] == counterbalanced(seed, short)


def test_the_seed_decides_the_order():
    orders = {tuple(counterbalanced(seed, 16)) for seed in range(20)}
    assert len(orders) > 10
    assert counterbalanced(7, 16) == counterbalanced(7, 16)


def test_orders_of_different_purposes_differ():
    assert counterbalanced(0, 32, purpose="A/A") != counterbalanced(0, 32, purpose="A/B")


def test_no_blocks_are_refused():
    with pytest.raises(UsageError, match="0 blocks"):
        counterbalanced(0, 0)

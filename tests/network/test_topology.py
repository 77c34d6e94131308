"""What every mixing schedule must keep, and which of them end in the exact average."""

from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.config.strategy import Topology
from atoll.network.topology import all_reduce_sent, mixing_schedule

TOPOLOGIES = get_args(Topology)
EPS = np.finfo(np.float64).eps

schedules = st.builds(mixing_schedule, st.sampled_from(TOPOLOGIES), st.integers(1, 33))


def product(schedule):
    """Return what one period does to the weights: its last matrix is applied last."""
    whole = np.eye(len(schedule.matrix(1)))
    for step in range(1, schedule.period + 1):
        whole = schedule.matrix(step) @ whole
    return whole


def rounding(schedule):
    """Bound what rounding changes of an element of `product`: each multiplication rounds a sum of
    at most N numbers, of which a row of shares leaves about N * EPS in all."""
    return schedule.period * len(schedule.matrix(1)) * EPS


@given(schedules)
@settings(deadline=None)
def test_rows_and_columns_of_every_matrix_are_shares(schedule):
    for matrix in schedule.matrices:
        assert matrix.dtype == np.float64
        assert (matrix >= 0).all()
        for axis in (0, 1):
            np.testing.assert_allclose(matrix.sum(axis), 1, rtol=len(matrix) * EPS)


@given(schedules, st.integers(1, 200), st.integers(0, 1000))
@settings(deadline=None)
def test_mixing_keeps_the_mean(schedule, step, seed):
    weights_NP = np.random.default_rng(seed).normal(size=(len(schedule.matrix(1)), 5))
    mixed_NP = schedule.matrix(step) @ weights_NP
    # A sum of N numbers of size below 6, once before and once after mixing.
    tolerance = 12 * len(weights_NP) * EPS
    np.testing.assert_allclose(mixed_NP.mean(0), weights_NP.mean(0), rtol=0, atol=tolerance)


@given(schedules, st.integers(1, 200))
@settings(deadline=None)
def test_only_complete_takes_weights_of_more_than_one_peer(schedule, step):
    peers = schedule.peers(step)
    models = len(peers)
    if schedule.reduces:
        assert peers == tuple(tuple(j for j in range(models) if j != i) for i in range(models))
        return
    takers = [taken for own in peers for taken in own]
    assert all(len(own) <= 1 for own in peers)
    assert len(takers) == len(set(takers))  # nor does a model serve more than one


@given(schedules, st.integers(1, 50), st.integers(0, 3))
@settings(deadline=None)
def test_matrices_repeat_after_each_period(schedule, step, periods):
    later = step + periods * schedule.period
    np.testing.assert_array_equal(schedule.matrix(step), schedule.matrix(later))


@given(schedules, st.integers(0, 1000))
@settings(deadline=None)
def test_disagreement_shrinks_over_a_period_as_the_spectral_gap_says(schedule, seed):
    whole = product(schedule)
    models = len(whole)
    _, values, right = np.linalg.svd(whole - 1 / models)
    second = values[0]  # without the mean, the second largest singular value is the largest
    tolerance = 4 * models * rounding(schedule)
    assert second <= 1 + tolerance
    weights_NP = np.random.default_rng(seed).normal(size=(models, 3))
    apart = weights_NP - weights_NP.mean(0)
    after = whole @ apart
    assert np.linalg.norm(after) <= (second + tolerance) * np.linalg.norm(apart)
    # And no better in the worst case: the singular vector itself shrinks by exactly that.
    worst = np.linalg.norm(whole @ right[0] - (whole @ right[0]).mean())
    np.testing.assert_allclose(worst, second, rtol=0, atol=tolerance)


@given(st.sampled_from(TOPOLOGIES), st.integers(2, 33))
@settings(deadline=None)
def test_repeated_periods_bring_all_models_together(topology, models):
    values = np.linalg.svd(product(mixing_schedule(topology, models)) - 1 / models)[1]
    if topology == "one_peer_ring":
        # A period takes (1, 2, 1) / 4 of self and both neighbours: 1 - sin^2(pi / N) remains.
        np.testing.assert_allclose(values[0], np.cos(np.pi / models) ** 2, atol=100 * EPS)
    assert values[0] < 1 - 1e-3


@pytest.mark.parametrize("models", [1 << k for k in range(7)])
def test_one_peer_exponential_averages_a_power_of_two_in_its_logarithm(models):
    schedule = mixing_schedule("one_peer_exponential", models)
    assert schedule.period == max(1, models.bit_length() - 1)
    np.testing.assert_array_equal(product(schedule), np.full((models, models), 1 / models))


@pytest.mark.parametrize("models", [3, 5, 6, 7, 12])
def test_one_peer_exponential_is_not_exact_for_other_numbers(models):
    assert abs(product(mixing_schedule("one_peer_exponential", models)) - 1 / models).max() > 0.01


@pytest.mark.parametrize("models", range(1, 34))
def test_one_peer_base2_averages_any_number_exactly_within_its_period(models):
    schedule = mixing_schedule("one_peer_base2", models)
    head = models.bit_length() - 1
    assert schedule.period == (max(1, head) if models == 1 << head else 2 * head + 1)
    for matrix in schedule.matrices:
        np.testing.assert_array_equal(matrix, matrix.T)
    found = product(schedule)
    np.testing.assert_allclose(found, 1 / models, rtol=0, atol=rounding(schedule))


def test_the_ring_alternates_between_the_next_model_and_the_previous_one():
    schedule = mixing_schedule("one_peer_ring", 4)
    assert schedule.peers(1) == ((1,), (2,), (3,), (0,))
    assert schedule.peers(2) == ((3,), (0,), (1,), (2,))
    assert schedule.matrix(1)[0].tolist() == [0.5, 0.5, 0, 0]


def test_exponential_offsets_double_and_begin_again():
    schedule = mixing_schedule("one_peer_exponential", 6)
    taken = [schedule.peers(step)[0] for step in range(1, 8)]
    assert taken == [(1,), (2,), (4,), (1,), (2,), (4,), (1,)]


def test_complete_sends_what_a_ring_all_reduce_does():
    sent = mixing_schedule("complete", 8).sent(1, num_parameters=1000)
    assert (sent.payload_bytes, sent.wire_bytes, sent.exchanges) == (4000, 7000, 1)
    assert sent == all_reduce_sent(4000, members=8)


def test_models_without_a_peer_send_nothing_in_the_mean():
    schedule = mixing_schedule("one_peer_base2", 3)
    # Two swap, then one of them with the third, then the two again: the third or one is idle.
    for step in (1, 2, 3):
        sent = schedule.sent(step, num_parameters=300)
        assert (sent.payload_bytes, sent.wire_bytes, sent.exchanges) == (800, 800, 1)


def test_one_model_alone_sends_nothing_and_stays_as_it_is():
    for topology in TOPOLOGIES:
        schedule = mixing_schedule(topology, 1)
        assert schedule.matrix(1).tolist() == [[1.0]]
        assert schedule.sent(1, num_parameters=10).wire_bytes == 0

"""The order of documents: mixtures that seek, and the shuffle buffer, against naive twins."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.data.mix import (
    WEIGHT_STEPS,
    counts_before,
    locate_documents,
    mixture_length,
    shuffle,
    whole_weights,
)

weights_of_sources = st.lists(st.integers(1, 50), min_size=1, max_size=5)


@given(weights_of_sources)
@settings(deadline=None, max_examples=60)
def test_each_position_has_one_source_and_each_source_gives_its_documents_in_order(weights):
    num_positions = 400
    source, index = locate_documents(np.arange(num_positions), weights)
    seen = [0] * len(weights)
    for position in range(num_positions):
        assert index[position] == seen[source[position]]
        seen[source[position]] += 1


@given(weights_of_sources, st.integers(0, 10_000))
@settings(deadline=None, max_examples=100)
def test_every_stretch_from_the_start_holds_each_source_in_its_share(weights, length):
    counts = counts_before(np.array([length]), weights)[0]
    assert counts.sum() == length
    # Each of the nested splits rounds once, by at most one half, and hands its error on.
    for weight, count in zip(weights, counts.tolist(), strict=True):
        assert abs(count - Fraction(length * weight, sum(weights))) < len(weights)


@given(weights_of_sources, st.lists(st.integers(0, 10_000), min_size=1, max_size=20))
@settings(deadline=None, max_examples=60)
def test_a_position_is_found_without_those_before_it(weights, positions):
    source, index = locate_documents(np.arange(max(positions) + 1), weights)
    alone = [locate_documents(np.array([position]), weights) for position in positions]
    assert [int(s[0]) for s, _ in alone] == source[positions].tolist()
    assert [int(i[0]) for _, i in alone] == index[positions].tolist()


@given(weights_of_sources)
@settings(deadline=None, max_examples=60)
def test_weights_equal_to_what_there_is_use_every_document(counts):
    assert mixture_length(counts, counts) == sum(counts)


@given(weights_of_sources, st.data())
@settings(deadline=None, max_examples=100)
def test_the_mixture_ends_where_a_source_is_asked_for_one_more_than_it_has(weights, data):
    available = [data.draw(st.integers(1, 60)) for _ in weights]
    left, length = list(available), 0
    while True:
        source = int(locate_documents(np.array([length]), weights)[0][0])
        if not left[source]:
            break
        left[source] -= 1
        length += 1
    assert mixture_length(available, weights) == length


@pytest.mark.parametrize("position", [2**40, 2**55])
def test_positions_far_beyond_64_bit_products_are_exact(position):
    weights = [2**30 + 1, 2**30 + 7, 3]
    first = (position * weights[0] + sum(weights) // 2) // sum(weights)
    rest = position - first
    second = (rest * weights[1] + (weights[1] + 3) // 2) // (weights[1] + 3)
    found = counts_before(np.array([position]), weights)[0].tolist()
    assert found == [first, second, rest - second]


def test_given_weights_become_whole_shares_of_about_a_million():
    assert sum(whole_weights([0.7, 0.2, 0.1])) == pytest.approx(WEIGHT_STEPS, abs=2)
    assert whole_weights([1e-12, 1.0]) == [1, WEIGHT_STEPS]
    assert whole_weights([5, 5]) == [WEIGHT_STEPS // 2] * 2


def split_at(items, cuts):
    return [np.array(part, np.int64) for part in np.split(np.array(items, np.int64), sorted(cuts))]


@given(
    st.integers(0, 200),
    st.lists(st.integers(0, 200), max_size=5),
    st.integers(1, 60),
    st.integers(0, 9),
)
@settings(deadline=None, max_examples=100)
def test_the_shuffle_gives_each_document_once_and_does_not_depend_on_pieces(num, cuts, size, seed):
    whole = np.concatenate([*shuffle([np.arange(num)], size=size, seed=seed)])
    parts = split_at(range(num), [min(cut, num) for cut in cuts])
    assert np.concatenate([*shuffle(parts, size=size, seed=seed)]).tolist() == whole.tolist()
    assert sorted(whole.tolist()) == list(range(num))


@given(st.integers(1, 300), st.integers(1, 60), st.integers(0, 9))
@settings(deadline=None, max_examples=60)
def test_no_document_leaves_before_the_buffer_could_have_held_it(num, size, seed):
    order = np.concatenate([*shuffle([np.arange(num)], size=size, seed=seed)])
    assert (order <= np.arange(num) + size - 1).all()


def test_a_buffer_of_one_keeps_the_order():
    order = np.concatenate([*shuffle([np.arange(100)], size=1, seed=3)])
    assert order.tolist() == list(range(100))


def test_another_seed_gives_another_order():
    orders = {
        tuple(np.concatenate([*shuffle([np.arange(50)], size=50, seed=seed)])) for seed in range(20)
    }
    assert len(orders) == 20


def test_a_full_buffer_shuffles_evenly():
    # Over 2,000 seeds each of 6 documents is first about 333 times; five standard deviations of a
    # binomial are 84.
    first = [
        int(np.concatenate([*shuffle([np.arange(6)], size=6, seed=seed)])[0])
        for seed in range(2_000)
    ]
    counts = np.bincount(first, minlength=6)
    assert abs(counts - 2_000 / 6).max() < 5 * np.sqrt(2_000 * (1 / 6) * (5 / 6))


def naive_shuffle(items, size, seed):
    """The shuffle as one would write it down, with SplitMix64 in whole numbers."""
    mask = 2**64 - 1

    def choice(step, below):
        word = (seed + (step + 1) * 0x9E3779B97F4A7C15) & mask
        word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & mask
        word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & mask
        return ((word ^ (word >> 31)) >> 32) * below >> 32

    buffer, out, step = list(items[:size]), [], 0
    for item in items[size:]:
        slot = choice(step, size)
        out.append(buffer[slot])
        buffer[slot] = item
        step += 1
    while buffer:
        slot = choice(step, len(buffer))
        out.append(buffer[slot])
        buffer[slot] = buffer[-1]
        buffer.pop()
        step += 1
    return out


@given(st.integers(0, 120), st.integers(1, 40), st.integers(0, 2**63 - 1))
@settings(deadline=None, max_examples=60)
def test_the_shuffle_equals_its_naive_twin(num, size, seed):
    order = np.concatenate([*shuffle([np.arange(num)], size=size, seed=seed)])
    assert order.tolist() == naive_shuffle(list(range(num)), size, seed)

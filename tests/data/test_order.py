"""The order of rows against brute force and a second implementation of Philox."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.data.cachewriter import write_cache
from atoll.data.order import Geometry, group_order, split_geometry, validation_rows
from atoll.errors import DataError, UsageError
from atoll.seeds import derive_seed

GOLDEN = Path(__file__).parents[1] / "golden" / "row-order.json"

MASK = (1 << 64) - 1

geometries = st.builds(
    Geometry,
    tokens=st.integers(2, 400),
    shard_tokens=st.integers(1, 60),
    context_length=st.integers(1, 40),
    group_shards=st.integers(1, 4),
    pads_last=st.booleans(),
).filter(lambda geometry: geometry.sequences > 0)


def philox_words(key: int, count: int) -> list[int]:
    """Philox 4x64-10 in plain integers, counter from 1 as numpy starts it.

    Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (2011).
    """
    words: list[int] = []
    block = 0
    while len(words) < count:
        block += 1
        x = [block, 0, 0, 0]
        k = [key & MASK, key >> 64]
        for _ in range(10):
            low, high = 0xD2E7470EE14C6C93 * x[0], 0xCA5A826395121157 * x[2]
            x = [(high >> 64) ^ x[1] ^ k[0], high & MASK, (low >> 64) ^ x[3] ^ k[1], low & MASK]
            k = [(k[0] + 0x9E3779B97F4A7C15) & MASK, (k[1] + 0xBB67AE8584CAA73B) & MASK]
        words += x
    return words[:count]


@pytest.mark.parametrize(("seed", "pass_index", "group"), [(0, 0, 0), (7, 1, 3), (2**40, 5, 11)])
def test_group_order_sorts_the_words_of_an_independent_philox(seed, pass_index, group):
    words = philox_words(derive_seed(seed, "shuffle", pass_index, group), 257)

    order = group_order(seed, pass_index, group, 257, shuffled=True)

    assert order.tolist() == sorted(range(257), key=lambda row: words[row])


def test_row_orders_are_those_of_the_golden_file(update_golden):
    keys = [(0, 0, 0, 65_536), (0, 1, 0, 65_536), (0, 0, 1, 65_536), (17, 2, 5, 1000)]
    found = {
        "seed {} pass {} group {} rows {}".format(*key): hashlib.sha256(
            group_order(*key, shuffled=True).astype("<i8").tobytes()
        ).hexdigest()
        for key in keys
    }
    if update_golden:
        GOLDEN.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    assert found == json.loads(GOLDEN.read_text(encoding="utf-8"))


@given(st.integers(0, 2**62), st.integers(0, 9), st.integers(0, 9), st.integers(1, 300))
@settings(deadline=None, max_examples=50)
def test_group_order_holds_every_row_once(seed, pass_index, group, rows):
    order = group_order(seed, pass_index, group, rows, shuffled=True)

    assert sorted(order.tolist()) == list(range(rows))


def test_every_part_of_the_key_changes_the_order():
    keys = [
        (seed, pass_index, group) for seed in (0, 1) for pass_index in (0, 1) for group in (0, 1)
    ]

    orders = {group_order(*key, 50, shuffled=True).tobytes() for key in keys}

    assert len(orders) == len(keys)


def test_an_order_without_shuffle_is_that_of_the_file():
    assert group_order(3, 0, 1, 5, shuffled=False).tolist() == [0, 1, 2, 3, 4]


@given(geometries)
@settings(deadline=None, max_examples=300)
def test_groups_hold_the_sequences_that_start_in_their_shards(geometry):
    length = geometry.context_length
    starts = [
        start
        for start in range(0, geometry.tokens, length)
        if start + (1 if geometry.pads_last else length) < geometry.tokens
    ]
    by_group: dict[int, list[int]] = {}
    for sequence, start in enumerate(starts):
        shard = start // geometry.shard_tokens
        by_group.setdefault(shard // geometry.group_shards, []).append(sequence)

    assert geometry.sequences == len(starts)
    assert geometry.last_group == max(by_group)
    assert geometry.max_rows >= max(len(members) for members in by_group.values())
    for group in range(geometry.last_group + 1):
        first, rows = geometry.first_sequence(group), geometry.rows_in(group)
        assert list(range(first, first + rows)) == by_group.get(group, [])


@given(geometries)
@settings(deadline=None, max_examples=300)
def test_a_group_read_covers_its_rows_and_its_shards(geometry):
    length = geometry.context_length
    for group in range(geometry.last_group + 1):
        first, rows = geometry.first_sequence(group), geometry.rows_in(group)
        if not rows:
            continue
        start, stop = geometry.read_range(group)
        assert start == group * geometry.group_tokens <= first * length
        assert min((first + rows) * length + 1, geometry.tokens) <= stop <= geometry.tokens
        assert stop >= min((group + 1) * geometry.group_tokens, geometry.tokens)
        assert stop - start <= geometry.group_tokens + 2 * length


@given(geometries, st.integers(1, 3))
@settings(deadline=None, max_examples=100)
def test_cursors_visit_passes_then_groups_then_rows(geometry, passes):
    places = [geometry.place(cursor) for cursor in range(passes * geometry.sequences)]

    expected = [
        (pass_index, group, index)
        for pass_index in range(passes)
        for group in range(geometry.last_group + 1)
        for index in range(geometry.rows_in(group))
    ]
    assert [(place.pass_index, place.group, place.index) for place in places] == expected
    for cursor, place in enumerate(places):
        assert geometry.cursor_of(place.pass_index, place.group) + place.index == cursor


@given(geometries, st.integers(1, 3))
@settings(deadline=None, max_examples=100)
def test_targets_before_a_cursor_are_the_sum_over_its_rows(geometry, passes):
    length = geometry.context_length
    per_row = [
        min(length, geometry.tokens - 1 - sequence * length)
        for sequence in range(geometry.sequences)
    ] * passes

    found = [geometry.targets_before(cursor) for cursor in range(len(per_row) + 1)]

    assert found == [sum(per_row[:cursor]) for cursor in range(len(per_row) + 1)]
    assert geometry.dropped_tokens == geometry.tokens - 1 - sum(per_row) // passes


def test_the_reference_run_activates_group_g_at_cursor_65536_g_and_batch_512_g_plus_1():
    geometry = Geometry(20 * 33_554_432, 33_554_432, 1024, 2, pads_last=False)

    cursors = [geometry.cursor_of(0, group) for group in range(5)]

    assert cursors == [65_536 * group for group in range(5)]
    assert [cursor // 128 + 1 for cursor in cursors] == [512 * group + 1 for group in range(5)]
    assert geometry.read_range(1) == (67_108_864, 134_217_729)


def test_positions_beyond_32_bits_stay_exact():
    geometry = Geometry(10**12 + 1, 33_554_432, 1024, 2, pads_last=False)

    place = geometry.place(geometry.sequences - 1)

    assert place.group == (10**12 // 1024 - 1) * 1024 // 67_108_864
    assert geometry.targets_before(geometry.sequences) == 10**12


@pytest.mark.parametrize(
    ("split", "tokens", "message"),
    [
        ("train", 8, "the train split holds 8 tokens; one sequence of 8 targets needs at least 9"),
        ("validation", 1, "the validation split holds 1 tokens; .* needs at least 2"),
        ("validation", 0, "the validation split holds 0 tokens"),
    ],
)
def test_a_split_too_short_for_one_row_is_refused_with_its_length(tmp_path, split, tokens, message):
    lengths = {"train": 100, "validation": 100, split: tokens}
    ids = {name: np.zeros(length, np.int64) for name, length in lengths.items()}
    cache = write_cache(tmp_path, **ids, shard_tokens=16)

    with pytest.raises(DataError, match=message) as caught:
        split_geometry(cache.manifest, split, context_length=8, group_shards=1)

    assert caught.value.exit_code == 2
    assert caught.value.hint


def test_two_validation_tokens_are_one_row(tmp_path):
    cache = write_cache(tmp_path, train=np.zeros(9), validation=np.zeros(2), shard_tokens=16)

    assert validation_rows(cache.manifest, context_length=8) == 1


@pytest.mark.parametrize("lengths", [{"context_length": 0}, {"group_shards": 0}])
def test_a_length_below_one_is_refused_by_name(tmp_path, lengths):
    cache = write_cache(tmp_path, train=np.zeros(9, np.int64), shard_tokens=16)
    (name,) = lengths

    with pytest.raises(UsageError, match=f"{name} is 0"):
        split_geometry(
            cache.manifest, "train", **{"context_length": 4, "group_shards": 1, **lengths}
        )

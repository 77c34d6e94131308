"""The token loader on counter-valued tokens (token = position), where any wrong row shows."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.data.batch import IGNORE
from atoll.data.cache import Cache
from atoll.data.cachewriter import write_cache
from atoll.data.device import DevicePlacement
from atoll.data.loader import TokenLoader
from atoll.data.order import group_order
from atoll.errors import CacheError, ConfigError, DataError, UsageError


def counter_cache(folder, *, train=1000, validation=0, shard_tokens=64, start=0) -> Cache:
    return write_cache(
        folder,
        train=np.arange(start, start + train),
        validation=np.arange(start, start + validation),
        shard_tokens=shard_tokens,
        vocab_size=start + max(train, validation),
        dtype="uint32",
    )


@pytest.fixture(scope="module")
def counter(tmp_path_factory) -> Cache:
    return counter_cache(tmp_path_factory.mktemp("counter"), validation=100)


def open_loader(cache, split="train", **options) -> TokenLoader:
    defaults = {"context_length": 10, "seed": 0, "group_shards": 2}
    return TokenLoader(cache, split, **{**defaults, **options})


def expected_sequences(tokens, *, shard_tokens, context_length, group_shards, seed, passes):
    """Return the sequence numbers in reading order, from the definition alone."""
    found = []
    for pass_index in range(passes):
        groups: dict[int, list[int]] = {}
        for sequence in range((tokens - 1) // context_length):
            shard = sequence * context_length // shard_tokens
            groups.setdefault(shard // group_shards, []).append(sequence)
        for group, members in sorted(groups.items()):
            order = group_order(seed, pass_index, group, len(members), shuffled=True)
            found += [members[index] for index in order]
    return found


@st.composite
def runs(draw):
    """A geometry, a number of passes, and batch sizes that use up all rows."""
    length = draw(st.integers(1, 12))
    tokens = draw(st.integers(length + 1, 220))
    geometry = {
        "tokens": tokens,
        "shard_tokens": draw(st.integers(tokens // 10 + 1, 60)),
        "context_length": length,
        "group_shards": draw(st.integers(1, 3)),
        "seed": draw(st.integers(0, 5)),
        "passes": draw(st.integers(1, 3)),
    }
    sizes = draw(st.lists(st.integers(1, 40), min_size=1, max_size=6))
    return geometry, sizes, draw(st.booleans()), draw(st.booleans())


@given(runs())
@settings(deadline=None, max_examples=40)
def test_every_token_comes_where_the_definition_puts_it(tmp_path_factory, run):
    geometry, sizes, prefetch, on_device = run
    length, tokens = geometry["context_length"], geometry["tokens"]
    cache = counter_cache(
        tmp_path_factory.mktemp("cache"), train=tokens, shard_tokens=geometry["shard_tokens"]
    )
    sequences = expected_sequences(**geometry)
    with open_loader(
        cache,
        context_length=length,
        seed=geometry["seed"],
        group_shards=geometry["group_shards"],
        passes=geometry["passes"],
        prefetch=prefetch,
        placement=DevicePlacement(torch.device("cpu")) if on_device else "pageable",
    ) as loader:
        assert loader.num_rows == len(sequences)
        cursor = 0
        while cursor < loader.num_rows:
            rows = min(sizes[cursor % len(sizes)], loader.num_rows - cursor)
            batch = loader.batch(cursor, rows)
            first_B = torch.tensor(sequences[cursor : cursor + rows]) * length
            expected_BU = first_B[:, None] + torch.arange(length + 1)
            assert torch.equal(batch.inputs_BT, expected_BU[:, :-1])
            assert torch.equal(batch.targets_BT, expected_BU[:, 1:])
            cursor += rows


@given(
    st.integers(2, 120),
    st.integers(13, 50),
    st.integers(1, 30),
    st.integers(1, 3),
    st.integers(1, 9),
)
@settings(deadline=None, max_examples=40)
def test_validation_scores_every_token_but_the_first_once_and_in_order(
    tmp_path_factory, tokens, shard_tokens, length, group_shards, rows
):
    folder = tmp_path_factory.mktemp("cache")
    cache = counter_cache(folder, train=1, validation=tokens, shard_tokens=shard_tokens, start=1)
    with open_loader(
        cache, "validation", context_length=length, group_shards=group_shards
    ) as loader:
        batches = [loader.batch(cursor, rows) for cursor in range(0, loader.num_rows, rows)]
    inputs = torch.cat([batch.inputs_BT for batch in batches]).flatten()
    targets = torch.cat([batch.targets_BT for batch in batches]).flatten()
    counted = targets != IGNORE
    assert targets[counted].tolist() == list(range(2, tokens + 1))
    assert inputs[counted].tolist() == list(range(1, tokens))
    # In a padded row the last token is an input without a target; zeros follow.
    last = [tokens] if (tokens - 1) % length else []
    assert inputs[~counted].tolist() == last + [0] * (int((~counted).sum()) - len(last))


def test_a_validation_batch_beyond_the_last_row_is_filled_with_padding(tmp_path):
    cache = counter_cache(tmp_path, validation=25, start=100)

    batch = open_loader(cache, "validation").batch(1, 4)

    assert batch.inputs_BT[0].tolist() == list(range(110, 120))
    assert batch.inputs_BT[1].tolist() == [120, 121, 122, 123, 124, 0, 0, 0, 0, 0]
    assert batch.targets_BT[1].tolist() == [121, 122, 123, 124] + [IGNORE] * 6
    assert not batch.inputs_BT[2:].any()
    assert (batch.targets_BT[2:] == IGNORE).all()


def test_validation_that_ends_with_a_whole_row_has_no_padding(tmp_path):
    loader = open_loader(counter_cache(tmp_path, validation=21), "validation")

    assert loader.num_rows == 2
    assert (loader.batch(0, 2).targets_BT != IGNORE).all()
    assert loader.weight(0, 2) == 20.0


def test_a_validation_split_of_two_tokens_is_scored(tmp_path):
    loader = open_loader(counter_cache(tmp_path, validation=2), "validation")

    batch = loader.batch(0, 1)

    assert batch.targets_BT[0].tolist() == [1] + [IGNORE] * 9
    assert loader.weight(0, 1) == 1.0


def test_each_pass_holds_every_sequence_once_in_an_order_of_its_own(counter):
    with open_loader(counter, passes=3) as loader:
        per_pass = loader.num_rows // 3
        orders = [loader.batch(k * per_pass, per_pass).inputs_BT[:, 0].tolist() for k in range(3)]

    assert all(sorted(order) == list(range(0, 990, 10)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3


def test_the_last_partial_training_sequence_is_dropped_and_counted(tmp_path):
    with open_loader(counter_cache(tmp_path, train=1008)) as loader:
        assert loader.num_rows == 100
        assert loader.dropped_tokens == 7


def test_a_shortage_says_how_many_tokens_are_missing_and_what_helps(counter):
    message = r"2 pass\(es\) .* hold 198: 520 tokens are missing"
    with (
        open_loader(counter, passes=2) as loader,
        pytest.raises(CacheError, match=message) as caught,
    ):
        loader.batch(240, 10)
    assert "data.passes to 3" in str(caught.value.hint)
    assert "training.tokens_per_parameters" in str(caught.value.hint)


def test_a_budget_beyond_the_cache_is_refused_before_the_run(counter):
    with open_loader(counter) as loader:
        loader.require_rows(99)
        with pytest.raises(ConfigError, match="10 tokens are missing") as caught:
            loader.require_rows(100)
    assert caught.value.exit_code == 2
    assert "data.passes to 2" in str(caught.value.hint)


def test_a_training_split_shorter_than_one_sequence_is_refused(tmp_path):
    with pytest.raises(DataError, match="holds 10 tokens; one sequence of 10 targets needs"):
        open_loader(counter_cache(tmp_path, train=10))


def test_validation_is_read_once_only(counter):
    with pytest.raises(UsageError, match="2 passes over the validation split"):
        open_loader(counter, "validation", passes=2)


@pytest.mark.parametrize(
    "change", [{"seed": 1}, {"group_shards": 1}, {"context_length": 9}, {"split": "validation"}]
)
def test_whatever_decides_the_order_of_rows_is_in_the_identity(counter, change):
    split = change.pop("split", "train")

    with open_loader(counter) as usual, open_loader(counter, split, **change) as changed:
        assert usual.identity != changed.identity


def test_other_tokens_have_another_identity(tmp_path):
    one = open_loader(counter_cache(tmp_path / "one"), prefetch=False)
    other = open_loader(counter_cache(tmp_path / "other", start=1), prefetch=False)

    assert one.identity != other.identity


def test_uint16_ids_above_the_sign_bit_survive(tmp_path):
    ids = np.arange(65_536 - 500, 65_536)
    cache = write_cache(tmp_path, train=ids, shard_tokens=100, vocab_size=65_536)
    assert cache.manifest.dtype == "uint16"
    for placement in ("pageable", DevicePlacement(torch.device("cpu"))):
        with open_loader(cache, placement=placement) as loader:
            rows = loader.batch(0, loader.num_rows).inputs_BT
            assert sorted(rows.flatten().tolist()) == ids[:490].tolist()


def test_uint32_ids_above_the_sign_bit_survive(tmp_path):
    ids = np.arange(2**32 - 100, 2**32)
    cache = write_cache(tmp_path, train=ids, shard_tokens=64, vocab_size=2**32, dtype="uint32")
    for placement in ("pageable", DevicePlacement(torch.device("cpu"))):
        with open_loader(cache, placement=placement) as loader:
            rows = loader.batch(0, loader.num_rows).inputs_BT
            assert sorted(rows.flatten().tolist()) == ids[:90].tolist()

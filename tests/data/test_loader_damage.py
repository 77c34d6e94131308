"""A damaged cache is an error that names the file, in whichever thread it is found."""

import numpy as np
import pytest

from atoll.data.cache import Cache, CacheManifest
from atoll.data.cachewriter import write_cache
from atoll.data.loader import TokenLoader
from atoll.data.trace import LoaderTrace
from atoll.errors import CacheError
from atoll.files import sha256_file

SHARD_TOKENS = 64
LENGTH = 10


@pytest.fixture
def cache(tmp_path) -> Cache:
    """Six shards of 64 tokens and one of 16; two shards a group."""
    ids = np.arange(6 * SHARD_TOKENS + 16)
    return write_cache(tmp_path, train=ids, shard_tokens=SHARD_TOKENS, vocab_size=1000)


def open_loader(cache, **options) -> TokenLoader:
    return TokenLoader(cache, "train", context_length=LENGTH, seed=0, group_shards=2, **options)


def flip_bit(path, *, byte) -> None:
    data = bytearray(path.read_bytes())
    data[byte] ^= 1
    path.write_bytes(data)


def read_until_error(loader) -> tuple[int, CacheError]:
    """Return the first cursor that fails, one row at a time, and its error."""
    for cursor in range(loader.num_rows):
        try:
            loader.batch(cursor, 1)
        except CacheError as error:
            return cursor, error
    raise AssertionError("every row was given")


@pytest.mark.parametrize("prefetch", [True, False])
def test_a_flipped_bit_stops_at_the_activation_of_its_group(cache, prefetch):
    shard = cache.manifest.splits["train"].shards[3]
    path = cache.folder / shard.file
    flip_bit(path, byte=77)

    with open_loader(cache, prefetch=prefetch) as loader:
        cursor, error = read_until_error(loader)

    assert cursor == 13  # rows 0 to 12 start in the first group's 128 tokens
    assert str(path) in str(error)
    assert shard.sha256 in str(error)
    assert sha256_file(path) in str(error)
    assert "cache verify" in str(error.hint)


def test_a_group_stays_usable_after_the_next_one_failed(cache):
    flip_bit(cache.folder / "train-00003.bin", byte=0)

    with open_loader(cache) as loader:
        first = loader.batch(12, 1).inputs_BT
        for _ in range(2):
            with pytest.raises(CacheError, match=r"train-00003\.bin"):
                loader.batch(12, 2)
        assert (loader.batch(12, 1).inputs_BT == first).all()


def test_a_repaired_shard_is_read_again(cache):
    path = cache.folder / "train-00003.bin"
    flip_bit(path, byte=0)

    with open_loader(cache) as loader:
        with pytest.raises(CacheError):
            loader.batch(0, 20)
        flip_bit(path, byte=0)
        assert len(loader.batch(0, 20).inputs_BT) == 20


def test_a_flipped_bit_in_the_border_is_found_before_its_target_is_used(cache):
    """The last row of group 0 needs tokens of shard 2, which group 1 holds."""
    flip_bit(cache.folder / "train-00002.bin", byte=2)

    with (
        open_loader(cache, prefetch=False) as loader,
        pytest.raises(CacheError, match=r"train-00002\.bin does not match .* MiB 0 has SHA-256"),
    ):
        loader.batch(0, 1)


def test_a_flipped_bit_in_the_leaves_of_a_border_is_named(cache):
    flip_bit(cache.folder / "train-00002.leaves", byte=5)

    with (
        open_loader(cache, prefetch=False) as loader,
        pytest.raises(CacheError, match=r"train-00002\.leaves does not match"),
    ):
        loader.batch(0, 1)


def test_a_bit_flipped_in_any_shard_is_named(cache):
    for shard in cache.manifest.splits["train"].shards:
        path = cache.folder / shard.file
        flip_bit(path, byte=shard.tokens)
        with open_loader(cache) as loader:
            _, error = read_until_error(loader)
        assert shard.file in str(error)
        flip_bit(path, byte=shard.tokens)


def truncate(path) -> None:
    path.write_bytes(path.read_bytes()[:-2])


def extend(path) -> None:
    path.write_bytes(path.read_bytes() + b"\0\0")


def remove(path) -> None:
    path.unlink()


DAMAGES = pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, "has 126 bytes; the manifest says 128 bytes"),
        (extend, "has 130 bytes; the manifest says 128 bytes"),
        (remove, "is missing"),
    ],
)


@DAMAGES
def test_a_shard_of_another_size_is_refused_when_the_loader_opens(cache, damage, message):
    damage(cache.folder / "train-00005.bin")

    with pytest.raises(CacheError, match=rf"train-00005\.bin {message}"):
        open_loader(cache)


@DAMAGES
@pytest.mark.parametrize("prefetch", [True, False])
def test_a_shard_that_changes_later_is_refused_at_its_activation(cache, damage, message, prefetch):
    with open_loader(cache, prefetch=prefetch) as loader:
        damage(cache.folder / "train-00005.bin")
        cursor, error = read_until_error(loader)

    assert cursor == 26  # rows 0 to 25 start in the first four shards
    assert "train-00005.bin" in str(error)
    assert message in str(error)


def test_missing_leaves_of_a_border_are_named(cache):
    (cache.folder / "train-00002.leaves").unlink()

    with open_loader(cache) as loader, pytest.raises(CacheError, match=r"00002\.leaves is missing"):
        loader.batch(0, 1)


def test_a_folder_in_place_of_a_shard_is_named(cache):
    path = cache.folder / "train-00001.bin"
    with open_loader(cache) as loader:
        path.unlink()
        path.mkdir()
        with pytest.raises(CacheError, match=r"train-00001\.bin"):
            loader.batch(0, 1)


@pytest.mark.parametrize("position", [70, 2 * SHARD_TOKENS])
def test_an_id_outside_the_vocabulary_is_named_with_its_place(cache, position):
    """Position 70 lies within a whole shard, 128 is the border token of group 0."""
    facts = cache.manifest.model_dump()
    facts["tokenizer"]["vocab_size"] = position
    (cache.folder / "manifest.json").write_bytes(CacheManifest.model_validate(facts).to_bytes())
    number, place = divmod(position, SHARD_TOKENS)

    with (
        open_loader(Cache(cache.folder)) as loader,
        pytest.raises(
            CacheError,
            match=rf"train-0000{number}\.bin holds the id {position} at token {place}; the "
            rf"vocabulary has {position} ids",
        ),
    ):
        loader.batch(0, 1)


def test_digests_of_prefetched_groups_are_verified_in_the_reader_thread(cache):
    trace = LoaderTrace()
    with open_loader(cache, trace=trace) as loader:
        for cursor in range(loader.num_rows):
            loader.batch(cursor, 1)

    assert [read.thread for read in trace.reads[1:]] == ["token-reader"] * 2
    assert [(read.start, read.stop) for read in trace.reads] == [(0, 131), (128, 261), (256, 400)]
    assert [read.bytes for read in trace.reads] == [262, 266, 288]

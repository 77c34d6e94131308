"""The files of a cache: what is written is what is read, also far beyond 32 bits."""

import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.data.arrange import PLACED
from atoll.data.assemble import _documents, _pieces
from atoll.data.cache import DOCUMENT, Cache, dtype_for_vocabulary
from atoll.data.cachewriter import write_cache
from atoll.data.ledger import DAMAGED, KINDS, NUM_EXAMPLES, Ledger, Note
from atoll.data.staging import TokenReader
from atoll.data.verify import verify_cache
from atoll.errors import CacheError


@given(
    st.integers(1, 60),
    st.integers(0, 30),
    st.integers(1, 20),
    st.sampled_from([100, 65_536, 65_537, 2**31]),
    st.data(),
)
@settings(deadline=None, max_examples=40)
def test_a_written_cache_reads_back(
    tmp_path_factory, train, validation, shard_tokens, vocab_size, data
):
    starts = sorted({0, *data.draw(st.lists(st.integers(0, train - 1), max_size=6))})
    ids = np.arange(train) * (vocab_size - 1) // max(train - 1, 1)
    written = write_cache(
        tmp_path_factory.mktemp("cache") / "cache",
        train=ids,
        validation=np.arange(validation),
        train_documents=np.array(starts),
        shard_tokens=shard_tokens,
        vocab_size=vocab_size,
    )
    cache = Cache(written.folder)
    assert cache.manifest == written.manifest
    assert cache.dtype == np.dtype("<u2" if vocab_size <= 65_536 else "<u4")
    shards = cache.manifest.splits["train"].shards
    parts = [np.fromfile(cache.folder / shard.file, cache.dtype) for shard in shards]
    assert np.concatenate(parts).tolist() == ids.tolist()
    assert [len(part) for part in parts[:-1]] == [shard_tokens] * (len(parts) - 1)
    found = [cache.documents(shard)["start"].tolist() for shard in shards]
    assert [start for part in found for start in part] == starts
    for number, part in enumerate(found):
        assert all(start // shard_tokens == number for start in part)
    assert len(cache.manifest.splits["validation"].shards) == -(-validation // shard_tokens)
    assert verify_cache(cache.folder) == []


def test_equal_tokens_have_one_identity_wherever_they_lie(tmp_path):
    one = write_cache(tmp_path / "one", train=np.arange(50), shard_tokens=20)
    two = write_cache(tmp_path / "two", train=np.arange(50), shard_tokens=20)
    other = write_cache(tmp_path / "other", train=np.arange(50)[::-1], shard_tokens=20)
    assert one.manifest.cache_identity == two.manifest.cache_identity
    assert one.manifest.cache_identity != other.manifest.cache_identity


def test_a_finished_cache_is_not_written_over(tmp_path):
    write_cache(tmp_path, train=np.arange(5))
    with pytest.raises(CacheError, match="a cache is never changed"):
        write_cache(tmp_path, train=np.arange(6))


@pytest.mark.parametrize("options", [{"vocab_size": 10}, {"dtype": "uint16", "vocab_size": 70_001}])
def test_ids_that_do_not_fit_are_refused(tmp_path, options):
    with pytest.raises(CacheError, match="id 70000 does not fit"):
        write_cache(tmp_path, train=np.array([70_000]), **options)


def test_the_element_type_changes_at_the_exact_limit():
    assert dtype_for_vocabulary(65_536) == "uint16"
    assert dtype_for_vocabulary(65_537) == "uint32"
    assert dtype_for_vocabulary(2**32) == "uint32"
    with pytest.raises(CacheError, match="does not fit 32-bit tokens"):
        dtype_for_vocabulary(2**32 + 1)


@pytest.mark.skipif(sys.platform == "win32", reason="files with holes take room there")
def test_positions_beyond_32_bits_are_read_where_they_are(tmp_path):
    far = 2**32 + 5  # tokens: 8 GiB into the file
    with open(tmp_path / "staged.tokens", "wb") as file:
        file.seek(2 * far)
        file.write(np.arange(7, 17, dtype="<u2").tobytes())
    placed = np.zeros(2, PLACED)
    placed["start"] = [2**33, 2**33 + 4]
    placed["staged"] = [far, far + 6]
    placed["tokens"] = [4, 4]
    reader = TokenReader(tmp_path, np.dtype("<u2"))
    (found,) = _pieces(placed, reader, np.dtype("<u2"), 2**33 + 1, 2**33 + 8)
    reader.close()
    assert found.tolist() == [8, 9, 10, 13, 14, 15, 16]
    documents = _documents(placed, 2**33 + 1, 2**33 + 8)
    assert documents.dtype == DOCUMENT
    assert documents["start"].tolist() == [2**33 + 4]


def test_a_staged_file_that_ends_early_is_an_error_with_a_remedy(tmp_path):
    (tmp_path / "staged.tokens").write_bytes(b"1234")
    reader = TokenReader(tmp_path, np.dtype("<u2"))
    with pytest.raises(CacheError, match="shorter than its index says") as caught:
        reader.read_into(np.zeros(3, "<u2"), 0)
    reader.close()
    assert "remove" in (caught.value.hint or "")


def test_the_ledger_counts_all_and_keeps_the_first_examples():
    ledger = Ledger()
    ledger.note(Note("empty", f"file {number}") for number in range(9))
    ledger.add("duplicate", count=0, examples=["never"])
    again = Ledger(ledger.entries)
    again.merge(ledger.entries)
    (entry,) = again.entries.values()
    assert entry.count == 18
    assert entry.examples == [f"file {number}" for number in range(NUM_EXAMPLES)]
    assert set(KINDS) >= DAMAGED

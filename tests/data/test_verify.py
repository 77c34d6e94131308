"""A changed, cut, longer or missing file of a cache is named, and the MiB with it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.data.cache import Cache
from atoll.data.cachewriter import write_cache
from atoll.data.shards import MibHasher, hash_file
from atoll.data.verify import verify_cache
from atoll.errors import CacheError
from atoll.files import MIB, sha256_bytes

SHARD_TOKENS = 5 * MIB // 4  # 2.5 MiB of uint16


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A cache whose shards, document records and tokenizer each have more than one MiB."""
    num_tokens = 2 * SHARD_TOKENS + 1000
    return write_cache(
        tmp_path_factory.mktemp("cache") / "cache",
        train=np.arange(num_tokens) % 60_000,
        validation=np.arange(300_000) % 60_000,
        train_documents=np.arange(0, num_tokens, 20),
        shard_tokens=SHARD_TOKENS,
        tokenizer_json=b"x" * (MIB + 10),
    )


FILES = sorted(
    [
        "manifest.json",
        "tokenizer.json",
        *(f"train-0000{n}.{end}" for n in (0, 1, 2) for end in ("bin", "docs", "leaves")),
        *(f"validation-00000.{end}" for end in ("bin", "docs", "leaves")),
    ]
)


LONG_FILES = [
    "tokenizer.json",
    *(f"train-0000{n}.{end}" for n in (0, 1) for end in ("bin", "docs")),
]


def test_the_tests_know_every_file_that_can_be_damaged(cache):
    found = {path.name for path in cache.folder.iterdir() if path.stat().st_size}
    assert found == set(FILES)
    assert {name for name in found if (cache.folder / name).stat().st_size > MIB} == {*LONG_FILES}


def test_a_whole_cache_has_no_damage(cache):
    assert verify_cache(cache.folder) == []


class Changed:
    """Changes one file of the shared cache and puts it back."""

    def __init__(self, path, content):
        self._path, self._before, self._content = path, path.read_bytes(), content

    def __enter__(self):
        self._path.write_bytes(self._content)

    def __exit__(self, *_):
        self._path.write_bytes(self._before)


@pytest.mark.parametrize(
    ("name", "place"),
    [
        *((name, place) for name in FILES for place in ("first", "middle", "last")),
        *((name, "second MiB") for name in LONG_FILES),
    ],
)
def test_a_flipped_bit_is_named_with_its_mib(cache, name, place):
    path = cache.folder / name
    content = bytearray(path.read_bytes())
    size = len(content)
    position = {"first": 0, "middle": size // 2, "last": size - 1, "second MiB": MIB}[place]
    content[position] ^= 1 << position % 8
    with Changed(path, bytes(content)):
        (damage,) = verify_cache(cache.folder)
    assert damage.file == name
    assert damage.mib == (None if name == "manifest.json" else position // MIB)


def test_every_bit_of_a_manifest_counts(tmp_path):
    small = write_cache(tmp_path / "cache", train=np.arange(9))
    path = small.folder / "manifest.json"
    content = path.read_bytes()
    for position in range(0, len(content), 7):
        changed = bytearray(content)
        changed[position] ^= 1 << position % 8
        path.write_bytes(changed)
        (damage,) = verify_cache(small.folder)
        assert damage.file == "manifest.json"


@pytest.mark.parametrize("name", [name for name in FILES if name != "manifest.json"])
@pytest.mark.parametrize("change", ["cut", "longer", "missing"])
def test_a_file_of_another_size_is_named_with_both_sizes(cache, name, change):
    path = cache.folder / name
    content = path.read_bytes()
    with Changed(path, content[:-3] if change == "cut" else content + b"more"):
        if change == "missing":
            path.unlink()
        damages = verify_cache(cache.folder)
    assert {damage.file for damage in damages} == {name}
    if change == "missing":
        assert damages[0].found == "cannot be read: No such file or directory"
    else:
        wrong = len(content) - 3 if change == "cut" else len(content) + 4
        assert damages[0].found == f"holds {wrong:,} bytes instead of {len(content):,}"
        assert damages[0].mib == min(wrong, len(content)) // MIB


def test_two_damaged_places_are_both_named(cache):
    path = cache.folder / "train-00000.bin"
    content = bytearray(path.read_bytes())
    content[5] ^= 1
    content[2 * MIB + 5] ^= 1
    with Changed(path, bytes(content)):
        damages = verify_cache(cache.folder)
    assert [str(damage) for damage in damages] == [
        "train-00000.bin, MiB 0: its bytes do not match the digest",
        "train-00000.bin, MiB 2: its bytes do not match the digest",
    ]


def test_a_folder_without_a_finished_cache_is_an_error_and_not_a_damage(tmp_path):
    with pytest.raises(CacheError, match="holds no finished token cache"):
        verify_cache(tmp_path)


def test_a_manifest_of_another_format_says_what_to_do(tmp_path):
    small = write_cache(tmp_path / "cache", train=np.arange(9))
    path = small.folder / "manifest.json"
    path.write_bytes(path.read_bytes().replace(b'"format_version": 1', b'"format_version": 9'))
    with pytest.raises(CacheError, match="has format version 9; this atoll reads 1") as caught:
        Cache(small.folder)
    assert "prepare the cache again" in (caught.value.hint or "")


@given(st.lists(st.integers(0, 3 * MIB // 2), max_size=3), st.integers(1 << 16, MIB))
@settings(deadline=None, max_examples=8)
def test_the_digests_of_mibs_do_not_depend_on_how_the_bytes_arrive(sizes, step):
    content = b"".join(bytes([place]) * size for place, size in enumerate(sizes))
    hasher = MibHasher()
    for start in range(0, len(content), step):
        hasher.update(content[start : start + step])
    assert hasher.sha256 == sha256_bytes(content)
    assert [leaf.hex() for leaf in hasher.leaves] == [
        sha256_bytes(content[start : start + MIB]) for start in range(0, len(content), MIB)
    ]


def test_a_file_on_disk_hashes_like_its_bytes(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"abc" * MIB)
    assert hash_file(path).sha256 == sha256_bytes(path.read_bytes())
    assert len(hash_file(path).leaves) == 3

"""Shard groups from disk into memory, verified on the way.

A group is read with plain reads into memory that the caller owns: a mapped file would fault in the
step thread, count against map quotas and kill the process when the file shrinks.

Every byte is checked before any row can be made of it. A shard that is read whole is compared with
its SHA-256; of a shard of which only the first tokens are needed (the border of a group, usually
one token) the MiB that holds them is compared with its leaf digest.
"""

import hashlib
import os
import threading
from concurrent.futures import CancelledError
from io import FileIO
from pathlib import Path

import numpy as np

from atoll.data.cache import Cache, Shard
from atoll.data.order import Geometry
from atoll.data.trace import LoaderTrace, Read
from atoll.errors import CacheError
from atoll.files import MIB

_PIECE_BYTES = 4 * MIB
"""Bytes between two looks at the stop event: a few milliseconds of reading and hashing."""

_LEAF_BYTES = 32

_DAMAGE_HINT = (
    "run `atoll cache verify` on the cache to find all damage, then restore the file from a copy "
    "or prepare the cache again"
)


class GroupReader:
    """Reads and verifies the groups of one split; usable from one thread at a time."""

    def __init__(
        self, cache: Cache, split: str, geometry: Geometry, *, trace: LoaderTrace | None = None
    ) -> None:
        """Look at every shard's size, so that a missing file is not found days later.

        Raises:
            CacheError: A shard is missing or has another size than the manifest says.
        """
        self._folder = cache.folder
        self._split = split
        self._shards = {str(name): facts for name, facts in cache.manifest.splits.items()}[
            split
        ].shards
        self._geometry = geometry
        self.dtype = cache.dtype
        self._vocab_size = cache.manifest.tokenizer.vocab_size
        self._trace = trace
        self._drops_pages = not _fits_page_cache(geometry.tokens * self.dtype.itemsize)
        for shard in self._shards:
            self._check_size(shard, self._path(shard).stat().st_size if self._exists(shard) else -1)

    def read(self, group: int, buffer: np.ndarray, *, stop: threading.Event | None = None) -> None:
        """Fill `buffer` with the tokens of `group` from its first on, then zeros for padded rows.

        Args:
            group: Which group of the split.
            buffer: At least `geometry.window_tokens` elements of the cache's element type.
            stop: Set by another thread to end the read early.

        Raises:
            CacheError: A shard is missing, has another size, does not match its digest, cannot be
                read, or holds an id outside the vocabulary.
            CancelledError: `stop` was set; the content of the buffer is undefined.
        """
        clock = self._trace.clock if self._trace else None
        started = clock() if clock else 0.0
        start, end = self._geometry.read_range(group)
        shard_tokens = self._geometry.shard_tokens
        for number in range(start // shard_tokens, (end - 1) // shard_tokens + 1):
            origin = number * shard_tokens
            first, last = max(start, origin), min(end, origin + shard_tokens)
            part = buffer[first - start : last - start]
            self._read_shard(self._shards[number], first - origin, part, stop)
        buffer[end - start : self._geometry.window_stop(group) - start] = 0
        if self._trace and clock:
            size, thread = (end - start) * self.dtype.itemsize, threading.current_thread().name
            seconds = clock() - started
            self._trace.reads.append(Read(self._split, start, end, size, seconds, thread))

    def _read_shard(
        self, shard: Shard, first: int, part: np.ndarray, stop: threading.Event | None
    ) -> None:
        """Read tokens [first, first + len(part)) of a shard into `part` and verify them."""
        path = self._path(shard)
        try:
            with open(path, "rb", buffering=0) as file:
                self._check_size(shard, os.fstat(file.fileno()).st_size)
                if len(part) == shard.tokens:
                    self._read_whole(file, shard, part, stop)
                else:
                    self._read_leaves(file, shard, first, part)
        except FileNotFoundError as error:
            raise CacheError(f"{error.filename} is missing.", hint=_DAMAGE_HINT) from error
        except OSError as error:
            raise CacheError(f"{path} cannot be read: {error.strerror}.") from error

    def _read_whole(
        self, file: FileIO, shard: Shard, part: np.ndarray, stop: threading.Event | None
    ) -> None:
        _advise(file, "POSIX_FADV_SEQUENTIAL", "POSIX_FADV_WILLNEED")
        digest, largest = hashlib.sha256(), 0
        step = _PIECE_BYTES // self.dtype.itemsize
        for start in range(0, len(part), step):
            if stop is not None and stop.is_set():
                raise CancelledError
            piece = part[start : start + step]
            data = _bytes_of(piece)
            self._fill(file, data)
            digest.update(data)
            largest = max(largest, int(piece.max()))
        if self._drops_pages:
            _advise(file, "POSIX_FADV_DONTNEED")
        if digest.hexdigest() != shard.sha256:
            raise CacheError(
                f"{self._path(shard)} does not match the manifest: SHA-256 is "
                f"{digest.hexdigest()}, expected {shard.sha256}.",
                hint=_DAMAGE_HINT,
            )
        self._check_ids(shard, 0, part, largest)

    def _read_leaves(self, file: FileIO, shard: Shard, first: int, part: np.ndarray) -> None:
        """Read a part of a shard through the MiBs that hold it, each verified by its leaf."""
        leaves = self._leaves(shard)
        start = first * self.dtype.itemsize
        target = _bytes_of(part)
        size = shard.tokens * self.dtype.itemsize
        for number in range(start // MIB, (start + len(target) - 1) // MIB + 1):
            origin = number * MIB
            leaf = memoryview(bytearray(min(MIB, size - origin)))
            file.seek(origin)
            self._fill(file, leaf)
            found = hashlib.sha256(leaf).digest()
            expected = leaves[number * _LEAF_BYTES : (number + 1) * _LEAF_BYTES]
            if found != expected:
                raise CacheError(
                    f"{self._path(shard)} does not match the manifest: MiB {number} has SHA-256 "
                    f"{found.hex()}, expected {expected.hex()}.",
                    hint=_DAMAGE_HINT,
                )
            low, high = max(start, origin), min(start + len(target), origin + len(leaf))
            target[low - start : high - start] = leaf[low - origin : high - origin]
        self._check_ids(shard, first, part, int(part.max()))

    def _leaves(self, shard: Shard) -> bytes:
        path = self._folder / shard.leaves_file
        leaves = path.read_bytes()
        found = hashlib.sha256(leaves).hexdigest()
        if found != shard.leaves_sha256:
            raise CacheError(
                f"{path} does not match the manifest: SHA-256 is {found}, expected "
                f"{shard.leaves_sha256}.",
                hint=_DAMAGE_HINT,
            )
        return leaves

    def _fill(self, file: FileIO, data: memoryview) -> None:
        while data:
            count = file.readinto(data)
            if not count:
                raise CacheError(f"{file.name} ended while it was read.", hint=_DAMAGE_HINT)
            data = data[count:]

    def _check_size(self, shard: Shard, found_bytes: int) -> None:
        expected_bytes = shard.tokens * self.dtype.itemsize
        if found_bytes == expected_bytes:
            return
        found = "is missing" if found_bytes < 0 else f"has {found_bytes} bytes"
        raise CacheError(
            f"{self._path(shard)} {found}; the manifest says {expected_bytes} bytes "
            f"({shard.tokens} tokens).",
            hint=_DAMAGE_HINT,
        )

    def _check_ids(self, shard: Shard, first: int, part: np.ndarray, largest: int) -> None:
        if largest < self._vocab_size:
            return
        position = first + int(np.argmax(part >= self._vocab_size))
        raise CacheError(
            f"{self._path(shard)} holds the id {part[position - first]} at token {position}; the "
            f"vocabulary has {self._vocab_size} ids.",
            hint="prepare the cache again with its tokenizer",
        )

    def _path(self, shard: Shard) -> Path:
        return self._folder / shard.file

    def _exists(self, shard: Shard) -> bool:
        return self._path(shard).is_file()


def _bytes_of(array: np.ndarray) -> memoryview:
    """Return the array's own bytes, writable."""
    return array.view(np.uint8).data


def _advise(file: FileIO, *names: str) -> None:
    """Tell the kernel how the whole file is used, where it listens."""
    for name in names:
        if (advice := getattr(os, name, None)) is not None:
            os.posix_fadvise(file.fileno(), 0, 0, advice)


def _fits_page_cache(split_bytes: int) -> bool:
    """Return whether keeping the split's pages is worth it: a quarter of the memory holds them.

    A larger split would push other files out before its own pages are read again.
    """
    try:
        memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return True
    return split_bytes * 4 <= memory_bytes

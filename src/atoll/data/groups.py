"""Shard groups from disk into memory, verified on the way.

A group is read with plain reads through one small buffer: a mapped file would fault in the step
thread, count against map quotas and kill the process when the file shrinks.

Every byte is checked before a group can become active. A shard that is read whole is compared with
its SHA-256; of a shard of which only the first tokens are needed (the border of a group, usually
one token) the MiB that holds them is compared with its leaf digest.
"""

import hashlib
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from io import FileIO
from typing import Protocol

import numpy as np

from atoll.data.cache import Cache, Shard, SplitName
from atoll.data.order import Geometry
from atoll.data.trace import LoaderTrace, Read, thread_storage_bytes
from atoll.errors import CacheError
from atoll.files import MIB

PIECE_BYTES = 4 * MIB
"""Bytes between two looks at the stop event: a few milliseconds of reading and hashing."""

_LEAF_BYTES = 32

_DAMAGE_HINT = (
    "run `atoll cache verify` on the cache to find all damage, then restore the file from a copy "
    "or prepare the cache again"
)


Take = Callable[[int, np.ndarray], None]
"""Takes the position of a piece's first token in its split, and the piece."""


class GroupSource(Protocol):
    """Where the tokens of groups come from; see `GroupReader.read`."""

    @property
    def dtype(self) -> np.dtype:
        """Element type of the pieces."""
        ...

    def read(self, group: int, take: Take, *, stop: threading.Event | None = None) -> None:
        """Hand the tokens of `group` to `take`, in order; `stop` ends it with CancelledError."""
        ...


class GroupReader:
    """Reads and verifies the groups of one split; usable from one thread at a time."""

    def __init__(
        self,
        cache: Cache,
        split: SplitName,
        geometry: Geometry,
        *,
        trace: LoaderTrace | None = None,
    ) -> None:
        """Look at every shard's size, so that a missing file is not found days later.

        Raises:
            CacheError: A shard is missing or has another size than the manifest says.
        """
        self._folder = cache.folder
        self._split = split
        self._shards = cache.manifest.splits[split].shards
        self._geometry = geometry
        self.dtype = cache.dtype
        self._vocab_size = cache.manifest.tokenizer.vocab_size
        self._trace = trace
        self._drops_pages = not _fits_page_cache(geometry.tokens * self.dtype.itemsize)
        self._buffer = np.empty(PIECE_BYTES // self.dtype.itemsize, self.dtype)
        for shard in self._shards:
            path = cache.folder / shard.file
            self._check_size(shard, path.stat().st_size if path.is_file() else -1)

    def read(self, group: int, take: Take, *, stop: threading.Event | None = None) -> None:
        """Hand the tokens of `group` to `take`, piece by piece and in order.

        Args:
            group: Which group of the split.
            take: Called with the position of a piece's first token in the split, and the piece;
                its memory is used again afterwards.
            stop: Set by another thread to end the read early.

        Raises:
            CacheError: A shard is missing, has another size, does not match its digest, cannot be
                read, or holds an id outside the vocabulary. Pieces taken before are worthless.
            CancelledError: `stop` was set.
        """
        clock = self._trace.clock if self._trace else None
        started = clock() if clock else 0.0
        before = thread_storage_bytes() if clock else None
        start, end = self._geometry.read_range(group)
        shard_tokens = self._geometry.shard_tokens
        for number in range(start // shard_tokens, (end - 1) // shard_tokens + 1):
            origin = number * shard_tokens
            wanted = range(max(start, origin), min(end, origin + shard_tokens))
            self._read_shard(self._shards[number], origin, wanted, take, stop)
        if self._trace and clock:
            size, thread = (end - start) * self.dtype.itemsize, threading.current_thread().name
            seconds = clock() - started
            after = thread_storage_bytes()
            stored = None if before is None or after is None else after - before
            self._trace.reads.append(
                Read(self._split, start, end, size, seconds, thread, stored, started)
            )

    def _read_shard(
        self,
        shard: Shard,
        origin: int,
        wanted: range,
        take: Take,
        stop: threading.Event | None,
    ) -> None:
        """Read the positions `wanted` of a shard that begins at `origin`, and verify them."""
        path = self._folder / shard.file
        pieces = self._whole if len(wanted) == shard.tokens else self._leaves
        try:
            with open(path, "rb", buffering=0) as file:
                self._check_size(shard, os.fstat(file.fileno()).st_size)
                for position, piece in pieces(file, shard, origin, wanted):
                    if stop is not None and stop.is_set():
                        raise CancelledError
                    take(position, piece)
        except FileNotFoundError as error:
            raise CacheError(f"{error.filename} is missing.", hint=_DAMAGE_HINT) from error
        except OSError as error:
            raise CacheError(f"{path} cannot be read: {error.strerror}.") from error

    def _whole(
        self, file: FileIO, shard: Shard, origin: int, wanted: range
    ) -> Iterator[tuple[int, np.ndarray]]:
        """Give a shard from its first token to its last; the digest is compared at the end."""
        _advise(file, "POSIX_FADV_SEQUENTIAL", "POSIX_FADV_WILLNEED")
        digest, bad_id = hashlib.sha256(), None
        for position in wanted[:: len(self._buffer)]:
            piece = self._buffer[: wanted.stop - position]
            self._fill(file, piece)
            digest.update(_bytes_of(piece))
            bad_id = bad_id or self._bad_id(file, position - origin, piece)
            yield position, piece
        if self._drops_pages:
            _advise(file, "POSIX_FADV_DONTNEED")
        if digest.hexdigest() != shard.sha256:
            raise CacheError(
                f"{file.name} does not match the manifest: SHA-256 is {digest.hexdigest()}, "
                f"expected {shard.sha256}.",
                hint=_DAMAGE_HINT,
            )
        if bad_id:
            raise bad_id

    def _leaves(
        self, file: FileIO, shard: Shard, origin: int, wanted: range
    ) -> Iterator[tuple[int, np.ndarray]]:
        """Give a part of a shard through the MiBs that hold it, each verified by its leaf."""
        leaves = self._leaf_digests(shard)
        leaf_tokens = MIB // self.dtype.itemsize
        first, last = ((place - origin) // leaf_tokens for place in (wanted[0], wanted[-1]))
        for number in range(first, last + 1):
            start = number * leaf_tokens
            piece = self._buffer[: min(leaf_tokens, shard.tokens - start)]
            file.seek(number * MIB)
            self._fill(file, piece)
            found = hashlib.sha256(_bytes_of(piece)).digest()
            expected = leaves[number * _LEAF_BYTES : (number + 1) * _LEAF_BYTES]
            if found != expected:
                raise CacheError(
                    f"{file.name} does not match the manifest: MiB {number} has SHA-256 "
                    f"{found.hex()}, expected {expected.hex()}.",
                    hint=_DAMAGE_HINT,
                )
            if bad_id := self._bad_id(file, start, piece):
                raise bad_id
            low = max(wanted.start - origin - start, 0)
            yield origin + start + low, piece[low : wanted.stop - origin - start]

    def _leaf_digests(self, shard: Shard) -> bytes:
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

    def _fill(self, file: FileIO, piece: np.ndarray) -> None:
        data = _bytes_of(piece)
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
            f"{self._folder / shard.file} {found}; the manifest says {expected_bytes} bytes "
            f"({shard.tokens} tokens).",
            hint=_DAMAGE_HINT,
        )

    def _bad_id(self, file: FileIO, start: int, piece: np.ndarray) -> CacheError | None:
        """Return the error for the first id outside the vocabulary, if there is one."""
        if piece.max() < self._vocab_size:
            return None
        index = int(np.argmax(piece >= self._vocab_size))
        return CacheError(
            f"{file.name} holds the id {piece[index]} at token {start + index}; the vocabulary "
            f"has {self._vocab_size} ids.",
            hint="the tokens match their digest: prepare the cache again with its tokenizer",
        )


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

"""Writing the files of a cache: each is hashed whole and by the MiB while it is written."""

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from atoll.data.cache import DOCUMENT, FileFacts, Shard, SplitName
from atoll.files import MIB, atomic_file, sha256_bytes


class MibHasher:
    """SHA-256 of a stream of bytes, of the whole and of each MiB of it."""

    def __init__(self) -> None:
        self.bytes = 0
        self._whole = hashlib.sha256()
        self._leaf = hashlib.sha256()
        self._finished: list[bytes] = []

    def update(self, data: bytes | memoryview) -> None:
        """Take the next bytes; where they are cut does not matter."""
        view = memoryview(data).cast("B")
        self._whole.update(view)
        while view:
            part = view[: MIB - self.bytes % MIB]
            self._leaf.update(part)
            self.bytes += len(part)
            view = view[len(part) :]
            if self.bytes % MIB == 0:
                self._finished.append(self._leaf.digest())
                self._leaf = hashlib.sha256()

    @property
    def sha256(self) -> str:
        return self._whole.hexdigest()

    @property
    def leaves(self) -> list[bytes]:
        """The 32-byte digest of each MiB so far; the last MiB may be shorter."""
        return self._finished + ([self._leaf.digest()] if self.bytes % MIB else [])


def hash_file(path: Path) -> MibHasher:
    """Return the digests of a file on disk."""
    hasher = MibHasher()
    with open(path, "rb", buffering=0) as file:
        buffer = bytearray(4 * MIB)
        while count := file.readinto(buffer):
            hasher.update(memoryview(buffer)[:count])
    return hasher


def write_file(path: Path, parts: Iterable[bytes], *, fault: str) -> FileFacts:
    """Write a file beside the shards, durably, and return its facts."""
    hasher = MibHasher()
    with atomic_file(path, fault=fault) as file:
        for part in parts:
            _write(file, part, hasher)
    return FileFacts(
        file=path.name,
        bytes=hasher.bytes,
        sha256=hasher.sha256,
        leaves=[leaf.hex() for leaf in hasher.leaves],
    )


def write_shard(
    folder: Path,
    *,
    split: SplitName,
    number: int,
    tokens: Iterable[np.ndarray],
    documents: np.ndarray,
    fault: str = "prepare.shard",
) -> Shard:
    """Write the three files of one shard, durably.

    Args:
        folder: The cache's folder.
        split: Split of the shard.
        number: Its place in the split, from 0.
        tokens: Its tokens in order, in pieces of the cache's element type.
        documents: DOCUMENT records of the documents that begin in it.
        fault: Prefix of the failpoints of the token file; see `atoll.files.atomic_file`.
    """
    stem = shard_stem(split, number)
    of_tokens, of_documents = MibHasher(), MibHasher()
    itemsize = 1
    with atomic_file(folder / f"{stem}.bin", fault=fault) as file:
        for piece in tokens:
            itemsize = piece.itemsize
            _write(file, _bytes_of(piece), of_tokens)
    with atomic_file(folder / f"{stem}.docs", fault=f"{fault}.documents") as file:
        for piece in _pieces(documents.astype(DOCUMENT, copy=False)):
            _write(file, _bytes_of(piece), of_documents)
    leaves = b"".join(of_tokens.leaves + of_documents.leaves)
    with atomic_file(folder / f"{stem}.leaves", fault=f"{fault}.leaves") as file:
        file.write(leaves)
    return Shard(
        file=f"{stem}.bin",
        tokens=of_tokens.bytes // itemsize,
        sha256=of_tokens.sha256,
        documents=len(documents),
        documents_file=f"{stem}.docs",
        documents_sha256=of_documents.sha256,
        leaves_file=f"{stem}.leaves",
        leaves_sha256=sha256_bytes(leaves),
    )


def shard_stem(split: SplitName, number: int) -> str:
    """Return the file name of a shard without its ending."""
    return f"{split}-{number:05d}"


def _write(file: IO[bytes], data: bytes | memoryview, hasher: MibHasher) -> None:
    hasher.update(data)
    file.write(data)


def _bytes_of(array: np.ndarray) -> memoryview:
    return np.ascontiguousarray(array).view(np.uint8).data


def _pieces(array: np.ndarray, rows: int = 1 << 16) -> Iterator[np.ndarray[Any, Any]]:
    for start in range(0, len(array), rows):
        yield array[start : start + rows]

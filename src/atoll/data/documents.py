"""Which documents of the training split lie where, and which files they were read from."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from atoll.data.cache import DOCUMENT, Cache, Shard
from atoll.errors import CacheError, UsageError


@dataclass(frozen=True, slots=True)
class Piece:
    """The part [start, stop) of the split that belongs to one document, which begins at `begin`."""

    document: tuple[int, int]  # index of the source, number in it
    begin: int
    start: int
    stop: int


class DocumentIndex:
    """Which documents cover a range of the training split; loads records of a shard once."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._split = cache.manifest.splits["train"]
        self._records: dict[int, np.ndarray] = {}

    def covering(self, start: int, stop: int) -> list[Piece]:
        """Return the pieces that make up the tokens [start, stop), in order."""
        records = self._records_from(start, stop)
        begins = [int(record["start"]) for record in records]
        return [
            Piece(
                document=(int(record["source"]), int(record["number"])),
                begin=begin,
                start=max(begin, start),
                stop=end,
            )
            for record, begin, end in zip(records, begins, [*begins[1:], stop], strict=True)
        ]

    def _records_from(self, start: int, stop: int) -> np.ndarray:
        """Return the records of the document at `start` and of all that begin before `stop`."""
        found = np.empty(0, DOCUMENT)
        for number in range((stop - 1) // self._cache.manifest.shard_tokens, -1, -1):
            records = self._shard_records(number)
            first = max(int(np.searchsorted(records["start"], start, side="right")) - 1, 0)
            last = int(np.searchsorted(records["start"], stop, side="left"))
            found = np.concatenate([records[first:last], found])
            # A document that began in an earlier shard may reach into this one.
            if len(found) and found["start"][0] <= start:
                return found
        raise CacheError(
            f"{self._cache.folder}: no document covers token {start} of the training split.",
            hint="run `atoll cache verify` on the cache",
        )

    def _shard_records(self, number: int) -> np.ndarray:
        if number not in self._records:
            shard = self._split.shards[number]
            self._records[number] = _shard_records(self._cache, shard)
        return self._records[number]


def document_files(
    cache: Cache, documents: Iterable[tuple[int, int]]
) -> dict[tuple[int, int], str]:
    """Return the path of the file that each (source, number) was read from, where there is one."""
    wanted: dict[int, set[int]] = {}
    for source, number in documents:
        wanted.setdefault(source, set()).add(number)
    paths = {}
    for file in cache.source_files():
        numbers = range(file.first_number, file.first_number + file.records)
        for number in [n for n in wanted.get(file.source, ()) if n in numbers]:
            paths[file.source, number] = file.path
    return paths


def find_document(cache: Cache, source: str, number: int) -> tuple[int, int]:
    """Return the tokens [start, stop) of a training document."""
    names = [facts.name for facts in cache.manifest.sources]
    if source not in names:
        raise UsageError(
            f"the cache has no source {source!r}.", hint=f"its sources: {', '.join(names)}"
        )
    split = cache.manifest.splits["train"]
    start: int | None = None
    for shard in split.shards:
        records = _shard_records(cache, shard)
        if start is not None and len(records):
            return start, int(records["start"][0])
        wanted = (records["source"] == names.index(source)) & (records["number"] == number)
        for index in np.flatnonzero(wanted).tolist():
            start = int(records["start"][index])
            if index + 1 < len(records):
                return start, int(records["start"][index + 1])
    if start is None:
        raise UsageError(
            f"source {source!r} has no document {number} in the training split.",
            hint="it may be held out, a duplicate or dropped; `atoll cache show` counts those",
        )
    return start, split.tokens


def _shard_records(cache: Cache, shard: Shard) -> np.ndarray:
    check_size(cache.folder / shard.documents_file, shard.documents * DOCUMENT.itemsize)
    return cache.documents(shard)


def check_size(path: Path, expected_bytes: int) -> None:
    """Refuse a file that is missing or of another size than the manifest says."""
    found_bytes = path.stat().st_size if path.is_file() else None
    if found_bytes != expected_bytes:
        found = "is missing" if found_bytes is None else f"has {found_bytes} bytes"
        raise CacheError(
            f"{path} {found}; the manifest says {expected_bytes} bytes.",
            hint="run `atoll cache verify` on the cache, then restore the file or prepare again",
        )

"""Exact duplicates by the digest of their text, found with bounded memory.

Index rows are dealt into buckets by their digest, on disk; each bucket is sorted in memory. The
first document in source order is kept. Of documents that are also in the validation source, the
one there is kept.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from atoll.data.blocks import VALIDATION
from atoll.data.pace import Pace

KEPT, DUPLICATE, IN_VALIDATION = 0, 1, 2

NUM_EXAMPLES = 5

_MAX_BUCKETS = 256

_KEY = np.dtype(
    [("high", "<u8"), ("low", "<u8"), ("row", "<u8"), ("is_train", "<u8")],
)


class Dropped:
    """Which rows of the index are not used.

    Attributes:
        flags: KEPT, DUPLICATE or IN_VALIDATION for each row.
        counts: Rows of each flag.
        examples: For each flag the first rows in source order, each with the row kept instead.
    """

    def __init__(self, flags: np.ndarray) -> None:
        self.flags = flags
        self.counts = {DUPLICATE: 0, IN_VALIDATION: 0}
        self.examples: dict[int, list[tuple[int, int]]] = {DUPLICATE: [], IN_VALIDATION: []}

    def add(self, flag: int, rows: np.ndarray, instead: np.ndarray) -> None:
        """Drop `rows`; `instead` are the rows kept for each."""
        self.flags[rows] = flag
        self.counts[flag] += len(rows)
        first = np.argsort(rows)[:NUM_EXAMPLES]
        pairs = list(zip(rows[first].tolist(), instead[first].tolist(), strict=True))
        self.examples[flag] = sorted(self.examples[flag] + pairs)[:NUM_EXAMPLES]


def find_duplicates(index: np.ndarray, work: Path, *, pace: Pace) -> Dropped:
    """Find the rows whose text is that of a row that is kept.

    Args:
        index: STAGED records in source order.
        work: Folder for the flags and the buckets; earlier ones are overwritten.
        pace: Bounds of memory.
    """
    if not len(index):
        return Dropped(np.zeros(0, np.uint8))
    dropped = Dropped(_empty_flags(work / "dropped.flags", len(index), pace))
    for keys in _buckets(index, work, pace):
        _drop_in_bucket(keys, dropped)
    return dropped


def _empty_flags(path: Path, count: int, pace: Pace) -> np.ndarray:
    # Written in full before it is mapped: a full disk is then an error here, not a signal later.
    with open(path, "wb") as file:
        for start in range(0, count, pace.rows):
            file.write(bytes(min(pace.rows, count - start)))
    return np.memmap(path, np.uint8, "r+", shape=(count,))


def _buckets(index: np.ndarray, work: Path, pace: Pace) -> Iterator[np.ndarray]:
    """Give the keys of all rows in buckets that hold equal digests together."""
    num_buckets = min(_MAX_BUCKETS, -(-len(index) // pace.bucket_documents))
    if num_buckets == 1:
        yield _keys(index, 0)
        return
    paths = [work / f"bucket-{number:03d}" for number in range(num_buckets)]
    for path in paths:
        path.write_bytes(b"")
    for start in range(0, len(index), pace.rows):
        keys = _keys(index[start : start + pace.rows], start)
        bucket = keys["low"] % np.uint64(num_buckets)
        order = np.argsort(bucket, kind="stable")
        bounds = np.searchsorted(bucket[order], np.arange(num_buckets + 1))
        for number, path in enumerate(paths):
            part = keys[order[bounds[number] : bounds[number + 1]]]
            if len(part):
                with open(path, "ab") as file:
                    file.write(part.tobytes())
    for path in paths:
        yield np.fromfile(path, _KEY)
        path.unlink()


def _keys(rows: np.ndarray, first_row: int) -> np.ndarray:
    keys = np.zeros(len(rows), _KEY)
    keys["high"], keys["low"] = rows["digest_high"], rows["digest_low"]
    keys["row"] = np.arange(first_row, first_row + len(rows))
    keys["is_train"] = rows["split"] != VALIDATION
    return keys


def _drop_in_bucket(keys: np.ndarray, dropped: Dropped) -> None:
    """Keep the first of each run of equal digests, validation before training."""
    keys = keys[np.lexsort((keys["row"], keys["is_train"], keys["low"], keys["high"]))]
    same = (keys["high"][1:] == keys["high"][:-1]) & (keys["low"][1:] == keys["low"][:-1])
    again = np.flatnonzero(same) + 1
    head = np.arange(len(keys))
    head[again] = 0
    head = np.maximum.accumulate(head)
    first, repeated = keys[head[again]], keys[again]
    crosses = (repeated["is_train"] == 1) & (first["is_train"] == 0)
    for flag, chosen in ((DUPLICATE, ~crosses), (IN_VALIDATION, crosses)):
        if chosen.any():
            dropped.add(flag, repeated["row"][chosen], first["row"][chosen])

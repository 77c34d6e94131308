"""From the staged index to the order of documents in each split.

WORK/order.train, order.validation   one PLACED record for each document, in its final order
WORK/arranged.json                   what was left out on the way; written last
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from pydantic import BaseModel, ConfigDict

from atoll.data.blocks import TRAIN, VALIDATION
from atoll.data.cache import LedgerEntry, SourceFile, SplitName
from atoll.data.dedupe import DUPLICATE, IN_VALIDATION, KEPT, Dropped, find_duplicates
from atoll.data.ledger import Ledger
from atoll.data.mix import (
    counts_before,
    locate_documents,
    mixture_length,
    shuffle,
    whole_weights,
)
from atoll.data.pace import Pace
from atoll.data.settings import Settings
from atoll.data.staging import read_index
from atoll.errors import DataError
from atoll.faults import reach
from atoll.files import atomic_file, storage_error, write_json
from atoll.seeds import derive_seed

SPLITS: dict[SplitName, int] = {"train": TRAIN, "validation": VALIDATION}

PLACED = np.dtype(
    [
        ("start", "<u8"),  # its first token in the split
        ("staged", "<u8"),  # its first token in staged.tokens
        ("tokens", "<u8"),
        ("number", "<u8"),
        ("text_bytes", "<u8"),
        ("source", "<u4"),
    ]
)


class Used(BaseModel):
    """What one split takes from one source."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    documents: int = 0
    text_bytes: int = 0


class Arranged(BaseModel):
    """The outcome: `used` by split and source, and what was left out."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    used: dict[SplitName, list[Used]]
    ledger: dict[str, LedgerEntry]


def arrange(settings: Settings, work: Path, *, pace: Pace) -> Arranged:
    """Decide which documents are used and in which order, or read what was decided before.

    Raises:
        DataError: No training document is left, or a source with a weight has none.
    """
    done = work / "arranged.json"
    if done.exists():
        return Arranged.model_validate_json(done.read_bytes())
    try:
        arranged = _arrange(settings, work, pace)
    except OSError as error:
        raise storage_error(error, work) from error
    write_json(done, arranged.model_dump(), fault="prepare.order")
    return arranged


def _arrange(settings: Settings, work: Path, pace: Pace) -> Arranged:
    index = read_index(work)
    ledger = Ledger()
    dropped = find_duplicates(index, work, pace=pace)
    reach("prepare.dedupe")
    _note_duplicates(dropped, index, work, ledger)
    used: dict[SplitName, list[Used]] = {}
    for name, split in SPLITS.items():
        if split == TRAIN:
            rows = _training_order(index, dropped.flags, settings, ledger, pace)
        else:
            rows = _kept_rows(index, dropped.flags, split, None, pace)
        used[name] = _write_order(index, rows, work / f"order.{name}", settings, pace)
    return Arranged(used=used, ledger=ledger.entries)


def _training_order(
    index: np.ndarray, flags: np.ndarray, settings: Settings, ledger: Ledger, pace: Pace
) -> Iterator[np.ndarray]:
    available = _count_by_source(index, flags, len(settings.sources), pace)
    if not sum(available):
        raise DataError(
            "no training document is left after empty, damaged and repeated ones are removed.",
            hint="check data.source, text_field and data.validation_fraction",
        )
    mixed, weights = _mixture(settings, available)
    counts = [available[source] for source in mixed]
    length = mixture_length(counts, weights)
    taken = counts_before(np.array([length]), weights)[0].tolist()
    for source, have, take in zip(mixed, counts, taken, strict=True):
        text = f"{settings.sources[source].path}: the mixture takes {take:,} of {have:,} documents"
        ledger.add("unused", count=have - take, examples=[text])
    streams = [_kept_rows(index, flags, TRAIN, source, pace) for source in mixed]
    return shuffle(
        mix_streams(streams, weights, length, rows=pace.rows),
        size=settings.data.shuffle_buffer,
        seed=derive_seed(settings.data.shuffle_seed, "documents"),
    )


def _mixture(settings: Settings, available: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the sources that are mixed and their whole weights."""
    given = [source.weight for source in settings.sources if source.weight is not None]
    if not given or len(settings.sources) == 1:
        mixed = [source for source, count in enumerate(available) if count]
        return mixed, [available[source] for source in mixed]
    for source, count in zip(settings.sources, available, strict=True):
        if not count:
            raise DataError(
                f"{source.path} has a weight in the mixture, but none of its documents is left.",
                hint="check its path and text_field, or leave it out of data.source",
            )
    return list(range(len(given))), whole_weights(given)


def mix_streams(
    streams: Sequence[Iterator[np.ndarray]], weights: Sequence[int], length: int, *, rows: int
) -> Iterator[np.ndarray]:
    """Take `length` items from the streams in the order of the mixture, in pieces of `rows`."""
    held = [np.zeros(0, np.int64) for _ in streams]
    for start in range(0, length, rows):
        positions = np.arange(start, min(start + rows, length))
        source, _ = locate_documents(positions, weights)
        piece = np.zeros(len(positions), np.int64)
        for number, stream in enumerate(streams):
            is_his = source == number
            needed = int(is_his.sum())
            while len(held[number]) < needed:
                held[number] = np.concatenate([held[number], next(stream)])
            piece[is_his], held[number] = held[number][:needed], held[number][needed:]
        yield piece


def _kept_rows(
    index: np.ndarray, flags: np.ndarray, split: int, source: int | None, pace: Pace
) -> Iterator[np.ndarray]:
    """Give the rows of one split (and one source) that are used, in source order."""
    for start in range(0, len(index), pace.rows):
        part = index[start : start + pace.rows]
        chosen = (flags[start : start + pace.rows] == KEPT) & (part["split"] == split)
        if source is not None:
            chosen &= part["source"] == source
        yield start + np.flatnonzero(chosen)


def _count_by_source(
    index: np.ndarray, flags: np.ndarray, num_sources: int, pace: Pace
) -> list[int]:
    counts = np.zeros(num_sources, np.int64)
    for rows in _kept_rows(index, flags, TRAIN, None, pace):
        counts += np.bincount(index["source"][rows], minlength=num_sources)
    return counts.tolist()


def _write_order(
    index: np.ndarray, pieces: Iterator[np.ndarray], path: Path, settings: Settings, pace: Pace
) -> list[Used]:
    num_sources = len(settings.all_sources)
    documents = np.zeros(num_sources, np.int64)
    text_bytes = np.zeros(num_sources, np.int64)
    end = 0
    with atomic_file(path, fault="prepare.arrange") as file:
        for rows in pieces:
            chosen = index[rows]
            placed = np.zeros(len(rows), PLACED)
            for name in ("tokens", "number", "text_bytes", "source"):
                placed[name] = chosen[name]
            placed["staged"] = chosen["start"]
            ends = end + np.cumsum(chosen["tokens"].astype(np.int64))
            placed["start"] = ends - placed["tokens"].astype(np.int64)
            end = int(ends[-1]) if len(ends) else end
            file.write(placed.tobytes())
            documents += np.bincount(chosen["source"], minlength=num_sources)
            np.add.at(text_bytes, chosen["source"], chosen["text_bytes"].astype(np.int64))
    return [
        Used(documents=count, text_bytes=size)
        for count, size in zip(documents.tolist(), text_bytes.tolist(), strict=True)
    ]


def _note_duplicates(dropped: Dropped, index: np.ndarray, work: Path, ledger: Ledger) -> None:
    wanted = {
        (int(index["source"][row]), int(index["number"][row]))
        for pairs in dropped.examples.values()
        for pair in pairs
        for row in pair
    }
    places = _places(work, wanted)

    def place(row: int) -> str:
        return places[int(index["source"][row]), int(index["number"][row])]

    for kind, flag in (("duplicate", DUPLICATE), ("in_validation", IN_VALIDATION)):
        ledger.add(
            kind,
            count=dropped.counts[flag],
            examples=[
                f"{place(row)} repeats {place(kept)}" for row, kept in dropped.examples[flag]
            ],
        )


def _places(work: Path, wanted: set[tuple[int, int]]) -> dict[tuple[int, int], str]:
    """Return file and record of some documents, with one pass over the list of files."""
    found: dict[tuple[int, int], str] = {}
    with open(work / "staged.files", "rb") as lines:
        for line in lines:
            file = SourceFile.model_validate_json(line)
            for source, number in wanted:
                if source == file.source and 0 <= number - file.first_number < file.records:
                    record = number - file.first_number + 1
                    suffix = f":{record}" if file.records > 1 else ""
                    found[source, number] = file.path + suffix
    return found

"""Encoded documents in source order, on disk, with a journal that says how far they are durable.

WORK/staged.tokens    ids of every document that may enter the cache
WORK/staged.index     one STAGED record for each of them
WORK/staged.files     lines of the later sources.jsonl
WORK/journal.json     lengths of the three, place in the corpus and ledger, all of one moment

A kill leaves more in the files than the journal says; the rest is cut off and made again.
"""

import contextlib
import os
from pathlib import Path
from typing import IO, Any

import numpy as np
from pydantic import BaseModel, ConfigDict

from atoll.data.blocks import Mark
from atoll.data.cache import LedgerEntry
from atoll.data.encode import Encoded
from atoll.data.ledger import Ledger
from atoll.errors import CacheError
from atoll.faults import reach
from atoll.files import canonical_json, storage_error, write_json

STAGED = np.dtype(
    [
        ("digest_high", "<u8"),  # first half of the SHA-256 of the text, as two numbers
        ("digest_low", "<u8"),
        ("start", "<u8"),  # its first token in staged.tokens
        ("tokens", "<u8"),
        ("number", "<u8"),
        ("text_bytes", "<u8"),
        ("source", "<u4"),
        ("split", "<u4"),  # TRAIN or VALIDATION
    ]
)


class Journal(BaseModel):
    """What is durable, and the place in the corpus that it reaches to."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    mark: Mark = Mark()
    tokens: int = 0
    documents: int = 0
    files_bytes: int = 0
    read_bytes: int = 0
    text_bytes: int = 0
    is_complete: bool = False
    ledger: dict[str, LedgerEntry] = {}


class Staging:
    """The staged files of one preparation, open for appending.

    Attributes:
        journal: What is durable.
        ledger: What was found in all records that were appended.
    """

    def __init__(self, work: Path, *, dtype: np.dtype[Any]) -> None:
        """Open the files at the last durable point, or empty.

        Raises:
            CacheError: A file holds less than the journal says.
            StorageError: The file system refuses.
        """
        self._work = work
        self._dtype = dtype
        path = work / "journal.json"
        self.journal = (
            Journal.model_validate_json(path.read_bytes()) if path.exists() else Journal()
        )
        self.ledger = Ledger(self.journal.ledger)
        self._latest = self.journal
        lengths = {
            "staged.tokens": self.journal.tokens * dtype.itemsize,
            "staged.index": self.journal.documents * STAGED.itemsize,
            "staged.files": self.journal.files_bytes,
        }
        self._files = [_open_at(work / name, length) for name, length in lengths.items()]

    def append(self, encoded: Encoded) -> None:
        """Append a block: its documents, the files that end in it, and what was found.

        Raises:
            StorageError: The file system refuses; what the journal says stays as it is.
        """
        block, now = encoded.block, self._latest
        rows = _index_rows(encoded, first_token=now.tokens)
        lines = b"".join(canonical_json(f.model_dump()) + b"\n" for f in block.finished)
        self._write(
            [encoded.tokens.astype(self._dtype, copy=False).tobytes(), rows.tobytes(), lines]
        )
        self.ledger.note(block.notes)
        for kind, places in (
            ("no_tokens", np.flatnonzero(encoded.lengths == 0)),
            ("unknown_token", np.flatnonzero(encoded.has_unknown)),
        ):
            found = [block.documents[place] for place in places]
            self.ledger.add(
                kind,
                count=len(found),
                examples=[f"{d.place}, record {d.number}" for d in found],
            )
        self._latest = Journal(
            mark=block.mark,
            tokens=now.tokens + len(encoded.tokens),
            documents=now.documents + len(rows),
            files_bytes=now.files_bytes + len(lines),
            read_bytes=block.read_bytes,
            text_bytes=now.text_bytes + block.text_bytes,
        )

    @property
    def undurable_text_bytes(self) -> int:
        """Text appended since the last durable point."""
        return self._latest.text_bytes - self.journal.text_bytes

    def commit(self, *, is_complete: bool = False) -> None:
        """Make everything that was appended durable, then say so in the journal."""
        try:
            for file in self._files:
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise storage_error(error, self._work) from error
        journal = self._latest.model_copy(
            update={"ledger": self.ledger.entries, "is_complete": is_complete}
        )
        write_json(self._work / "journal.json", journal.model_dump(), fault="prepare.journal")
        self.journal = self._latest = journal

    def close(self) -> None:
        """Close the files; what is not in the journal does not count, so it may be lost here."""
        for file in self._files:
            with contextlib.suppress(OSError):
                file.close()

    def _write(self, parts: list[bytes]) -> None:
        try:
            reach("prepare.encode")
            for file, part in zip(self._files, parts, strict=True):
                file.write(part)
        except OSError as error:
            raise storage_error(error, self._work) from error


class TokenReader:
    """Reads runs of staged ids by position."""

    def __init__(self, work: Path, dtype: np.dtype[Any]) -> None:
        self._path = work / "staged.tokens"
        self._dtype = dtype
        self._file = open(self._path, "rb", buffering=0)  # noqa: SIM115 - closed by close()

    def read_into(self, out: np.ndarray, start: int) -> None:
        """Fill `out` with the ids from position `start` on.

        Raises:
            CacheError: The file ends before.
        """
        view = out.view(np.uint8).data
        self._file.seek(start * self._dtype.itemsize)
        while view:
            count = self._file.readinto(view)
            if not count:
                raise CacheError(
                    f"{self._path} is shorter than its index says.",
                    hint=f"remove {self._path.parent} and run the same command again",
                )
            view = view[count:]

    def close(self) -> None:
        self._file.close()


def read_index(work: Path) -> np.ndarray:
    """Map the STAGED records; pages come from disk as they are used."""
    path = work / "staged.index"
    if not path.stat().st_size:
        return np.zeros(0, STAGED)
    return np.memmap(path, dtype=STAGED, mode="r")


def _index_rows(encoded: Encoded, *, first_token: int) -> np.ndarray:
    kept = np.flatnonzero(encoded.lengths)
    documents = [encoded.block.documents[place] for place in kept]
    rows = np.zeros(len(kept), STAGED)
    digests = np.frombuffer(b"".join(d.digest for d in documents), ">u8").reshape(-1, 2)
    rows["digest_high"], rows["digest_low"] = digests[:, 0], digests[:, 1]
    rows["tokens"] = encoded.lengths[kept]
    rows["start"] = first_token + np.cumsum(encoded.lengths[kept]) - encoded.lengths[kept]
    for name in ("number", "text_bytes", "source", "split"):
        rows[name] = [getattr(document, name) for document in documents]
    return rows


def _open_at(path: Path, length: int) -> IO[bytes]:
    try:
        file = open(path, "r+b" if path.exists() else "w+b")  # noqa: SIM115 - closed by close()
        size = file.seek(0, os.SEEK_END)
        if size >= length:
            file.truncate(length)
            file.seek(length)
            return file
        file.close()
    except OSError as error:
        raise storage_error(error, path) from error
    raise CacheError(
        f"{path} holds {size:,} bytes, but {length:,} were made durable.",
        hint=f"the disk lost data; remove {path.parent} and run the same command again",
    )

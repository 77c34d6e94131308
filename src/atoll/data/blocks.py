"""The corpus as a stream of blocks: documents in source order, cut into pieces of bounded size."""

import contextlib
import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict

from atoll.data.cache import SourceFile
from atoll.data.ledger import Note, refuse_damaged
from atoll.data.pace import Pace
from atoll.data.raw import RawFile
from atoll.data.records import Record, read_records
from atoll.data.settings import Settings
from atoll.data.sources import PlannedFile
from atoll.errors import DataError

TRAIN, VALIDATION = 0, 1


class Document(NamedTuple):
    """A text that may enter the cache; `number` counts the records of its source from 0.

    `digest` is the first half of the SHA-256 of its UTF-8 bytes.
    """

    source: int
    number: int
    place: str
    text: str
    text_bytes: int
    digest: bytes
    split: Literal[0, 1]


class Mark(BaseModel):
    """A place in the corpus, and what was read to get there.

    Attributes:
        file: Files of the plan that are finished.
        records: Records read of the file after those.
        source: Source of the last file that was read.
        number: Records of that source in finished files.
        position: Bytes of the open file that were read so far.
        prefix_sha256: SHA-256 of those bytes.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    file: int = 0
    records: int = 0
    source: int = 0
    number: int = 0
    position: int = 0
    prefix_sha256: str = ""


@dataclass(slots=True)
class Block:
    """Consecutive records; `mark` is where the next block begins.

    Attributes:
        documents: Those that may enter the cache.
        notes: What was found about all of them, in order.
        finished: Files that end in this block.
        mark: The place after its last record.
        read_bytes: Bytes of source files read up to there, for showing progress.
    """

    documents: list[Document] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    finished: list[SourceFile] = field(default_factory=list)
    mark: Mark = field(default_factory=Mark)
    read_bytes: int = 0
    text_bytes: int = 0
    records: int = 0

    def is_full(self, pace: Pace) -> bool:
        """Say whether this block is to be given away."""
        is_long = self.records + len(self.finished) >= pace.block_records
        return is_long or self.text_bytes >= pace.block_bytes


def read_blocks(
    plan: Iterable[PlannedFile], settings: Settings, *, start: Mark | None = None, pace: Pace
) -> Iterator[Block]:
    """Give the corpus from `start` on.

    Raises:
        DataError: A file cannot be read, changed, or holds a damaged record and that is to stop.
    """
    start = start or Mark()
    place, block, finished_bytes = start, Block(), 0
    for ordinal, planned in enumerate(plan):
        if ordinal < start.file:
            finished_bytes += planned.bytes
            continue
        number = place.number if planned.source == place.source else 0
        skip = start if ordinal == start.file else Mark()
        with contextlib.closing(RawFile(planned)) as raw:
            records = skip.records
            for record in _records_after(raw, settings, skip):
                _add(block, record, planned, number + records, settings)
                records += 1
                if block.is_full(pace):
                    block.mark = _mark_inside(raw, ordinal, records, number)
                    block.read_bytes = finished_bytes + raw.position
                    yield block
                    block = Block()
            block.finished.append(_source_file(raw, number, records))
        finished_bytes += planned.bytes
        place = Mark(file=ordinal + 1, source=planned.source, number=number + records)
        block.mark, block.read_bytes = place, finished_bytes
        if block.is_full(pace):
            yield block
            block = Block()
    if block.finished:
        yield block


def _records_after(raw: RawFile, settings: Settings, skip: Mark) -> Iterator[Record]:
    """Give the records of a file; the first `skip.records` are read again but not given."""
    source = settings.all_sources[raw.planned.source]
    records = read_records(
        raw, text_field=source.text_field, max_bytes=settings.data.max_document_bytes
    )
    if skip.records:
        passed = sum(1 for _ in zip(range(skip.records), records, strict=False))
        found = (passed, raw.position, raw.prefix_sha256)
        if found != (skip.records, skip.position, skip.prefix_sha256):
            raise DataError(
                f"{raw.planned.location} changed since this preparation began.",
                hint="restore the file, or remove the folder `work` in the cache to begin anew",
            )
    yield from records


def _add(
    block: Block, record: Record, planned: PlannedFile, number: int, settings: Settings
) -> None:
    if settings.data.on_bad_record == "stop":
        refuse_damaged(record.notes)
    block.records += 1
    block.notes.extend(record.notes)
    if record.text is None:
        return
    digest = hashlib.sha256(record.utf8).digest()[:16]
    block.text_bytes += len(record.utf8)
    block.documents.append(
        Document(
            source=planned.source,
            number=number,
            place=planned.path,
            text=record.text,
            text_bytes=len(record.utf8),
            digest=digest,
            split=choose_split(digest, planned.source, settings),
        )
    )


def choose_split(digest: bytes, source: int, settings: Settings) -> Literal[0, 1]:
    """Say by content which split a document is in: equal texts are never in both."""
    if settings.validation is not None:
        return VALIDATION if source == len(settings.sources) else TRAIN
    threshold = int(settings.data.validation_fraction * (1 << 64))
    return VALIDATION if int.from_bytes(digest[:8], "big") < threshold else TRAIN


def _mark_inside(raw: RawFile, ordinal: int, records: int, number: int) -> Mark:
    return Mark(
        file=ordinal,
        records=records,
        source=raw.planned.source,
        number=number,
        position=raw.position,
        prefix_sha256=raw.prefix_sha256,
    )


def _source_file(raw: RawFile, first_number: int, records: int) -> SourceFile:
    return SourceFile(
        source=raw.planned.source,
        path=raw.planned.path,
        bytes=raw.planned.bytes,
        sha256=raw.finish(),
        first_number=first_number,
        records=records,
    )

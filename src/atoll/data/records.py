"""Documents of source files: one text file is one record, of JSONL each line, of Parquet each row.

JSONL is cut at line feeds only: U+2028, U+0085 and carriage returns stay inside the text.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from atoll.data.ledger import Note
from atoll.data.raw import DamagedStreamError, RawFile, unpacked
from atoll.errors import DataError

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"

# Escapes (\u00e9) take up to three times the bytes of their text, and a line may hold other fields;
# a longer line is left out without being held or parsed.
_LINE_FACTOR = 3
_LINE_EXTRA_BYTES = 1 << 20

_PARQUET_ROWS = 256


@dataclass(frozen=True, slots=True)
class Record:
    """One record.

    Attributes:
        text: Its text, or None where it is left out.
        utf8: The text in UTF-8; empty where it is left out.
        notes: What was found about it.
    """

    text: str | None
    utf8: bytes
    notes: tuple[Note, ...] = ()


def read_records(raw: RawFile, *, text_field: str, max_bytes: int) -> Iterator[Record]:
    """Give the records of an open file in order; `raw` then still has its rest to be hashed.

    Args:
        raw: The file, at its beginning.
        text_field: Field or column with the text.
        max_bytes: Longer texts are left out as oversized.

    Raises:
        DataError: A Parquet file without such a column of text.
    """
    match raw.planned.format:
        case "text":
            yield _read_text(raw, max_bytes)
        case "jsonl":
            yield from _read_jsonl(raw, text_field, max_bytes)
        case "parquet":
            yield from _read_parquet(raw, text_field, max_bytes)


def checked(text: str, place: str, max_bytes: int, notes: tuple[Note, ...] = ()) -> Record:
    """Make a record of a text: repair lone surrogates, leave out empty and oversized ones."""
    try:
        utf8 = text.encode("utf-8")
    except UnicodeEncodeError:
        text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        utf8 = text.encode("utf-8")
        notes = (*notes, Note("lone_surrogate", place))
    if len(utf8) > max_bytes:
        return _left_out("oversized", f"{place}: {len(utf8):,} bytes")
    if not text or text.isspace():
        return _left_out("empty", place)
    return Record(text, utf8, notes)


def _left_out(kind: str, example: str) -> Record:
    return Record(None, b"", (Note(kind, example),))


def _decode(data: bytes | bytearray, place: str) -> tuple[str, tuple[Note, ...]]:
    notes: tuple[Note, ...] = ()
    if data.startswith(_BYTE_ORDER_MARK):
        data = data[len(_BYTE_ORDER_MARK) :]
        notes = (Note("byte_order_mark", place),)
    try:
        return data.decode("utf-8"), notes
    except UnicodeDecodeError as error:
        example = f"{place}: byte {error.start} is 0x{data[error.start]:02x}"
        return data.decode("utf-8", "replace"), (*notes, Note("invalid_utf8", example))


def _read_text(raw: RawFile, max_bytes: int) -> Record:
    path = raw.planned.path
    data = bytearray()
    try:
        for piece in unpacked(raw):
            data += piece
            if len(data) > max_bytes:
                return _left_out("oversized", f"{path}: over {max_bytes:,} bytes")
    except DamagedStreamError as error:
        return _left_out("truncated", f"{path}: {error.reason}")
    if b"\0" in data:
        return _left_out("binary", f"{path}: byte {data.index(0)} is zero")
    text, notes = _decode(data, path)
    return checked(text, path, max_bytes, notes)


def _read_jsonl(raw: RawFile, text_field: str, max_bytes: int) -> Iterator[Record]:
    path = raw.planned.path
    number = 0
    try:
        limit = _LINE_FACTOR * max_bytes + _LINE_EXTRA_BYTES
        for number, line in enumerate(split_lines(unpacked(raw), max_bytes=limit), start=1):
            place = f"{path}:{number} (byte {line.start})"
            if line.data is None:
                yield _left_out("oversized", f"{place}: over {limit:,} bytes of JSON")
            else:
                yield _parse_line(line, place, text_field, max_bytes)
    except DamagedStreamError as error:
        yield _left_out("truncated", f"{path}:{number + 1}: {error.reason}")


def _parse_line(line: "Line", place: str, text_field: str, max_bytes: int) -> Record:
    assert line.data is not None
    text, notes = _decode(line.data.removesuffix(b"\r"), place)
    if not text or text.isspace():
        return _left_out("blank_line", place)
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        return _left_out("bad_json" if line.is_ended else "truncated", f"{place}: {error}")
    if not isinstance(found, dict):
        return _left_out("bad_json", f"{place}: {type(found).__name__} instead of an object")
    value = found.get(text_field)
    if value is None:
        names = ", ".join(list(found)[:8])
        return _left_out(
            "missing_field", f"{place}: no {text_field!r} among {names or 'no fields'}"
        )
    if not isinstance(value, str):
        kind = type(value).__name__
        return _left_out("non_string_field", f"{place}: {text_field!r} holds a {kind}")
    return checked(value, place, max_bytes, notes)


@dataclass(frozen=True, slots=True)
class Line:
    """A line without its line feed.

    Attributes:
        data: Its bytes, or None where it is too long.
        start: Its first byte in the unpacked file.
        is_ended: Whether a line feed follows.
    """

    data: bytes | None
    start: int
    is_ended: bool


def split_lines(pieces: Iterable[bytes], *, max_bytes: int) -> Iterator[Line]:
    """Cut at line feeds; a line over `max_bytes` is passed over without being held."""
    held: list[bytes] = []
    held_bytes = start = 0
    is_too_long = False
    for piece in pieces:
        *ended, rest = piece.split(b"\n")
        for part in ended:
            size = held_bytes + len(part)
            too_long = is_too_long or size > max_bytes
            yield Line(None if too_long else b"".join((*held, part)), start, is_ended=True)
            start += size + 1
            held, held_bytes, is_too_long = [], 0, False
        held_bytes += len(rest)
        if is_too_long or held_bytes > max_bytes:
            held, is_too_long = [], True
        elif rest:
            held.append(rest)
    if held_bytes:
        yield Line(None if is_too_long else b"".join(held), start, is_ended=False)


def _read_parquet(raw: RawFile, text_field: str, max_bytes: int) -> Iterator[Record]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = raw.planned.path
    raw.finish()  # hashes the file, whose parts are then not read from front to back
    number = 0
    try:
        # A buffer reads pages as they are needed, where the default holds a whole column chunk.
        with pq.ParquetFile(raw.planned.location, buffer_size=1 << 20) as file:
            _check_column(file, path, text_field)
            for batch in file.iter_batches(_PARQUET_ROWS, columns=[text_field]):
                for value in batch.column(0).cast(pa.large_binary()):
                    number += 1
                    yield _parse_cell(value.as_py(), f"{path}:{number}", text_field, max_bytes)
    except (pa.ArrowException, OSError) as error:
        yield _left_out("truncated", f"{path}:{number + 1}: {error}")


def _check_column(file: Any, path: str, text_field: str) -> None:
    import pyarrow as pa

    schema = file.schema_arrow
    if text_field not in schema.names:
        raise DataError(
            f"{path} has no column {text_field!r}; it has {', '.join(schema.names)}.",
            hint="set text_field of this source to the column that holds the text",
        )
    kind = schema.field(text_field).type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise DataError(
            f"{path}: column {text_field!r} holds {kind}, not text.",
            hint="set text_field of this source to the column that holds the text",
        )


def _parse_cell(value: bytes | None, place: str, text_field: str, max_bytes: int) -> Record:
    if value is None:
        return _left_out("missing_field", f"{place}: {text_field!r} is null")
    text, notes = _decode(value, place)
    return checked(text, place, max_bytes, notes)

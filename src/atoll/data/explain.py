"""What an update was trained on, and which updates saw a document; offline, without a full read.

`explain_update` seeks: it reads the tokens of the rows asked for and the DOCUMENT records of the
shards they lie in. `updates_of_document` is the inverse; it reads the records, not the tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from atoll.data.cache import TOKENIZER_NAME, Cache
from atoll.data.documents import DocumentIndex, Piece, check_size, document_files, find_document
from atoll.data.order import Geometry, group_order, split_geometry
from atoll.errors import UsageError

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class Span:
    """The part of one document that lies in one row.

    Attributes:
        source: Name of the document's source.
        document: Its number in that source, counted before anything was dropped.
        file: The file it was read from; none where the cache was not made from files.
        offset: Tokens of the document before this part.
        row_start: Tokens of the row before this part.
        tokens: Length of this part; the row's last token is a target only.
        text: The part decoded.
    """

    source: str
    document: int
    file: str | None
    offset: int
    row_start: int
    tokens: int
    text: str


@dataclass(frozen=True, slots=True)
class ExplainedRow:
    """One row of an update.

    Attributes:
        row: Its number in the update, from 0.
        cursor: Rows read before it since the start of the run.
        pass_index: Pass, from 0.
        group: Shard group, from 0.
        sequence: Number of the sequence in the split.
        start: Its first token in the split.
        stop: One past its last token, the last target.
        spans: Its documents, in order.
    """

    row: int
    cursor: int
    pass_index: int
    group: int
    sequence: int
    start: int
    stop: int
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Sighting:
    """One row in which a document appeared."""

    step: int
    row: int
    cursor: int
    pass_index: int
    sequence: int


def explain_update(
    cache: Cache,
    *,
    step: int,
    rows_per_update: int,
    context_length: int,
    seed: int,
    group_shards: int,
    passes: int = 1,
    rows: range | None = None,
    decode: Decode | None = None,
) -> list[ExplainedRow]:
    """Return the rows that update `step` trains on, with their documents and text.

    Args:
        cache: The cache of the run.
        step: The update, from 1.
        rows_per_update: `training.batch_tokens / model.context_length`. With N local models, model
            i takes rows [i b, (i + 1) b), b = rows_per_update / N.
        context_length: Targets of one row.
        seed: `data.shuffle_seed`.
        group_shards: `data.shuffle_group_size`.
        passes: `data.passes`.
        rows: Only these rows of the update. Default: all.
        decode: Token ids to text. Default: the cache's own tokenizer.json.

    Raises:
        UsageError: There is no such update in those passes, or no such row in the update.
        CacheError: A file of the cache is missing or has another size than its manifest says.
    """
    geometry = split_geometry(
        cache.manifest, "train", context_length=context_length, group_shards=group_shards
    )
    total = passes * geometry.sequences
    if step < 1 or step * rows_per_update > total:
        raise UsageError(
            f"update {step} does not exist: {passes} pass(es) of this cache hold "
            f"{total // rows_per_update} updates of {rows_per_update} rows.",
            hint="choose a step from 1 to that number, or raise data.passes",
        )
    rows = range(rows_per_update) if rows is None else rows
    if any(row not in range(rows_per_update) for row in rows):
        raise UsageError(f"an update has rows 0 to {rows_per_update - 1}; {rows} was asked for.")
    index = DocumentIndex(cache)
    first = (step - 1) * rows_per_update
    places = [_locate(geometry, seed, first + row, row) for row in rows]
    covers = [index.covering(place.start, place.stop) for place in places]
    files = document_files(cache, (piece.document for cover in covers for piece in cover))
    decode = decode or _decoder(cache)
    return [
        replace(place, spans=_spans(cache, place, cover, files, decode))
        for place, cover in zip(places, covers, strict=True)
    ]


def updates_of_document(
    cache: Cache,
    *,
    source: str,
    document: int,
    rows_per_update: int,
    context_length: int,
    seed: int,
    group_shards: int,
    passes: int = 1,
) -> list[Sighting]:
    """Return every row in which a training document appears, in the order of training.

    Rows after the last complete update are never trained on and left out. The arguments are those
    of `explain_update`.

    Raises:
        UsageError: No such source, or no such document in the training split.
        CacheError: A file of the cache is missing or has another size than its manifest says.
    """
    geometry = split_geometry(
        cache.manifest, "train", context_length=context_length, group_shards=group_shards
    )
    start, stop = find_document(cache, source, document)
    # Sequence j holds tokens [jT, jT + T]: the token at jT is its first input and the last target
    # of sequence j - 1.
    first = max((start - 1) // context_length, 0)
    last = min((stop - 1) // context_length, geometry.sequences - 1)
    sightings = []
    for pass_index in range(passes):
        for group in range(geometry.group_of(first), geometry.group_of(last) + 1):
            origin = geometry.first_sequence(group)
            order = group_order(seed, pass_index, group, geometry.rows_in(group), shuffled=True)
            seen = np.flatnonzero((order + origin >= first) & (order + origin <= last))
            for index in seen.tolist():
                cursor = geometry.cursor_of(pass_index, group) + index
                step, row = divmod(cursor, rows_per_update)
                sequence = int(order[index]) + origin
                sightings.append(Sighting(step + 1, row, cursor, pass_index, sequence))
    complete = passes * geometry.sequences // rows_per_update
    return [sighting for sighting in sightings if sighting.step <= complete]


def _locate(geometry: Geometry, seed: int, cursor: int, row: int) -> ExplainedRow:
    place = geometry.place(cursor)
    rows_in_group = geometry.rows_in(place.group)
    order = _order(seed, place.pass_index, place.group, rows_in_group)
    sequence = geometry.first_sequence(place.group) + int(order[place.index])
    start = sequence * geometry.context_length
    stop = start + geometry.context_length + 1
    return ExplainedRow(row, cursor, place.pass_index, place.group, sequence, start, stop, ())


@lru_cache(maxsize=4)
def _order(seed: int, pass_index: int, group: int, rows: int) -> np.ndarray:
    return group_order(seed, pass_index, group, rows, shuffled=True)


def _spans(
    cache: Cache,
    row: ExplainedRow,
    pieces: list[Piece],
    files: dict[tuple[int, int], str],
    decode: Decode,
) -> tuple[Span, ...]:
    tokens = _read_tokens(cache, row.start, row.stop)
    return tuple(
        Span(
            source=cache.manifest.sources[piece.document[0]].name,
            document=piece.document[1],
            file=files.get(piece.document),
            offset=piece.start - piece.begin,
            row_start=piece.start - row.start,
            tokens=piece.stop - piece.start,
            text=decode(tokens[piece.start - row.start : piece.stop - row.start].tolist()),
        )
        for piece in pieces
    )


def _read_tokens(cache: Cache, start: int, stop: int) -> np.ndarray:
    """Return the training tokens [start, stop), from as many shards as they lie in."""
    shard_tokens, dtype = cache.manifest.shard_tokens, cache.dtype
    parts = []
    for number in range(start // shard_tokens, (stop - 1) // shard_tokens + 1):
        shard = cache.manifest.splits["train"].shards[number]
        path = cache.folder / shard.file
        check_size(path, shard.tokens * dtype.itemsize)
        first = max(start - number * shard_tokens, 0)
        count = min(stop - number * shard_tokens, shard.tokens) - first
        parts.append(np.fromfile(path, dtype, count, offset=first * dtype.itemsize))
    return np.concatenate(parts)


def _decoder(cache: Cache) -> Decode:
    """Return the decoding of the cache's own tokenizer, special tokens shown."""
    from tokenizers import Tokenizer

    path = cache.folder / TOKENIZER_NAME
    check_size(path, cache.manifest.tokenizer.file.bytes)
    tokenizer = Tokenizer.from_file(str(path))
    return lambda ids: tokenizer.decode(list(ids), skip_special_tokens=False)

"""From staged ids in source order to the shards of each split, and the manifest over them.

A finished shard leaves a receipt, WORK/train-00000.json; a shard without one is written again.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from atoll.data.arrange import PLACED, SPLITS, Arranged
from atoll.data.cache import DOCUMENT, Shard, Split, SplitName
from atoll.data.settings import Settings
from atoll.data.shards import shard_stem, write_shard
from atoll.data.staging import TokenReader
from atoll.data.verify import wrong_sizes
from atoll.errors import ConfigError
from atoll.files import write_json

_PIECE_TOKENS = 1 << 20

MOST_SHARDS = 100_000
"""Shards of one split: the five digits of their names, and what a folder may hold with ease."""


def assemble(
    folder: Path,
    work: Path,
    arranged: Arranged,
    *,
    dtype: np.dtype[Any],
    settings: Settings,
    before_shard: Callable[[int, int, int], None],
) -> dict[SplitName, Split]:
    """Write every shard that is not finished, and return what the splits hold.

    Args:
        folder: The cache's folder.
        work: Folder of the staged files and receipts.
        arranged: The order of documents.
        dtype: Element type of the ids.
        settings: Says how long shards are and what was added to documents.
        before_shard: Called before each shard with tokens written, tokens in all, and bytes of one.

    Raises:
        ConfigError: The shards are so short that there would be more than MOST_SHARDS of a split.
    """
    orders: dict[SplitName, np.ndarray] = {
        name: _read_order(work / f"order.{name}") for name in SPLITS
    }
    shard_tokens = settings.data.shard_tokens
    total = sum(_num_tokens(placed) for placed in orders.values())
    check_number_of_shards(max(_num_tokens(placed) for placed in orders.values()), shard_tokens)
    written = 0
    splits: dict[SplitName, Split] = {}
    reader = TokenReader(work, dtype)
    try:
        for name, placed in orders.items():
            shards = []
            for number, start in enumerate(range(0, _num_tokens(placed), shard_tokens)):
                before_shard(written, total, dtype.itemsize)
                stop = min(start + shard_tokens, _num_tokens(placed))
                pieces = _pieces(placed, reader, dtype, start, stop)
                documents = _documents(placed, start, stop)
                shards.append(_shard(folder, work, name, number, pieces, documents, dtype.itemsize))
                written += stop - start
            used = arranged.used[name]
            splits[name] = Split(
                tokens=_num_tokens(placed),
                documents=len(placed),
                text_bytes=sum(part.text_bytes for part in used),
                bos_added=len(placed) if settings.tokenizer.add_bos else 0,
                eos_added=len(placed) if settings.tokenizer.add_eos else 0,
                shards=shards,
            )
    finally:
        reader.close()
    return splits


def check_number_of_shards(num_tokens: int, shard_tokens: int) -> None:
    """Refuse a split of countless files; `Raises` as in `assemble`."""
    if -(-num_tokens // shard_tokens) > MOST_SHARDS:
        least = -(-num_tokens // MOST_SHARDS)
        raise ConfigError(
            [
                f"data.shard_tokens is {shard_tokens}: {num_tokens:,} tokens would take more than "
                f"{MOST_SHARDS:,} files."
            ],
            hint=f"set data.shard_tokens to {least} or more; the default is 33,554,432",
        )


def _shard(
    folder: Path,
    work: Path,
    split: SplitName,
    number: int,
    pieces: Iterator[np.ndarray],
    documents: np.ndarray,
    itemsize: int,
) -> Shard:
    receipt = work / f"{shard_stem(split, number)}.json"
    if receipt.exists():
        shard = Shard.model_validate_json(receipt.read_bytes())
        if not wrong_sizes(folder, shard.sizes(itemsize)):
            return shard
    shard = write_shard(folder, split=split, number=number, tokens=pieces, documents=documents)
    write_json(receipt, shard.model_dump(), fault="prepare.receipt")
    return shard


def _pieces(
    placed: np.ndarray, reader: TokenReader, dtype: np.dtype[Any], start: int, stop: int
) -> Iterator[np.ndarray]:
    """Give the ids of positions [start, stop) of a split, gathered from the staged file."""
    row = int(np.searchsorted(placed["start"], start, side="right")) - 1
    position = start
    while position < stop:
        piece = np.empty(min(_PIECE_TOKENS, stop - position), dtype)
        filled = 0
        while filled < len(piece):
            document = placed[row]
            inside = position - int(document["start"])
            count = min(len(piece) - filled, int(document["tokens"]) - inside)
            reader.read_into(piece[filled : filled + count], int(document["staged"]) + inside)
            filled += count
            position += count
            if inside + count == int(document["tokens"]):
                row += 1
        yield piece


def _documents(placed: np.ndarray, start: int, stop: int) -> np.ndarray:
    first, last = np.searchsorted(placed["start"], [start, stop])
    documents = np.zeros(last - first, DOCUMENT)
    for name in ("start", "source", "number", "text_bytes"):
        documents[name] = placed[name][first:last]
    return documents


def _read_order(path: Path) -> np.ndarray:
    if not path.stat().st_size:
        return np.zeros(0, PLACED)
    return np.memmap(path, dtype=PLACED, mode="r")


def _num_tokens(placed: np.ndarray) -> int:
    return int(placed["start"][-1] + placed["tokens"][-1]) if len(placed) else 0

"""A finished cache made from arrays of ids: for tests, for benchmarks, and for other tools."""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np

from atoll.data.cache import (
    DOCUMENT,
    MANIFEST_NAME,
    SOURCES_NAME,
    TOKENIZER_NAME,
    Cache,
    CacheManifest,
    SourceFacts,
    Split,
    SplitName,
    TokenizerFacts,
    dtype_for_vocabulary,
    token_dtype,
)
from atoll.data.shards import write_file, write_shard
from atoll.errors import CacheError
from atoll.files import identity, write_bytes

_PIECE_TOKENS = 1 << 20


def write_cache(
    folder: Path,
    *,
    train: np.ndarray,
    validation: np.ndarray | None = None,
    train_documents: np.ndarray | None = None,
    validation_documents: np.ndarray | None = None,
    shard_tokens: int = 33_554_432,
    vocab_size: int | None = None,
    dtype: Literal["uint16", "uint32"] | None = None,
    tokenizer_json: bytes = b"{}\n",
) -> Cache:
    """Write a finished cache from ids and open it.

    Args:
        folder: The cache's folder; created, and must hold no finished cache.
        train: Ids of the training split, one-dimensional.
        validation: Ids of the validation split; none leaves it empty.
        train_documents: DOCUMENT records in ascending order of `start`, the first at 0, or only
            those starts. Default: one document that covers the split.
        validation_documents: The same for the validation split.
        shard_tokens: Tokens of each shard but the last.
        vocab_size: Ids below this may occur. Default: the largest id that occurs plus one.
        dtype: Element type. Default: by `vocab_size`.
        tokenizer_json: Content of tokenizer.json; the default is none that could decode.

    Raises:
        CacheError: An id does not fit, or the folder holds a finished cache.
    """
    if (folder / MANIFEST_NAME).exists():
        raise CacheError(f"{folder} holds a finished cache already; a cache is never changed.")
    splits: dict[SplitName, tuple[np.ndarray, np.ndarray]] = {
        "train": (train, _documents(train, train_documents)),
        "validation": (_or_empty(validation), _documents(validation, validation_documents)),
    }
    largest = max((int(ids.max()) for ids, _ in splits.values() if len(ids)), default=1)
    vocab_size = vocab_size or largest + 1
    dtype = dtype or dtype_for_vocabulary(vocab_size)
    if largest >= vocab_size or largest > np.iinfo(dtype).max:
        raise CacheError(f"id {largest} does not fit {dtype} and {vocab_size} ids.")
    settings = {"written_from": "arrays", "shard_tokens": shard_tokens}
    written: dict[SplitName, Split] = {
        name: _write_split(folder, name, ids.astype(token_dtype(dtype)), documents, shard_tokens)
        for name, (ids, documents) in splits.items()
    }
    manifest = CacheManifest(
        settings_identity=identity(settings),
        settings=settings,
        dtype=dtype,
        shard_tokens=shard_tokens,
        tokenizer=_tokenizer_facts(folder, tokenizer_json, vocab_size),
        listing=write_file(folder / SOURCES_NAME, [], fault="prepare.listing"),
        sources=_source_facts(written),
        splits=written,
        ledger={},
    )
    write_bytes(folder / MANIFEST_NAME, manifest.to_bytes(), fault="prepare.manifest")
    return Cache(folder)


def _write_split(
    folder: Path, name: SplitName, ids: np.ndarray, documents: np.ndarray, shard_tokens: int
) -> Split:
    shards = []
    for number, start in enumerate(range(0, len(ids), shard_tokens)):
        stop = min(start + shard_tokens, len(ids))
        first, last = np.searchsorted(documents["start"], [start, stop])
        shards.append(
            write_shard(
                folder,
                split=name,
                number=number,
                tokens=_pieces(ids[start:stop]),
                documents=documents[first:last],
            )
        )
    return Split(
        tokens=len(ids),
        documents=len(documents),
        text_bytes=int(documents["text_bytes"].sum()),
        bos_added=0,
        eos_added=0,
        shards=shards,
    )


def _pieces(ids: np.ndarray) -> Iterator[np.ndarray]:
    for start in range(0, len(ids), _PIECE_TOKENS):
        yield ids[start : start + _PIECE_TOKENS]


def _or_empty(ids: np.ndarray | None) -> np.ndarray:
    return np.zeros(0, np.int64) if ids is None else ids


def _documents(ids: np.ndarray | None, given: np.ndarray | None) -> np.ndarray:
    if ids is None or not len(ids):
        return np.zeros(0, DOCUMENT)
    if given is not None and given.dtype == DOCUMENT:
        return given
    starts = np.zeros(1, np.uint64) if given is None else np.asarray(given, np.uint64)
    documents = np.zeros(len(starts), DOCUMENT)
    documents["start"] = starts
    documents["number"] = np.arange(len(starts))
    documents["text_bytes"] = np.diff(starts, append=np.uint64(len(ids)))
    return documents


def _tokenizer_facts(folder: Path, content: bytes, vocab_size: int) -> TokenizerFacts:
    return TokenizerFacts(
        file=write_file(folder / TOKENIZER_NAME, [content], fault="prepare.tokenizer"),
        library_version="none",
        vocab_size=vocab_size,
        bos_id=None,
        eos_id=None,
        unk_id=None,
        add_bos=False,
        add_eos=False,
        probes=[],
    )


def _source_facts(splits: dict[SplitName, Split]) -> list[SourceFacts]:
    documents = sum(split.documents for split in splits.values())
    return [
        SourceFacts(
            name="arrays",
            weight=None,
            revision=None,
            files=0,
            bytes=0,
            records=documents,
            documents=documents,
            text_bytes=sum(split.text_bytes for split in splits.values()),
        )
    ]

"""Blocks of documents to ids, in worker threads, results in source order.

Threads, not processes: the native encoder lets go of the interpreter, so two threads keep two
cores busy, start at once, copy no text and die with the process.
"""

import contextlib
import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from atoll.data.blocks import Block, Document
from atoll.data.pieces import can_cut, cut
from atoll.data.tokenizer import Tokenizer
from atoll.errors import DataError

_PARALLELISM = "TOKENIZERS_PARALLELISM"


@dataclass(frozen=True, slots=True)
class Encoded:
    """The ids of a block.

    Attributes:
        block: The block.
        tokens: Ids of its documents one after the other, with beginning and end where asked for.
        lengths: Tokens of each document; 0 where the tokenizer gives none, with nothing added.
        has_unknown: Whether each document holds the unknown id.
    """

    block: Block
    tokens: np.ndarray
    lengths: np.ndarray
    has_unknown: np.ndarray


class Encoder:
    """Encodes blocks with one tokenizer; the one place where beginning and end are added."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        add_bos: bool,
        add_eos: bool,
        dtype: np.dtype[Any],
        piece_bytes: int,
    ) -> None:
        self._tokenizer = tokenizer
        self._head = _special(tokenizer.bos_id) if add_bos else []
        self._tail = _special(tokenizer.eos_id) if add_eos else []
        self._dtype = dtype
        self._piece_bytes = piece_bytes
        self._can_cut = can_cut(tokenizer.content)

    def encode(self, block: Block) -> Encoded:
        """Encode one block.

        Raises:
            DataError: The tokenizer fails on a document; names it.
        """
        documents = block.documents
        parts: list[np.ndarray] = []
        lengths = np.zeros(len(documents), np.int64)
        has_unknown = np.zeros(len(documents), bool)
        for place, ids in enumerate(self._ids(documents)):
            if not len(ids):
                continue
            whole = (self._head, ids, self._tail)
            parts.extend(np.asarray(part, self._dtype) for part in whole if len(part))
            lengths[place] = len(ids) + len(self._head) + len(self._tail)
            has_unknown[place] = self._tokenizer.unk_id is not None and bool(
                (ids == self._tokenizer.unk_id).any()
            )
        tokens = np.concatenate(parts) if parts else np.zeros(0, self._dtype)
        return Encoded(block, tokens, lengths, has_unknown)

    def _ids(self, documents: list[Document]) -> Iterator[np.ndarray]:
        """Give the ids of each document; short ones are encoded together, long ones in pieces."""
        short = [d for d in documents if d.text_bytes <= self._piece_bytes]
        ids_of_short = iter(self._try(short))
        for document in documents:
            if document.text_bytes <= self._piece_bytes:
                yield next(ids_of_short)
            elif self._can_cut:
                pieces = cut(document.text, piece_chars=self._piece_bytes)
                yield np.concatenate([self._try([document._replace(text=p)])[0] for p in pieces])
            else:
                yield self._try([document])[0]

    def _try(self, documents: list[Document]) -> list[np.ndarray]:
        try:
            found = self._tokenizer.encode_batch([document.text for document in documents])
        except BaseException as error:  # native code panics with a BaseException of its own
            if len(documents) > 1:
                return [self._try([document])[0] for document in documents]
            (document,) = documents
            raise DataError(
                f"the tokenizer fails on record {document.number} of {document.place} "
                f"({document.text_bytes:,} bytes): {error}.",
                hint="leave the document out of the source, or set data.max_document_bytes below "
                "its size",
            ) from error
        return [np.asarray(ids, np.uint32) for ids in found]


def encode_blocks(blocks: Iterable[Block], encoder: Encoder, *, workers: int) -> Iterator[Encoded]:
    """Encode blocks in `workers` threads and give the results in the order of the blocks.

    At most `workers` + 1 blocks and their results are in memory besides the one given.
    """
    waiting: deque[Future[Encoded]] = deque()
    with _serial_tokenizers(), ThreadPoolExecutor(workers, "encode") as pool:
        try:
            for block in blocks:
                waiting.append(pool.submit(encoder.encode, block))
                if len(waiting) > workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def default_workers() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextlib.contextmanager
def _serial_tokenizers() -> Iterator[None]:
    """Keep each native call on the thread that makes it, so that `workers` means what it says.

    The library takes this from the environment alone, at every call.
    """
    before = os.environ.get(_PARALLELISM)
    os.environ[_PARALLELISM] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_PARALLELISM]
        else:
            os.environ[_PARALLELISM] = before


def _special(id: int | None) -> list[int]:
    assert id is not None, "a token to be added has no id; open_tokenizer refuses that"
    return [id]

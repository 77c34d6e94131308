"""What a language model has to beat: token frequencies, and gzip on the same held-out text."""

import gzip
import math
from collections.abc import Iterator
from typing import Literal, Protocol

import numpy as np

from atoll.data.cache import DOCUMENT, Cache
from atoll.errors import CacheError

READ_TOKENS = 1 << 20


class Decoder(Protocol):
    def decode(self, ids: list[int]) -> str:
        """Return the text of `ids`, specials left out."""
        ...


def unigram_bits_per_byte(cache: Cache) -> float:
    """Score held-out tokens by their frequency in training, one added to every count.

    Every held-out token but the first is scored, as the model's targets are.

    Returns:
        Bits per UTF-8 byte of held-out text.
    """
    vocab_size = cache.manifest.tokenizer.vocab_size
    counts = np.ones(vocab_size, dtype=np.int64)
    for tokens in _pieces(cache, "train"):
        counts += np.bincount(tokens, minlength=vocab_size)
    bits = math.log2(int(counts.sum())) - np.log2(counts)
    total = sum(float(bits[tokens].sum()) for tokens in _pieces(cache, "validation"))
    first = next(_pieces(cache, "validation"))[0]
    return (total - float(bits[first])) / _text_bytes(cache)


def gzip_bits_per_byte(cache: Cache, tokenizer: Decoder) -> float:
    """Compress the held-out documents, one after another, with gzip at its strongest level.

    Returns:
        Bits of the compressed stream per UTF-8 byte of held-out text.
    """
    text = "".join(held_out_texts(cache, tokenizer)).encode("utf-8")
    return 8 * len(gzip.compress(text, compresslevel=9, mtime=0)) / len(text)


def held_out_texts(cache: Cache, tokenizer: Decoder) -> Iterator[str]:
    """Yield the text of every held-out document, in order."""
    split = cache.manifest.splits["validation"]
    tokens = np.concatenate(list(_pieces(cache, "validation")))
    starts = np.concatenate(
        [np.fromfile(cache.folder / shard.documents_file, dtype=DOCUMENT) for shard in split.shards]
    )["start"].astype(np.int64)
    for begin, end in zip(starts, [*starts[1:], split.tokens], strict=True):
        yield tokenizer.decode(tokens[begin:end].tolist())


def _pieces(cache: Cache, split: Literal["train", "validation"]) -> Iterator[np.ndarray]:
    for shard in cache.manifest.splits[split].shards:
        with open(cache.folder / shard.file, "rb") as file:
            while data := file.read(READ_TOKENS * cache.dtype.itemsize):
                yield np.frombuffer(data, dtype=cache.dtype)


def _text_bytes(cache: Cache) -> int:
    text_bytes = cache.manifest.splits["validation"].text_bytes
    if text_bytes == 0:
        raise CacheError(
            f"{cache.folder} holds no held-out text.",
            hint="set data.validation_fraction above 0 or give data.validation_source",
        )
    return text_bytes

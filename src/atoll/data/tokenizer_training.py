"""Training a byte-level BPE tokenizer on a bounded, even sample of the training documents."""

import heapq
import threading
from collections.abc import Callable, Iterable, Sequence

from atoll.data.blocks import Document
from atoll.data.tokenizer import Tokenizer
from atoll.errors import DataError

BOS_TOKEN = "<|begin_of_text|>"
EOS_TOKEN = "<|end_of_text|>"

_LONGEST_PART_BYTES = 1 << 20

# Bytes that no UTF-8 text holds: 243 are left, so that a vocabulary of 256 has room for specials.
_NEVER_IN_UTF8 = frozenset({0xC0, 0xC1, *range(0xF5, 0x100)})


def train_tokenizer(texts: Sequence[str], *, vocab_size: int) -> Tokenizer:
    """Train on texts; the result depends on them and on the version of `tokenizers` alone.

    Args:
        texts: What `sample_texts` took.
        vocab_size: Ids at most, with the two special ones; at least 256.

    Raises:
        DataError: There is no text.
    """
    if not texts:
        raise DataError(
            "the corpus holds no training document to train a tokenizer on.",
            hint="check data.source: empty, blank and binary files are left out, and "
            "data.validation_fraction must leave documents to train on",
        )
    return open_trained(_run_beside(lambda: _train_bpe(texts, vocab_size)))


def open_trained(content: bytes) -> Tokenizer:
    """Open the content of a tokenizer that was trained here."""
    tokenizer = Tokenizer(content)
    tokenizer.bos_id = tokenizer.native.token_to_id(BOS_TOKEN)
    tokenizer.eos_id = tokenizer.native.token_to_id(EOS_TOKEN)
    return tokenizer


def sample_texts(documents: Iterable[Document], *, max_bytes: int) -> list[str]:
    """Take the documents with the smallest digests, as many as fit, in order of digest.

    Digests spread evenly, so this is an even sample of the different documents, and it does not
    depend on their order. Of a long document the first MiB counts.
    """
    longest_bytes = min(_LONGEST_PART_BYTES, max_bytes)
    kept: dict[bytes, tuple[str, int]] = {}
    largest_first: list[tuple[int, bytes]] = []
    kept_bytes, cut = 0, b"\xff" * 17  # above every digest
    for document in documents:
        digest = document.digest
        if digest >= cut or digest in kept:
            continue
        text, size = _head(document, longest_bytes)
        kept[digest] = (text, size)
        heapq.heappush(largest_first, (-int.from_bytes(digest, "big"), digest))
        kept_bytes += size
        while kept_bytes > max_bytes:
            _, cut = heapq.heappop(largest_first)
            kept_bytes -= kept.pop(cut)[1]
    return [kept[digest][0] for digest in sorted(kept)]


def _head(document: Document, max_bytes: int) -> tuple[str, int]:
    if document.text_bytes <= max_bytes:
        return document.text, document.text_bytes
    head = document.text[:max_bytes].encode("utf-8")[:max_bytes].decode("utf-8", "ignore")
    return head, len(head.encode("utf-8"))


def _train_bpe(texts: Sequence[str], vocab_size: int) -> bytes:
    from tokenizers import Tokenizer as NativeTokenizer
    from tokenizers import decoders, models, pre_tokenizers, trainers

    native = NativeTokenizer(models.BPE())
    native.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    native.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS_TOKEN, EOS_TOKEN],
        initial_alphabet=byte_alphabet(),
        show_progress=False,
    )
    native.train_from_iterator(texts, trainer)
    return native.to_str(pretty=True).encode("utf-8")


def byte_alphabet() -> list[str]:
    """Return the letters by which byte-level BPE writes each byte that UTF-8 text can hold."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {byte: chr(byte) for byte in printable}
    others = (byte for byte in range(0x100) if byte not in letters)
    letters |= {byte: chr(0x100 + place) for place, byte in enumerate(others)}
    return [letters[byte] for byte in range(0x100) if byte not in _NEVER_IN_UTF8]


def _run_beside(work: Callable[[], bytes]) -> bytes:
    """Run native code beside this thread, which then still answers signals.

    The thread ends with the process: training holds nothing that has to be put away.
    """
    outcome: list[bytes | BaseException] = []

    def run() -> None:
        try:
            outcome.append(work())
        except BaseException as error:  # noqa: BLE001 - raised again below, in the thread that waits
            outcome.append(error)

    thread = threading.Thread(target=run, name="tokenizer-training", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(timeout=0.1)  # on Windows, only a wait with a timeout lets signals through
    (result,) = outcome
    if isinstance(result, BaseException):
        raise DataError(f"training the tokenizer failed: {result}.") from result
    return result

"""Text to ids and back, with the guards that keep a cache's ids what they were.

No special id ever comes out of text: text that spells a special token is encoded letter by letter,
and beginning and end ids are added in one place only, by who joins documents (`encode.py`).
"""

import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from atoll.data.cache import TOKENIZER_NAME, Cache, Probe
from atoll.errors import CacheError, DataError
from atoll.files import sha256_bytes

if TYPE_CHECKING:
    from tokenizers import Tokenizer as NativeTokenizer

PROBE_TEXTS = (
    "Hello, world!",
    "def f(x):\n    return x + 1\n",
    "  two  spaces,\ttab\n\n\nand lines\r\n",
    "naïve café, Straße, 中文, עברית, 🙂",
    "1234567890 3.14159e-10",
    "it's DON'T <|end_of_text|> </s>",
)


class Tokenizer:
    """A Hugging Face `tokenizer.json` that adds nothing to what it is given."""

    def __init__(
        self, content: bytes, *, bos_id: int | None = None, eos_id: int | None = None
    ) -> None:
        """Build it from the bytes of a tokenizer.json.

        Raises:
            DataError: The bytes are not a tokenizer that this version of `tokenizers` reads.
        """
        self.content = content
        self.sha256 = sha256_bytes(content)
        self.bos_id = bos_id
        self.eos_id = eos_id
        self.native = _load_native(content)
        self.vocab_size = (
            max(self.native.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        )
        self.unk_id = _unknown_id(self.native, content)

    @classmethod
    def from_cache(cls, cache: Cache) -> "Tokenizer":
        """Open the tokenizer that made a cache, and check that it still gives the same ids.

        Raises:
            CacheError: Its file changed, or the installed `tokenizers` encodes a probe otherwise.
        """
        facts = cache.manifest.tokenizer
        path = cache.folder / TOKENIZER_NAME
        try:
            content = path.read_bytes()
        except OSError as error:
            raise CacheError(f"cannot read {path}: {error.strerror}.") from error
        if sha256_bytes(content) != facts.sha256:
            raise CacheError(
                f"{path} does not match its digest in the manifest.",
                hint="restore the file from a copy, or prepare into another data.cache_dir",
            )
        tokenizer = cls(content, bos_id=facts.bos_id, eos_id=facts.eos_id)
        tokenizer.check_probes(facts.probes, made_with=facts.library_version)
        return tokenizer

    def encode(self, text: str) -> list[int]:
        """Return the ids of one text, without beginning and end."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, without beginning and end."""
        # The fast form leaves out character offsets, which are never used here: same ids, about a
        # quarter less time (measured on Python source, vocabulary 4,096).
        found = self.native.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in found]

    def decode(self, ids: Iterable[int], *, keep_special: bool = True) -> str:
        """Return the text of `ids`; special tokens are spelt out or left out."""
        return self.native.decode(list(ids), skip_special_tokens=not keep_special)

    def special(self, id: int | None) -> str | None:
        """Return how a special id is spelt."""
        return None if id is None else self.native.id_to_token(id)

    def probes(self) -> list[Probe]:
        """Encode the probe texts, to be kept in the manifest."""
        encoded = self.encode_batch(PROBE_TEXTS)
        return [Probe(text=text, ids=ids) for text, ids in zip(PROBE_TEXTS, encoded, strict=True)]

    def check_probes(self, probes: Sequence[Probe], *, made_with: str) -> None:
        """Compare with the ids of earlier.

        Raises:
            CacheError: A probe is encoded differently now; names it and both versions.
        """
        for probe, ids in zip(probes, self.encode_batch([p.text for p in probes]), strict=True):
            if ids != probe.ids:
                raise CacheError(
                    f"the tokenizer now encodes {probe.text!r} as {ids}, but the cache holds "
                    f"{probe.ids}: it was made with tokenizers {made_with}, "
                    f"{library_version()} is installed.",
                    hint=f"install tokenizers=={made_with}, or prepare the cache again into "
                    "another data.cache_dir",
                )


def library_version() -> str:
    """Return the version of the installed `tokenizers`."""
    import tokenizers

    return tokenizers.__version__


def _load_native(content: bytes) -> "NativeTokenizer":
    from tokenizers import Tokenizer as NativeTokenizer

    try:
        native = NativeTokenizer.from_str(content.decode("utf-8"))
    except Exception as error:  # the library raises no narrower class
        raise DataError(
            f"the tokenizer cannot be read by tokenizers {library_version()}: {error}.",
            hint="give a tokenizer.json as `save_pretrained` writes it",
        ) from error
    if getattr(native.model, "dropout", None):
        raise DataError(
            "the tokenizer drops merges at random, so it gives other ids each time.",
            hint="set `dropout` to null in its tokenizer.json",
        )
    native.no_truncation()
    native.no_padding()
    native.encode_special_tokens = True
    return native


def _unknown_id(native: "NativeTokenizer", content: bytes) -> int | None:
    model: dict[str, Any] = json.loads(content).get("model", {})
    if isinstance(model.get("unk_id"), int):  # Unigram names it by number
        return model["unk_id"]
    token = model.get("unk_token")
    return native.token_to_id(token) if isinstance(token, str) else None

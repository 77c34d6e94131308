"""The whole of `prepare` against a bare `tokenizers` encode_batch of the same text.

`prepare` reads JSON lines, drops duplicates, splits, encodes, shuffles, writes shards and digests
and makes them durable; the bare side encodes texts that are in memory already and drops the ids.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

from pydantic import Field

from atoll.bench.contest import Contest, Target
from atoll.bench.machine import usable_cores
from atoll.bench.timing import Condition
from atoll.config.base import Section
from atoll.config.data import DataConfig, TokenizerConfig
from atoll.config.model import ModelConfig
from atoll.data.cache import Cache
from atoll.data.prepare import prepare
from atoll.errors import AtollError, DataError, UsageError
from atoll.files import MIB

CHUNK_TEXTS = 1000


class PrepareSettings(Section):
    folder: Path | None = None
    """Text files below it, ending in .py, .txt or .md, are the corpus. Default: Python's own
    standard library."""
    text_mib: float = Field(default=16.0, gt=0)
    """Take files up to this much UTF-8 text, in MiB."""
    vocab_size: int = Field(default=4096, ge=256)
    """Ids of the tokenizer, which is trained on the text beforehand."""
    bare: Literal["encode_batch", "encode_batch_fast"] = "encode_batch"
    """Call of `tokenizers` that prepare is held against; the fast one leaves out offsets."""


def prepare_contests(settings: PrepareSettings) -> Iterator[Contest]:
    """Yield the contest; corpus and caches are removed afterwards."""
    texts = _texts(settings)
    with tempfile.TemporaryDirectory(prefix="atoll-bench-") as name:
        folder = Path(name)
        corpus = folder / "corpus.jsonl"
        with open(corpus, "w", encoding="utf-8") as file:
            file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
        model = ModelConfig(vocab_size=settings.vocab_size)
        tokenizer = folder / "tokenizer.json"
        trained = prepare(_data(folder / "training", corpus, None), model)
        shutil.copyfile(trained.folder / "tokenizer.json", tokenizer)
        yield _contest(settings, texts, folder / "caches", corpus, tokenizer, model)


def _contest(
    settings: PrepareSettings,
    texts: list[str],
    caches: Path,
    corpus: Path,
    tokenizer: Path,
    model: ModelConfig,
) -> Contest:
    data = _data(caches, corpus, tokenizer)
    tokens = check_tokens(prepare(data, model), tokenizer, texts)
    chosen, bare = _fastest(_bare(settings, tokenizer, texts))
    text_bytes = sum(len(text.encode("utf-8")) for text in texts)
    return Contest(
        name=f"prepare, {text_bytes / MIB:.1f} MiB in {len(texts)} documents",
        a=Condition(
            "atoll prepare",
            lambda: prepare(data, model),
            reset=lambda: shutil.rmtree(caches, ignore_errors=True),
        ),
        b=Condition(f"tokenizers {settings.bare}", bare),
        target=Target("speed", 0.8),
        facts={
            "text_bytes": text_bytes,
            "documents": len(texts),
            "tokens": tokens,
            "cores": usable_cores(),
            "bare_call": chosen,
        },
    )


def check_tokens(cache: Cache, tokenizer: Path, texts: list[str]) -> int:
    """Return the tokens of all texts without beginnings and ends, by the bare tokenizer.

    Raises:
        AtollError: The cache holds another number: prepare would not have done the same work.
    """
    from tokenizers import Tokenizer

    native = Tokenizer.from_file(str(tokenizer))
    expected = sum(len(e.ids) for e in native.encode_batch(texts, add_special_tokens=False))
    splits = cache.manifest.splits.values()
    found = sum(split.tokens - split.bos_added - split.eos_added for split in splits)
    if found != expected:
        raise AtollError(f"the cache holds {found} tokens of text, and the texts have {expected}.")
    return expected


def _data(cache_dir: Path, corpus: Path, tokenizer: Path | None) -> DataConfig:
    return DataConfig(
        cache_dir=cache_dir,
        source=str(corpus),
        tokenizer=TokenizerConfig(path=str(tokenizer) if tokenizer else None),
        prepare_workers=usable_cores(),
    )


def _bare(
    settings: PrepareSettings, tokenizer: Path, texts: list[str]
) -> dict[str, Callable[[], object]]:
    """Return encode_batch over all texts, in one call and in several."""
    from tokenizers import Tokenizer

    if os.environ.get("TOKENIZERS_PARALLELISM", "true").lower() not in ("true", "1", "on"):
        raise UsageError(
            "TOKENIZERS_PARALLELISM turns the bare side's threads off.",
            hint="unset it: both sides must use the same cores",
        )
    native: Any = Tokenizer.from_file(str(tokenizer))
    encode = getattr(native, settings.bare)
    chunks = [texts[i : i + CHUNK_TEXTS] for i in range(0, len(texts), CHUNK_TEXTS)]

    def in_chunks() -> None:
        for chunk in chunks:
            encode(chunk, add_special_tokens=False)

    return {
        "all texts in one call": lambda: encode(texts, add_special_tokens=False),
        f"{CHUNK_TEXTS} texts a call": in_chunks,
    }


def _fastest(calls: dict[str, Callable[[], object]]) -> tuple[str, Callable[[], object]]:
    """Return the way that takes least, so that prepare is held against the best."""
    seconds: dict[str, float] = {}
    for name, call in calls.items():
        started = perf_counter()
        call()
        seconds[name] = perf_counter() - started
    chosen = min(seconds, key=lambda name: seconds[name])
    return chosen, calls[chosen]


def _texts(settings: PrepareSettings) -> list[str]:
    """Return different texts in the order of paths, up to `text_mib`; other encodings are left out.

    Raises:
        DataError: There is no text file.
    """
    folder = settings.folder or Path(os.__file__).parent
    texts: dict[str, None] = {}
    left_bytes = settings.text_mib * MIB
    for path in sorted(p for p in folder.rglob("*") if p.suffix in (".py", ".txt", ".md")):
        if settings.folder is None and "site-packages" in path.parts:
            continue
        try:
            data = path.read_bytes()
            text = data.decode("utf-8")
        except (UnicodeDecodeError, OSError):
            continue  # the standard library has test data in other encodings
        if not text or len(data) > left_bytes:
            continue
        left_bytes -= len(data)
        texts[text] = None
    if not texts:
        raise DataError(f"{folder} holds no UTF-8 text file (.py, .txt or .md).")
    return list(texts)

"""Section `data`: where text comes from, how it becomes tokens, in which order they are read."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from atoll.config.base import BrokenRule, Section, refuse

HUB = "hub:"
"""Prefix of what comes from the Hugging Face hub."""


class SourceConfig(Section):
    """One source of documents, or one part of a mixture."""

    path: str = Field(min_length=1)
    """A file, a folder or a glob (`**` allowed), relative to the working folder; or `stdlib`, the
    running Python's own standard library; or `site-packages`, its installed packages; or
    `hub:OWNER/NAME`, a Hugging Face data set (extra `hub`)."""
    format: Literal["auto", "text", "jsonl", "parquet"] = "auto"
    """How files are read; `auto` goes by the file name: .jsonl[.gz|.zst], .parquet, else text."""
    text_field: str = "text"
    """Field or column that holds the text, for JSONL, Parquet and hub data sets."""
    revision: str | None = None
    """Commit, tag or branch of a hub data set; required for one."""
    subset: str | None = None
    """Configuration name of a hub data set."""
    split: str = "train"
    """Split of a hub data set."""
    weight: float | None = Field(default=None, gt=0)
    """Share of documents in a mixture, relative to the other sources' weights; the mixture ends
    where one source does. Default, for all or none: each source's own number, so all are used."""

    @model_validator(mode="after")
    def _hold_rules(self) -> Self:
        if self.path.startswith(HUB) and self.revision is None:
            refuse([BrokenRule(("path", "revision"), _add_revision(self.path))])
        return self


class TokenizerConfig(Section):
    """Which tokenizer turns text into tokens."""

    path: str | None = None
    """Tokenizer folder, `tokenizer.json`, or `hub:OWNER/NAME`; none trains one on the corpus."""
    revision: str | None = None
    """Commit, tag or branch of a hub tokenizer; required for one."""
    vocab_size: int | None = Field(default=None, ge=256)
    """Ids of a tokenizer trained here. Default: `model.vocab_size`."""
    train_bytes: int = Field(default=64 * 1024 * 1024, ge=1)
    """At most this many UTF-8 bytes of training documents, spread over the corpus, train it."""
    add_bos: bool = False
    """Put the beginning-of-sequence id before every document."""
    add_eos: bool = True
    """Put the end-of-sequence id after every document."""
    bos_token: str | None = None
    """Beginning token of a given tokenizer. Default: what the files beside it say."""
    eos_token: str | None = None
    """End token of a given tokenizer. Default: what the files beside it say."""

    @model_validator(mode="after")
    def _hold_rules(self) -> Self:
        if self.path is not None and self.path.startswith(HUB) and self.revision is None:
            refuse([BrokenRule(("path", "revision"), _add_revision(self.path))])
        if self.path is not None and self.vocab_size is not None:
            text = f"vocab_size {self.vocab_size} is for a tokenizer trained here; {self.path} has"
            refuse([BrokenRule(("path", "vocab_size"), f"{text} its own. Leave one of them out.")])
        return self


def _shape(value: Any) -> str:
    return "mapping" if isinstance(value, dict | Section) else "text"


def _shape_or_list(value: Any) -> str:
    return "list" if isinstance(value, list) else _shape(value)


# Told apart by shape, so that an error names the part that is wrong and not every alternative.
_Text = Annotated[Annotated[str, Field(min_length=1)], Tag("text")]
_Source = Annotated[SourceConfig, Tag("mapping")]
_Sources = Annotated[list[SourceConfig], Field(min_length=1), Tag("list")]
_Tokenizer = Annotated[TokenizerConfig, Tag("mapping")]


class DataConfig(Section):
    """Where text comes from, how it becomes tokens, and in which order they are read."""

    cache_dir: Path = Path("caches")
    """Parent folder of token caches; each lies in a sub-folder named after its identity."""
    cache_path: Path | None = None
    """One finished cache folder to use as it is, wherever it was prepared."""
    source: Annotated[_Text | _Source | _Sources, Discriminator(_shape_or_list)] = "stdlib"
    """Text to train on: a path, glob or name, one source with options, or a weighted mixture."""
    validation_source: Annotated[_Text | _Source, Discriminator(_shape)] | None = None
    """Text held out. Default: a share of `source`, chosen by the content of each document."""
    validation_fraction: float = Field(default=0.01, ge=0, lt=1)
    """Share of documents held out when `validation_source` is not given."""
    tokenizer: Annotated[_Text | _Tokenizer, Discriminator(_shape)] = TokenizerConfig()
    """A tokenizer's path or name, or its options."""
    max_document_bytes: int = Field(default=64 * 1024 * 1024, ge=1)
    """Longer documents are counted as oversized and left out."""
    on_bad_record: Literal["stop", "skip"] = "stop"
    """Whether a damaged record ends `prepare` or is counted and skipped."""
    shuffle_seed: int = Field(default=0, ge=0)
    """Seed of the document order, the mixture and the order of sequences."""
    shuffle_buffer: int = Field(default=65_536, ge=1)
    """Documents that the preparing shuffle chooses from; 1 keeps the order of the source."""
    shuffle_group_size: int = Field(default=2, ge=1)
    """Consecutive shards shuffled together in memory while training."""
    shard_tokens: int = Field(default=33_554_432, ge=2)
    """Tokens of one shard file."""
    prepare_workers: int | None = Field(default=None, ge=1)
    """Workers that encode text; the result does not depend on it. Default: the CPU count."""
    prefetch: bool = True
    """Whether a background thread reads the next shard group."""
    placement: Literal["auto", "pageable", "pinned", "device"] = "auto"
    """Where batches are assembled; `auto` is `device` on a GPU and `pageable` on a CPU."""
    passes: int = Field(default=1, ge=1)
    """Traversals of the training split that a budget may use."""

    @model_validator(mode="after")
    def _hold_rules(self) -> Self:
        refuse(_broken_rules(self))
        return self


def _broken_rules(data: DataConfig) -> Iterator[BrokenRule]:
    for name in ("source", "validation_source", "tokenizer"):
        value = getattr(data, name)
        if isinstance(value, str) and value.startswith(HUB):
            yield BrokenRule((name,), f"data.{name}: {_add_revision(value)}")
    sources = data.source if isinstance(data.source, list) else []
    weighted = sum(source.weight is not None for source in sources)
    if 0 < weighted < len(sources):
        yield BrokenRule(
            ("source",),
            f"data.source: {weighted} of {len(sources)} sources have a weight. "
            "Give all of them one, or none to use every document.",
        )


def _add_revision(path: str) -> str:
    return (
        f"{path} names no revision, so it may change. "
        f"Write {{path: {path}, revision: R}}, where R is a commit, tag or branch."
    )

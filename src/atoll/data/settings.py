"""Which settings decide the tokens of a cache, and so its name."""

import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll.config.data import DataConfig, SourceConfig, TokenizerConfig
from atoll.config.model import ModelConfig
from atoll.data.cache import FORMAT_VERSION
from atoll.errors import ConfigError
from atoll.files import identity

PYTHON_SOURCES = frozenset({"stdlib", "site-packages"})
"""Source names that mean Python files of the running interpreter."""


@dataclass(frozen=True, slots=True)
class Settings:
    """`data` in one form, whichever short form the recipe used.

    Attributes:
        data: The section itself, for what needs no other form.
        sources: Training sources, in order.
        validation: The validation source, or None to hold out a share by content.
        tokenizer: The tokenizer; without `path`, `vocab_size` is set.
        model_vocab_size: Rows of the model's embedding, a bound for the tokenizer's ids.
    """

    data: DataConfig
    sources: tuple[SourceConfig, ...]
    validation: SourceConfig | None
    tokenizer: TokenizerConfig
    model_vocab_size: int

    @property
    def all_sources(self) -> tuple[SourceConfig, ...]:
        """Every source that is read, the validation source last."""
        return self.sources + ((self.validation,) if self.validation else ())

    @property
    def facts(self) -> dict[str, Any]:
        """Everything that decides the tokens, and nothing that does not, as JSON values."""
        data = self.data
        facts: dict[str, Any] = {
            "format_version": FORMAT_VERSION,
            "sources": [source.model_dump() for source in self.sources],
            "validation_source": self.validation.model_dump() if self.validation else None,
            "validation_fraction": None if self.validation else data.validation_fraction,
            "tokenizer": self.tokenizer.model_dump(),
            "max_document_bytes": data.max_document_bytes,
            "on_bad_record": data.on_bad_record,
            "shuffle_seed": data.shuffle_seed,
            "shuffle_buffer": data.shuffle_buffer,
            "shard_tokens": data.shard_tokens,
        }
        if any(source.path in PYTHON_SOURCES for source in self.all_sources):
            facts["python"] = f"{platform.python_implementation()} {platform.python_version()}"
        return facts

    @property
    def identity(self) -> str:
        """SHA-256 of the facts, 64 hexadecimal digits."""
        return identity(self.facts)

    @property
    def folder(self) -> Path:
        """Where the cache of these settings lies, whether or not it exists."""
        return self.data.cache_path or self.data.cache_dir / self.identity[:16]


def resolve(data: DataConfig, model: ModelConfig) -> Settings:
    """Bring the section into one form and check it against the model.

    Raises:
        ConfigError: The tokenizer to be trained has more ids than the model has rows.
    """
    sources = data.source if isinstance(data.source, list) else [_source(data.source)]
    validation = None if data.validation_source is None else _source(data.validation_source)
    return Settings(
        data=data,
        sources=tuple(sources),
        validation=validation,
        tokenizer=_tokenizer(data.tokenizer, model),
        model_vocab_size=model.vocab_size,
    )


def locate(data: DataConfig, model: ModelConfig) -> Path:
    """Return the folder of the cache that these settings name, whether or not it exists."""
    return resolve(data, model).folder


def check_vocabulary(vocab_size: int, *, model_vocab_size: int, where: str) -> None:
    """Refuse a tokenizer with ids that the model has no row for.

    Raises:
        ConfigError: It has; says how many and which settings help.
    """
    if vocab_size > model_vocab_size:
        raise ConfigError(
            [
                f"{where} has ids up to {vocab_size - 1:,}, but model.vocab_size is "
                f"{model_vocab_size:,}; each id needs a row of the embedding."
            ],
            hint=f"set model.vocab_size to at least {vocab_size}, or use a smaller tokenizer",
        )


def _source(value: str | SourceConfig) -> SourceConfig:
    return SourceConfig(path=value) if isinstance(value, str) else value


def _tokenizer(value: str | TokenizerConfig, model: ModelConfig) -> TokenizerConfig:
    config = TokenizerConfig(path=value) if isinstance(value, str) else value
    if config.path is not None:
        return config
    vocab_size = config.vocab_size or model.vocab_size
    check_vocabulary(
        vocab_size, model_vocab_size=model.vocab_size, where="data.tokenizer.vocab_size"
    )
    if vocab_size < 256:
        raise ConfigError(
            [
                f"model.vocab_size is {vocab_size}; a tokenizer trained here needs at least 256 "
                "ids, one for each byte that text can hold."
            ],
            hint="set model.vocab_size to 256 or more, or give data.tokenizer",
        )
    return config.model_copy(update={"vocab_size": vocab_size})

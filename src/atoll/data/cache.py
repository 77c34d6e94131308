"""The token cache on disk: what its manifest says, and how an open cache is read.

CACHE/manifest.json           everything below, written last
CACHE/tokenizer.json          the tokenizer, byte for byte what its digest names
CACHE/train-00000.bin         little-endian token ids, nothing else
CACHE/train-00000.docs        one DOCUMENT record for each document that begins in that shard
CACHE/validation-00000.bin, .docs

Every shard of a split holds `shard_tokens` tokens but the last, which may hold fewer. Documents
follow each other without gaps; position p of a split is token p % shard_tokens of shard
p // shard_tokens.
"""

from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict

from atoll.errors import CacheError
from atoll.files import identity, read_json

FORMAT_VERSION = 1

DOCUMENT = np.dtype(
    [
        ("start", "<u8"),  # position of its first token in the split
        ("source", "<u4"),  # index into manifest.sources
        ("number", "<u8"),  # its number in that source, counted from 0 before anything is dropped
        ("text_bytes", "<u8"),  # UTF-8 bytes of its text
    ]
)


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Probe(_Record):
    """A text whose ids show that a tokenizer still does what it did."""

    text: str
    ids: list[int]


class TokenizerFacts(_Record):
    """Which tokenizer made the ids, and where specials were added."""

    sha256: str
    library_version: str
    vocab_size: int
    bos_id: int | None
    eos_id: int | None
    add_bos: bool
    add_eos: bool
    probes: list[Probe]


class SourceFile(_Record):
    path: str
    bytes: int
    sha256: str


class SourceFacts(_Record):
    """One source as it was read."""

    name: str
    weight: float
    files: list[SourceFile]
    documents: int
    text_bytes: int


class Shard(_Record):
    file: str
    tokens: int
    sha256: str
    documents: int
    documents_file: str
    documents_sha256: str


class Split(_Record):
    tokens: int
    documents: int
    text_bytes: int
    bos_added: int
    eos_added: int
    shards: list[Shard]


class LedgerEntry(_Record):
    """How often one kind of record was skipped, dropped or repaired, and the first examples."""

    count: int
    examples: list[str]


class CacheManifest(_Record):
    """What a finished cache holds; immutable, written last.

    A reader of another format version refuses with a hint to prepare again or to upgrade.
    """

    format_version: Literal[1] = FORMAT_VERSION
    settings_identity: str
    settings: dict[str, Any]
    dtype: Literal["uint16", "uint32"]
    shard_tokens: int
    tokenizer: TokenizerFacts
    sources: list[SourceFacts]
    splits: dict[Literal["train", "validation"], Split]
    ledger: dict[str, LedgerEntry]

    @property
    def cache_identity(self) -> str:
        """SHA-256 that names these exact tokens: tokenizer, element type, shards and digests."""
        return identity(
            {
                "format_version": self.format_version,
                "dtype": self.dtype,
                "shard_tokens": self.shard_tokens,
                "tokenizer": self.tokenizer.sha256,
                "splits": {name: split.model_dump() for name, split in self.splits.items()},
            }
        )


class Cache:
    """A finished cache, opened for reading."""

    def __init__(self, folder: Path) -> None:
        """Read and check the manifest.

        Raises:
            CacheError: There is no finished cache, or its manifest is of another format.
        """
        self.folder = folder
        path = folder / "manifest.json"
        if not path.is_file():
            raise CacheError(
                f"{folder} holds no finished token cache (no manifest.json).",
                hint="run `atoll prepare` with the same --config and --set",
            )
        found = read_json(path)
        version = found.get("format_version") if isinstance(found, dict) else None
        if version != FORMAT_VERSION:
            raise CacheError(
                f"{path} has format version {version!r}; this atoll reads {FORMAT_VERSION}.",
                hint="prepare the cache again with this version, or use the atoll that made it",
            )
        try:
            self.manifest = CacheManifest.model_validate(found)
        except ValueError as error:
            raise CacheError(
                f"{path} is damaged: {error}", hint="run `atoll prepare` into another cache_dir"
            ) from error

    @property
    def dtype(self) -> np.dtype[Any]:
        """Little-endian element type of the token files."""
        return np.dtype({"uint16": "<u2", "uint32": "<u4"}[self.manifest.dtype])

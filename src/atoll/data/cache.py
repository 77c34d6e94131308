"""The token cache on disk: what its manifest says, and how an open cache is read.

CACHE/manifest.json           everything below, written last
CACHE/tokenizer.json          the tokenizer, byte for byte what its digest names
CACHE/sources.jsonl           one SourceFile a line: every file that was read, in reading order
CACHE/train-00000.bin         little-endian token ids, nothing else
CACHE/train-00000.docs        one DOCUMENT record for each document that begins in that shard
CACHE/train-00000.leaves      the 32-byte SHA-256 of each MiB of .bin, then of each MiB of .docs
CACHE/validation-00000.bin, .docs, .leaves

Every shard of a split holds `shard_tokens` tokens but the last, which may hold fewer. Documents
follow each other without gaps; position p of a split is token p % shard_tokens of shard
p // shard_tokens. A split without tokens has no shards.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from atoll.errors import CacheError
from atoll.files import MIB, identity

FORMAT_VERSION = 1

MANIFEST_NAME = "manifest.json"
TOKENIZER_NAME = "tokenizer.json"
SOURCES_NAME = "sources.jsonl"

LEAF_BYTES = 32
"""Length of one SHA-256 in a .leaves file."""

SplitName = Literal["train", "validation"]

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


class FileFacts(_Record):
    """A file beside the shards, with the SHA-256 of each of its MiB."""

    file: str
    bytes: int
    sha256: str
    leaves: list[str]


class Probe(_Record):
    """A text whose ids show that a tokenizer still does what it did."""

    text: str
    ids: list[int]


class TokenizerFacts(_Record):
    """Which tokenizer made the ids, and where specials were added.

    `vocab_size` is the largest id plus one, whether or not each smaller id is in use.
    """

    file: FileFacts
    library_version: str
    vocab_size: int
    bos_id: int | None
    eos_id: int | None
    unk_id: int | None
    add_bos: bool
    add_eos: bool
    probes: list[Probe]

    @property
    def sha256(self) -> str:
        return self.file.sha256


class SourceFile(_Record):
    """One line of sources.jsonl: a file as it was read, and the numbers of its records.

    A text file is one record; of JSONL each line is one, of Parquet each row.
    """

    source: int
    path: str
    bytes: int
    sha256: str
    first_number: int
    records: int


class SourceFacts(_Record):
    """One source as it was read; `documents` and `text_bytes` count what the splits hold."""

    name: str
    weight: float | None
    revision: str | None
    files: int
    bytes: int
    records: int
    documents: int
    text_bytes: int


class Shard(_Record):
    file: str
    tokens: int
    sha256: str
    documents: int
    documents_file: str
    documents_sha256: str
    leaves_file: str
    leaves_sha256: str

    def sizes(self, itemsize: int) -> dict[str, int]:
        """Return the bytes that each of its files holds."""
        token_bytes = self.tokens * itemsize
        document_bytes = self.documents * DOCUMENT.itemsize
        num_leaves = -(-token_bytes // MIB) + -(-document_bytes // MIB)
        return {
            self.file: token_bytes,
            self.documents_file: document_bytes,
            self.leaves_file: num_leaves * LEAF_BYTES,
        }


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
    listing: FileFacts
    sources: list[SourceFacts]
    splits: dict[SplitName, Split]
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

    def to_bytes(self) -> bytes:
        """Return the one way this manifest is written: indented, sorted, with its own digest.

        Equal manifests give equal bytes, so that a changed byte anywhere in the file shows.
        """
        facts = self.model_dump(mode="json")
        facts["digest"] = identity(facts)
        text = json.dumps(facts, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False)
        return (text + "\n").encode("utf-8")


class Cache:
    """A finished cache, opened for reading."""

    def __init__(self, folder: Path) -> None:
        """Read and check the manifest; shards are checked by who reads them.

        Raises:
            CacheError: There is no finished cache, or its manifest is damaged or of another format.
        """
        self.folder = folder
        path = folder / MANIFEST_NAME
        try:
            data = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError) as error:
            raise CacheError(
                f"{folder} holds no finished token cache (no {MANIFEST_NAME}).",
                hint="run `atoll prepare` with the same --config and --set",
            ) from error
        self.manifest = _parse_manifest(path, data)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Little-endian element type of the token files."""
        return token_dtype(self.manifest.dtype)

    @property
    def shards(self) -> list[Shard]:
        """Every shard, of training and then of validation."""
        splits = self.manifest.splits
        return [shard for name in ("train", "validation") for shard in splits[name].shards]

    def sizes(self) -> dict[str, int]:
        """Return the bytes that each file beside the manifest holds."""
        beside = (self.manifest.tokenizer.file, self.manifest.listing)
        sizes = {facts.file: facts.bytes for facts in beside}
        for shard in self.shards:
            sizes |= shard.sizes(self.dtype.itemsize)
        return sizes

    def documents(self, shard: Shard) -> np.ndarray:
        """Return the DOCUMENT records of the documents that begin in `shard`, unverified."""
        return np.fromfile(self.folder / shard.documents_file, dtype=DOCUMENT)

    def source_files(self) -> Iterator[SourceFile]:
        """Give each file that was read, in reading order, one at a time."""
        with open(self.folder / self.manifest.listing.file, "rb") as lines:
            for line in lines:
                yield SourceFile.model_validate_json(line)


def token_dtype(name: Literal["uint16", "uint32"]) -> np.dtype[Any]:
    """Return the little-endian element type of a token file."""
    return np.dtype({"uint16": "<u2", "uint32": "<u4"}[name])


def dtype_for_vocabulary(vocab_size: int) -> Literal["uint16", "uint32"]:
    """Return the narrowest element type that holds every id below `vocab_size`.

    Raises:
        CacheError: Ids need more than 32 bits.
    """
    if vocab_size > 1 << 32:
        raise CacheError(f"a vocabulary of {vocab_size} ids does not fit 32-bit tokens.")
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def _parse_manifest(path: Path, data: bytes) -> CacheManifest:
    hint = "run `atoll prepare` into another data.cache_dir, or restore the folder from a copy"
    try:
        found = json.loads(data)
    except ValueError as error:
        raise CacheError(f"{path} is damaged: {error}.", hint=hint) from error
    version = found.get("format_version") if isinstance(found, dict) else None
    if version != FORMAT_VERSION:
        raise CacheError(
            f"{path} has format version {version!r}; this atoll reads {FORMAT_VERSION}.",
            hint="prepare the cache again with this version, or use the atoll that made it",
        )
    found.pop("digest", None)
    try:
        manifest = CacheManifest.model_validate(found)
    except ValidationError as error:
        raise CacheError(f"{path} is damaged: {error}", hint=hint) from error
    if manifest.to_bytes() != data:
        raise CacheError(f"{path} is damaged: its bytes do not match its digest.", hint=hint)
    return manifest

"""The last files of a cache: its tokenizer, the list of what was read, and the manifest."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from atoll.data.arrange import Arranged
from atoll.data.cache import (
    MANIFEST_NAME,
    SOURCES_NAME,
    TOKENIZER_NAME,
    CacheManifest,
    LedgerEntry,
    SourceFacts,
    SourceFile,
    Split,
    SplitName,
    TokenizerFacts,
)
from atoll.data.ledger import Ledger
from atoll.data.settings import Settings
from atoll.data.shards import write_file
from atoll.data.tokenizer import Tokenizer, library_version
from atoll.files import MIB, write_bytes


def write_manifest(
    settings: Settings,
    folder: Path,
    work: Path,
    *,
    tokenizer: Tokenizer,
    dtype: Literal["uint16", "uint32"],
    commits: Mapping[int, str],
    arranged: Arranged,
    splits: dict[SplitName, Split],
    ledger: Mapping[str, LedgerEntry],
) -> None:
    """Write tokenizer.json and sources.jsonl, then the manifest, each durably.

    Args:
        settings: What decided the tokens.
        folder: The cache's folder, with all its shards.
        work: Folder of the staged files.
        tokenizer: The tokenizer of the ids.
        dtype: Element type of the ids.
        commits: Commit of each hub source, by its index.
        arranged: What the splits take from the sources.
        splits: The shards.
        ledger: What was found while reading.
    """
    tokenizer_file = write_file(
        folder / TOKENIZER_NAME, [tokenizer.content], fault="prepare.tokenizer.final"
    )
    listing = write_file(
        folder / SOURCES_NAME, _pieces(work / "staged.files"), fault="prepare.listing"
    )
    both = Ledger(ledger)
    both.merge(arranged.ledger)
    manifest = CacheManifest(
        settings_identity=settings.identity,
        settings=settings.facts,
        dtype=dtype,
        shard_tokens=settings.data.shard_tokens,
        tokenizer=TokenizerFacts(
            file=tokenizer_file,
            library_version=library_version(),
            vocab_size=tokenizer.vocab_size,
            bos_id=tokenizer.bos_id,
            eos_id=tokenizer.eos_id,
            unk_id=tokenizer.unk_id,
            add_bos=settings.tokenizer.add_bos,
            add_eos=settings.tokenizer.add_eos,
            probes=tokenizer.probes(),
        ),
        listing=listing,
        sources=_source_facts(settings, folder / SOURCES_NAME, commits, arranged),
        splits=splits,
        ledger=both.entries,
    )
    write_bytes(folder / MANIFEST_NAME, manifest.to_bytes(), fault="prepare.manifest")


@dataclass(slots=True)
class _Read:
    files: int = 0
    bytes: int = 0
    records: int = 0


def _source_facts(
    settings: Settings, listing: Path, commits: Mapping[int, str], arranged: Arranged
) -> list[SourceFacts]:
    read = [_Read() for _ in settings.all_sources]
    with open(listing, "rb") as lines:
        for line in lines:
            file = SourceFile.model_validate_json(line)
            read[file.source].files += 1
            read[file.source].bytes += file.bytes
            read[file.source].records += file.records
    return [
        SourceFacts(
            name=source.path,
            weight=source.weight,
            revision=commits.get(index, source.revision),
            files=read[index].files,
            bytes=read[index].bytes,
            records=read[index].records,
            documents=sum(used[index].documents for used in arranged.used.values()),
            text_bytes=sum(used[index].text_bytes for used in arranged.used.values()),
        )
        for index, source in enumerate(settings.all_sources)
    ]


def _pieces(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as file:
        while piece := file.read(MIB):
            yield piece

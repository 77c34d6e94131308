"""What a cache holds, for people and for machines."""

from typing import Any

from atoll.data.cache import Cache
from atoll.data.ledger import KINDS


def facts_of(cache: Cache) -> dict[str, Any]:
    """Return everything about a cache as JSON values; lists of files are counted."""
    manifest = cache.manifest
    return {
        "folder": str(cache.folder),
        "cache_identity": manifest.cache_identity,
        "settings_identity": manifest.settings_identity,
        "settings": manifest.settings,
        "dtype": manifest.dtype,
        "bytes": sum(cache.sizes().values()),
        "shard_tokens": manifest.shard_tokens,
        "tokenizer": manifest.tokenizer.model_dump(exclude={"probes": True, "file": {"leaves"}}),
        "sources": [source.model_dump() for source in manifest.sources],
        "splits": {
            name: {**split.model_dump(exclude={"shards"}), "shards": len(split.shards)}
            for name, split in manifest.splits.items()
        },
        "ledger": {kind: entry.model_dump() for kind, entry in manifest.ledger.items()},
    }


def summary_of(cache: Cache) -> str:
    """Return the facts as lines for people."""
    manifest = cache.manifest
    lines = [
        f"cache      {manifest.cache_identity[:16]}  {sum(cache.sizes().values()) / 1e6:,.1f} MB, "
        f"{manifest.dtype}",
        f"tokenizer  {manifest.tokenizer.sha256[:16]}  {manifest.tokenizer.vocab_size:,} ids",
    ]
    for name, split in manifest.splits.items():
        density = f", {split.text_bytes / split.tokens:.2f} bytes a token" if split.tokens else ""
        lines.append(
            f"{name:<10} {split.tokens:,} tokens, {split.documents:,} documents, "
            f"{_counted(len(split.shards), 'shard')}{density}"
        )
    for source in manifest.sources:
        lines.append(
            f"source     {source.name}: {source.documents:,} of {source.records:,} records in "
            f"{_counted(source.files, 'file')}"
        )
    for kind, entry in manifest.ledger.items():
        example = f"; first: {entry.examples[0]}" if entry.examples else ""
        lines.append(f"{kind:<17} {entry.count:,}  ({KINDS.get(kind, '')}{example})")
    return "\n".join(lines)


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"

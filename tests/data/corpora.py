"""Texts, tokenizers and digests for the tests of this room."""

import hashlib
import json
import random
from pathlib import Path

import numpy as np

from atoll.data.blocks import Document
from atoll.data.cache import DOCUMENT, Cache

SMALL_PACE = {
    "block_bytes": 4096,
    "block_records": 16,
    "journal_bytes": 16_384,
    "copied_rows": 10,
    "rows": 64,
    "bucket_documents": 50,
}
"""So small that a corpus of a few hundred documents has many blocks, journals and buckets."""


def word_tokenizer(words: int, *, bos: bool = False) -> dict:
    """Return a tokenizer.json that gives the word `w7` the id 7; ids 0 to 2 are specials."""
    specials = ["<unk>", "<s>", "</s>"]
    vocab = {token: id for id, token in enumerate(specials)}
    vocab |= {f"w{id}": id for id in range(len(specials), words)}
    added = [
        {
            "id": id,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for id, token in enumerate(specials)
    ]
    template = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<s>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
            {"SpecialToken": {"id": "</s>", "type_id": 0}},
        ],
        "pair": [],
        "special_tokens": {
            "<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]},
            "</s>": {"id": "</s>", "ids": [2], "tokens": ["</s>"]},
        },
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": template if bos else None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "<unk>"},
    }


def pseudo_text(seed: int, num_words: int) -> str:
    """Return text like a program: words, punctuation, lines, some of it not ASCII."""
    draw = random.Random(seed)
    syllables = ["ba", "lo", "ti", "ne", "ra", "su", "kö", "de", "mi", "中"]
    pieces = []
    for _ in range(num_words):
        pieces.append("".join(draw.choices(syllables, k=draw.randint(1, 3))))
        pieces.append(draw.choice([" ", " ", " ", ", ", ".\n", "\n    ", " = ", "(", ")\n\n"]))
    return "".join(pieces)


def folder_digests(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file below a folder, by relative path."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def tokens_of(cache: Cache, split="train"):
    shards = cache.manifest.splits[split].shards
    parts = [np.fromfile(cache.folder / shard.file, cache.dtype) for shard in shards]
    return np.concatenate([np.zeros(0, cache.dtype), *parts]).tolist()


def documents_of(cache: Cache, split="train"):
    parts = [cache.documents(shard) for shard in cache.manifest.splits[split].shards]
    return np.concatenate([np.zeros(0, DOCUMENT), *parts])


def counts(cache: Cache):
    return {kind: entry.count for kind, entry in cache.manifest.ledger.items()}


def write_jsonl(path, texts):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def document(text, digest=b"", *, number=0):
    utf8 = text.encode()
    return Document(0, number, "a.txt", text, len(utf8), digest or bytes(16), 0)

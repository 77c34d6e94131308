"""Memory while preparing does not grow with the corpus."""

import json
import os
import random

import pytest
from corpora import word_tokenizer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="children are made by fork"),
]

MIB = 1 << 20

NUM_DOCUMENTS = 2_500
DOCUMENT_WORDS = 300

# What may grow: mapped pages of index, flags and order, 101 bytes a document, and the allocator's
# slack. The larger corpus has 11 MiB more text, 17 MiB more ids in lists of Python, and about
# 200 MiB more encodings, if any of these were kept.
ALLOWED_BYTES = 6 * MIB


def write_corpus(path, documents):
    draw = random.Random(3)
    words = [f"w{number}" for number in range(3, 1000)]
    with open(path, "w") as lines:
        for number in range(documents):
            text = f"w{number % 997 + 3} " + " ".join(draw.choices(words, k=DOCUMENT_WORDS))
            lines.write(json.dumps({"text": text}) + "\n")


def test_a_corpus_four_times_as_large_takes_no_more_memory(tmp_path, preparing):
    (tmp_path / "words.json").write_text(json.dumps(word_tokenizer(1000)))

    def peak_bytes(documents):
        source = tmp_path / f"{documents}.jsonl"
        write_corpus(source, documents)
        answer = preparing(
            data={
                "cache_dir": str(tmp_path / "caches"),
                "source": str(source),
                "tokenizer": str(tmp_path / "words.json"),
                "shuffle_buffer": 100,
                "shard_tokens": 200_000,
                "prepare_workers": 2,
            },
            model={"vocab_size": 1000},
            pace={"block_bytes": 1 << 17, "journal_bytes": MIB, "rows": 1024},
        )
        assert answer["code"] == 0
        return answer["peak_bytes"]

    small, large = peak_bytes(NUM_DOCUMENTS), peak_bytes(4 * NUM_DOCUMENTS)
    assert large - small < ALLOWED_BYTES, (small / MIB, large / MIB)

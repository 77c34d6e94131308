"""Preparing end to end, against a naive twin that holds everything in memory."""

import gzip
import hashlib
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from corpora import counts, documents_of, pseudo_text, tokens_of, write_jsonl

from atoll.data.assemble import check_number_of_shards
from atoll.data.mix import locate_documents, shuffle, whole_weights
from atoll.data.tokenizer import Tokenizer
from atoll.data.verify import verify_cache
from atoll.errors import ConfigError
from atoll.seeds import derive_seed

# The naive twin


def naive_cache(sources, tokenizer, *, fraction, weights, seed, buffer):
    """Return {split: (tokens, [(source, number, text bytes)])} from lists of texts."""
    split_of = {}
    kept = {"train": [[] for _ in sources], "validation": []}
    for source, texts in enumerate(sources):
        for number, text in enumerate(texts):
            digest = hashlib.sha256(text.encode()).digest()
            if not text.strip() or digest in split_of:
                continue
            held_out = int.from_bytes(digest[:8], "big") < fraction * 2**64
            split_of[digest] = "validation" if held_out else "train"
            if held_out:
                kept["validation"].append((source, number, text))
            else:
                kept["train"][source].append((source, number, text))
    available = [len(texts) for texts in kept["train"]]
    whole = whole_weights(weights) if weights else available
    left, mixed = [iter(texts) for texts in kept["train"]], []
    for position in range(sum(available)):
        source = int(locate_documents(np.array([position]), whole)[0][0])
        document = next(left[source], None)
        if document is None:
            break
        mixed.append(document)
    order = shuffle([np.arange(len(mixed))], size=buffer, seed=derive_seed(seed, "documents"))
    found = {"train": [mixed[place] for place in np.concatenate(list(order))]}
    found["validation"] = kept["validation"]
    return {
        split: (
            [id for *_, text in documents for id in [*tokenizer.encode(text), tokenizer.eos_id]],
            [(source, number, len(text.encode())) for source, number, text in documents],
        )
        for split, documents in found.items()
    }


@pytest.mark.parametrize("weights", [None, [3.0, 1.0, 2.0]])
@pytest.mark.parametrize("buffer", [1, 16, 10_000])
def test_a_cache_holds_what_the_naive_twin_holds(make, tmp_path, weights, buffer):
    texts = [pseudo_text(n % 170, 5 + n % 170 % 30) for n in range(200)]
    texts[7], texts[80] = "", " \n"
    sources = [texts[:90], texts[90:130], texts[130:]]
    folder = tmp_path / "files"
    folder.mkdir()
    for number, text in enumerate(sources[0]):
        (folder / f"{number:04d}.txt").write_bytes(text.encode())
    pq.write_table(pa.table({"body": sources[1]}), tmp_path / "b.parquet", row_group_size=7)
    with gzip.open(tmp_path / "c.jsonl.gz", "wt") as lines:
        lines.writelines(json.dumps({"text": text}) + "\n" for text in sources[2])
    weight = weights or [None] * 3
    cache = make(
        [
            {"path": str(folder), "weight": weight[0]},
            {"path": str(tmp_path / "b.parquet"), "text_field": "body", "weight": weight[1]},
            {"path": str(tmp_path / "*.jsonl.gz"), "weight": weight[2]},
        ],
        tokenizer={"vocab_size": 300, "train_bytes": 5_000},
        validation_fraction=0.2,
        shuffle_seed=5,
        shuffle_buffer=buffer,
        shard_tokens=700,
        prepare_workers=3,
    )
    expected = naive_cache(
        sources,
        Tokenizer.from_cache(cache),
        fraction=0.2,
        weights=weights,
        seed=5,
        buffer=buffer,
    )
    for split in ("train", "validation"):
        tokens, documents = expected[split]
        assert tokens_of(cache, split) == tokens
        found = documents_of(cache, split)
        assert found[["source", "number", "text_bytes"]].tolist() == documents
        facts = cache.manifest.splits[split]
        assert (facts.tokens, facts.documents) == (len(tokens), len(documents))
        assert facts.text_bytes == sum(size for *_, size in documents)
        assert (facts.bos_added, facts.eos_added) == (0, len(documents))
        ends = [place for place, id in enumerate(tokens) if id == cache.manifest.tokenizer.eos_id]
        assert found["start"].tolist() == [0, *(end + 1 for end in ends[:-1])]
        lengths = [shard.tokens for shard in facts.shards]
        assert all(length == 700 for length in lengths[:-1])
        assert 0 < lengths[-1] <= 700
    assert verify_cache(cache.folder) == []
    # Texts 170 to 199 repeat 0 to 29, of which number 7 was made empty.
    assert counts(cache)["duplicate"] == 29
    assert counts(cache)["empty"] == 2


# Order


def test_a_mixture_of_counter_valued_documents_follows_its_weights_everywhere(
    make, words, tmp_path
):
    texts = [f"w{number + 3}" for number in range(900)]
    parts = [texts[:450], texts[450:780], texts[780:]]
    cache = make(
        [
            {"path": write_jsonl(tmp_path / f"{place}.jsonl", part), "weight": weight}
            for place, (part, weight) in enumerate(zip(parts, (5, 3, 1), strict=True))
        ],
        tokenizer=words(1000),
        validation_fraction=0,
        shuffle_buffer=1,
    )
    found = np.array(tokens_of(cache)[::2]) - 3  # every other token is the end of a document
    source = np.digitize(found, [450, 780])
    for place, (first, weight) in enumerate(((0, 5), (450, 3), (780, 1))):
        own = found[source == place]
        assert own.tolist() == list(range(first, first + len(own)))
        so_far = np.cumsum(source == place)
        share = np.arange(1, len(found) + 1) * weight / 9
        assert abs(so_far - share).max() < 2  # two nested roundings of at most one half each
    # The first source runs out first: 450 documents are 5/9 of 810.
    assert len(found) == pytest.approx(810, abs=3)
    assert counts(cache)["unused"] == 900 - len(found)


def test_without_weights_every_document_of_every_source_is_used(make, words, tmp_path):
    parts = [range(3, 203), range(203, 210), range(210, 300)]
    cache = make(
        [
            {"path": write_jsonl(tmp_path / f"{place}.jsonl", [f"w{number}" for number in part])}
            for place, part in enumerate(parts)
        ],
        tokenizer=words(300),
        validation_fraction=0,
    )
    assert sorted(tokens_of(cache)) == sorted([*range(3, 300), *[2] * 297])
    assert "unused" not in counts(cache)


def test_validation_keeps_the_order_of_its_source(make, words, tmp_path):
    cache = make(
        write_jsonl(tmp_path / "a.jsonl", [f"w{number}" for number in range(3, 50)]),
        validation_source=write_jsonl(tmp_path / "v.jsonl", [f"w{n}" for n in range(90, 50, -1)]),
        tokenizer=words(100),
    )
    assert tokens_of(cache, "validation")[::2] == list(range(90, 50, -1))
    assert sorted(tokens_of(cache)[::2]) == list(range(3, 50))


# Splits


def test_documents_that_are_also_in_the_validation_source_are_not_trained_on(make, words, tmp_path):
    cache = make(
        write_jsonl(tmp_path / "a.jsonl", ["w3", "w4", "w5", "w4", "w6"]),
        validation_source=write_jsonl(tmp_path / "v.jsonl", ["w4", "w9", "w4"]),
        tokenizer=words(10),
        shuffle_buffer=1,
    )
    assert tokens_of(cache)[::2] == [3, 5, 6]
    assert tokens_of(cache, "validation")[::2] == [4, 9]
    assert counts(cache) == {"in_validation": 2, "duplicate": 1}
    assert cache.manifest.ledger["in_validation"].examples == [
        "a.jsonl:2 repeats v.jsonl:1",
        "a.jsonl:4 repeats v.jsonl:1",
    ]


def test_the_split_goes_by_content_and_not_by_place(make, words, tmp_path):
    texts = [f"w{number}" for number in range(3, 200)]
    one = make(
        write_jsonl(tmp_path / "a.jsonl", texts), tokenizer=words(200), validation_fraction=0.3
    )
    two = make(
        write_jsonl(tmp_path / "b.jsonl", texts[::-1]),
        tokenizer=words(200),
        validation_fraction=0.3,
    )
    held_out = set(tokens_of(one, "validation"))
    assert held_out == set(tokens_of(two, "validation"))
    assert 30 < len(held_out) < 90  # 59 expected; five standard deviations are 32


def test_a_fraction_of_zero_leaves_validation_without_shards(make, words, tmp_path):
    cache = make(
        write_jsonl(tmp_path / "a.jsonl", ["w3"]), tokenizer=words(10), validation_fraction=0
    )
    assert cache.manifest.splits["validation"].shards == []


# Element type


@pytest.mark.parametrize(("ids", "dtype"), [(65_536, "uint16"), (65_537, "uint32")])
def test_the_element_type_is_the_narrowest_that_holds_the_largest_id(
    make, words, tmp_path, ids, dtype
):
    source = write_jsonl(tmp_path / "a.jsonl", [f"w{ids - 1} w3"])
    cache = make(source, tokenizer=words(ids), vocab_size=ids, validation_fraction=0)
    assert cache.manifest.dtype == dtype
    assert tokens_of(cache) == [ids - 1, 3, 2]


# Specials


def test_beginning_and_end_are_added_once_where_a_tokenizer_adds_its_own(make, words, tmp_path):
    cache = make(
        write_jsonl(tmp_path / "a.jsonl", ["w3 w4", "w5"]),
        tokenizer={"path": words(10, bos=True), "add_bos": True},
        validation_fraction=0,
        shuffle_buffer=1,
    )
    assert tokens_of(cache) == [1, 3, 4, 2, 1, 5, 2]
    split = cache.manifest.splits["train"]
    assert (split.bos_added, split.eos_added) == (2, 2)


def test_shards_so_short_that_there_would_be_countless_files_are_refused():
    check_number_of_shards(200_000, 2)
    with pytest.raises(ConfigError, match="200,001 tokens would take more than 100,000") as caught:
        check_number_of_shards(200_001, 2)
    assert "data.shard_tokens to 3" in (caught.value.hint or "")

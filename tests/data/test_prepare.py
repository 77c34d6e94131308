"""Preparing end to end, against a naive twin that holds everything in memory."""

import gzip
import hashlib
import json
import platform
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from corpora import folder_digests, pseudo_text

from atoll.config.data import DataConfig, SourceConfig
from atoll.config.model import ModelConfig
from atoll.data.cache import DOCUMENT, Cache
from atoll.data.mix import locate_documents, shuffle, whole_weights
from atoll.data.prepare import locate
from atoll.data.tokenizer import Tokenizer
from atoll.data.verify import verify_cache
from atoll.errors import CacheError, ConfigError, DataError, LockedError, StorageError
from atoll.files import folder_lock
from atoll.seeds import derive_seed


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


# Identity


def test_only_what_decides_the_tokens_decides_the_folder(tmp_path):
    def folder(**data):
        section = DataConfig.model_validate({"source": "corpus", "tokenizer": "words"} | data)
        return locate(section, ModelConfig(vocab_size=1000)).name

    names = [
        folder(),
        folder(source="other"),
        folder(source={"path": "corpus", "text_field": "body"}),
        folder(validation_source="held-out"),
        folder(validation_fraction=0.5),
        folder(tokenizer="other"),
        folder(tokenizer={"path": "words", "add_bos": True}),
        folder(tokenizer={}),
        folder(max_document_bytes=5),
        folder(on_bad_record="skip"),
        folder(shuffle_seed=1),
        folder(shuffle_buffer=1),
        folder(shard_tokens=5),
    ]
    assert len(set(names)) == len(names)
    assert folder() == folder(
        cache_dir=tmp_path,
        prepare_workers=7,
        prefetch=False,
        placement="pageable",
        passes=3,
        shuffle_group_size=5,
        source={"path": "corpus"},
    )


def test_the_model_decides_the_folder_only_where_a_tokenizer_is_trained():
    def folder(vocab_size, **data):
        section = DataConfig.model_validate({"source": "corpus"} | data)
        return locate(section, ModelConfig(vocab_size=vocab_size)).name

    assert folder(300) != folder(400)
    assert folder(300) == folder(400, tokenizer={"vocab_size": 300})
    assert folder(300, tokenizer="words") == folder(400, tokenizer="words")


@pytest.mark.parametrize("source", ["stdlib", "site-packages"])
def test_sources_of_the_interpreter_are_bound_to_its_version(monkeypatch, source):
    before = locate(DataConfig(source=source), ModelConfig())
    monkeypatch.setattr(platform, "python_version", lambda: "9.9.9")
    assert locate(DataConfig(source=source), ModelConfig()) != before
    other = DataConfig(source="corpus")
    assert locate(other, ModelConfig()) == locate(other, ModelConfig())


def test_a_cache_path_is_taken_as_it_is(make, words, tmp_path):
    source = tmp_path / "a.jsonl"
    cache = make(write_jsonl(source, ["w3", "w4"]), tokenizer=words(10), validation_fraction=0)
    moved = cache.folder.rename(tmp_path / "moved")
    source.unlink()
    data = DataConfig(cache_path=moved, source="gone")
    assert locate(data, ModelConfig()) == moved
    assert make("gone", cache_path=moved).manifest == cache.manifest


# Again


def test_a_finished_cache_is_verified_and_not_changed(make, words, tmp_path):
    options = {"tokenizer": words(10), "validation_fraction": 0}
    source = write_jsonl(tmp_path / "a.jsonl", ["w3", "w4"])
    cache = make(source, **options)
    before = folder_digests(cache.folder)
    times = {path: path.stat().st_mtime_ns for path in cache.folder.iterdir()}
    assert make(source, **options, prepare_workers=5, passes=2).manifest == cache.manifest
    assert folder_digests(cache.folder) == before
    assert {path: path.stat().st_mtime_ns for path in cache.folder.iterdir()} == times


@pytest.mark.parametrize("change", ["cut", "longer", "missing"])
def test_a_finished_cache_with_a_shard_of_another_size_is_refused(make, words, corpus, change):
    options = {"tokenizer": words(10), "validation_fraction": 0}
    path = make(corpus, **options).folder / "train-00000.bin"
    content = path.read_bytes()
    path.write_bytes(content[:-2] if change == "cut" else content + b"12")
    if change == "missing":
        path.unlink()
    message = "cannot be read" if change == "missing" else "holds .* bytes instead of 12"
    with pytest.raises(CacheError, match=rf"train-00000\.bin.*{message}") as caught:
        make(corpus, **options)
    assert "prepare again" in (caught.value.hint or "")


def test_a_finished_cache_with_another_tokenizer_is_refused(make, words, corpus):
    options = {"tokenizer": words(10), "validation_fraction": 0}
    path = make(corpus, **options).folder / "tokenizer.json"
    path.write_bytes(path.read_bytes().replace(b'"w3": 3', b'"w3": 4'))
    with pytest.raises(CacheError, match=r"tokenizer\.json does not match its digest"):
        make(corpus, **options)


def changed_corpus(tmp_path, change):
    folder = tmp_path / "corpus"
    match change:
        case "content":
            (folder / "b.txt").write_text("w7")
            return r"other content in b\.txt"
        case "size":
            (folder / "b.txt").write_text("w4 w4")
            return r"b\.txt had 2 bytes and has 5"
        case "gone":
            (folder / "b.txt").unlink()
            return r"b\.txt is gone"
        case _:
            (folder / "b2.txt").write_text("w8")
            return r"b2\.txt is new"


@pytest.fixture
def corpus(tmp_path, text_file):
    for name, text in (("a", "w3"), ("b", "w4"), ("c", "w5")):
        text_file(f"corpus/{name}.txt", text)
    return str(tmp_path / "corpus")


@pytest.mark.parametrize("change", ["content", "size", "gone", "new"])
def test_a_corpus_that_changed_since_is_an_error_with_the_files_and_remedies(
    make, words, tmp_path, corpus, change
):
    options = {"tokenizer": words(10), "validation_fraction": 0}
    cache = make(corpus, **options)
    message = changed_corpus(tmp_path, change)
    with pytest.raises(DataError, match=f"corpus changed since .*prepared: {message}") as caught:
        make(corpus, **options)
    assert f"data.cache_path={cache.folder}" in (caught.value.hint or "")
    assert make(corpus, **options, cache_path=cache.folder).manifest == cache.manifest


@pytest.mark.parametrize("change", ["size", "gone", "new"])
def test_a_corpus_that_changed_while_preparing_is_an_error(make, words, tmp_path, corpus, change):
    from atoll.faults import InjectedFault, arm, disarm

    options = {"tokenizer": words(10), "validation_fraction": 0}
    arm("prepare.encode=raise")
    with pytest.raises(InjectedFault):
        make(corpus, **options)
    disarm()
    message = changed_corpus(tmp_path, change)
    with pytest.raises(DataError, match=f"changed since this preparation began: {message}"):
        make(corpus, **options)


def test_a_half_read_file_with_other_content_is_an_error(make, words, tmp_path):
    from atoll.faults import InjectedFault, arm, disarm

    source = tmp_path / "a.jsonl"
    options = {"tokenizer": words(10_000), "validation_fraction": 0}
    write_jsonl(source, [f"w{number}" for number in range(3, 3000)])
    arm("prepare.journal.after_rename:1=raise")
    with pytest.raises(InjectedFault):
        make(str(source), **options, pace={"journal_bytes": 64})
    disarm()
    write_jsonl(source, [f"w{number}" for number in [4, 3, *range(5, 3000)]])
    with pytest.raises(DataError, match=r"a\.jsonl changed since this preparation began"):
        make(str(source), **options)


def test_a_given_tokenizer_that_changed_is_an_error(make, words, tmp_path, corpus):
    path = words(10)
    make(corpus, tokenizer=path, validation_fraction=0)
    (tmp_path / "words-10-False.json").write_bytes(
        (tmp_path / "words-10-False.json").read_bytes() + b"\n"
    )
    with pytest.raises(DataError, match=r"the tokenizer .* changed since"):
        make(corpus, tokenizer=path, validation_fraction=0)


def test_work_begun_with_another_library_version_begins_anew(make, words, corpus, monkeypatch):
    from atoll.data import job
    from atoll.faults import InjectedFault, arm, disarm

    options = {"tokenizer": words(10), "validation_fraction": 0}
    monkeypatch.setattr(job, "library_version", lambda: "0.0.1")
    arm("prepare.dedupe=raise")
    with pytest.raises(InjectedFault):
        make(corpus, **options)
    disarm()
    monkeypatch.undo()
    seen = []
    make(corpus, **options, progress=lambda progress: seen.append(progress.phase))
    assert "encode" in seen


def test_a_cache_of_other_settings_in_the_folder_is_refused_with_the_difference(
    make, words, corpus, tmp_path
):
    options = {"tokenizer": words(10), "validation_fraction": 0}
    cache = make(corpus, **options, shuffle_seed=1)
    section = DataConfig.model_validate(
        {"cache_dir": tmp_path / "caches", "source": corpus, "shuffle_seed": 2} | options
    )
    cache.folder.rename(locate(section, ModelConfig(vocab_size=65_536)))
    with pytest.raises(CacheError, match="other settings: shuffle_seed is 2, there 1"):
        make(corpus, **options, shuffle_seed=2)


# Two jobs, full disks


def test_two_jobs_for_one_cache_are_kept_apart(make, words, corpus, tmp_path):
    options = {"tokenizer": words(10), "validation_fraction": 0}
    section = DataConfig.model_validate(
        {"cache_dir": tmp_path / "caches", "source": corpus} | options
    )
    folder = locate(section, ModelConfig(vocab_size=65_536))
    with folder_lock(folder / "work"), pytest.raises(LockedError, match="in use by another"):
        make(corpus, **options)
    make(corpus, **options)


def test_a_disk_without_room_is_refused_before_anything_is_encoded(make, words, corpus):
    from atoll.data.prepare import Outside

    seen = []
    with pytest.raises(StorageError, match=r"a cache of 0 MB of text needs about 16 MiB") as caught:
        make(
            corpus,
            tokenizer=words(10),
            outside=Outside(free=lambda folder: 1 << 20),
            progress=lambda progress: seen.append(progress.phase),
        )
    assert "finished work is kept" in (caught.value.hint or "")
    assert "encode" not in seen


def test_a_disk_that_fills_up_on_the_way_is_said_and_survived(make, words, tmp_path):
    from atoll.data.prepare import Outside

    source = write_jsonl(tmp_path / "a.jsonl", [f"w{number} " * 40 for number in range(3, 900)])
    options = {"tokenizer": words(1000), "validation_fraction": 0}
    room = iter([1 << 30] * 3)
    with pytest.raises(StorageError, match="the next part of the text needs"):
        make(source, **options, outside=Outside(free=lambda folder: next(room, 1 << 10)))
    assert len(documents_of(make(source, **options))) == 897


@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX permissions")
def test_a_folder_that_cannot_be_written_is_said(make, words, corpus, tmp_path):
    (tmp_path / "caches").write_text("a file, where a folder is needed")
    with pytest.raises(StorageError, match=r"cannot write .*caches"):
        make(corpus, tokenizer=words(10))


# Limits


def test_a_tokenizer_with_more_ids_than_the_model_has_rows_is_refused(make, words, corpus):
    with pytest.raises(ConfigError, match=r"ids up to 99, but model\.vocab_size is 50"):
        make(corpus, tokenizer=words(100), vocab_size=50)
    with pytest.raises(ConfigError, match=r"data\.tokenizer\.vocab_size has ids up to 299"):
        make(corpus, tokenizer={"vocab_size": 300}, vocab_size=299)


def test_a_finished_cache_is_checked_against_the_model_too(make, words, corpus):
    make(corpus, tokenizer=words(100), validation_fraction=0)
    with pytest.raises(ConfigError, match=r"ids up to 99, but model\.vocab_size is 50"):
        make(corpus, tokenizer=words(100), validation_fraction=0, vocab_size=50)


def test_weights_for_some_sources_only_are_refused():
    with pytest.raises(ValueError, match="1 of 2 sources have a weight"):
        DataConfig(source=[SourceConfig(path="a", weight=1), SourceConfig(path="b")])


def test_a_source_with_a_weight_but_without_documents_is_refused(make, words, tmp_path):
    sources = [
        {"path": write_jsonl(tmp_path / "a.jsonl", ["w3"]), "weight": 1},
        {"path": write_jsonl(tmp_path / "b.jsonl", ["w3", ""]), "weight": 1},
    ]
    with pytest.raises(DataError, match=r"b\.jsonl has a weight in the mixture, but none"):
        make(sources, tokenizer=words(10), validation_fraction=0)

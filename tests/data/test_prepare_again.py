"""Which folder a recipe names, and what `prepare` does with one that was begun or finished."""

import platform
import sys

import pytest
from corpora import documents_of, folder_digests, write_jsonl

from atoll.config.data import DataConfig, SourceConfig
from atoll.config.model import ModelConfig
from atoll.data import job
from atoll.data.prepare import Outside, locate
from atoll.errors import CacheError, ConfigError, DataError, LockedError, StorageError
from atoll.faults import InjectedFault, arm, disarm
from atoll.files import folder_lock

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


def test_a_cache_path_without_a_cache_says_what_to_do(make, tmp_path):
    with pytest.raises(
        ConfigError, match=r"data\.cache_path is .*, which holds no finished"
    ) as caught:
        make("corpus", cache_path=tmp_path)
    assert "leave data.cache_path out" in (caught.value.hint or "")


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
    options = {"tokenizer": words(10), "validation_fraction": 0}
    arm("prepare.encode=raise")
    with pytest.raises(InjectedFault):
        make(corpus, **options)
    disarm()
    message = changed_corpus(tmp_path, change)
    with pytest.raises(DataError, match=f"changed since this preparation began: {message}"):
        make(corpus, **options)


def test_a_half_read_file_with_other_content_is_an_error(make, words, tmp_path):
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

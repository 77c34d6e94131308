"""What explain says about an update is what the loader gives, document by document."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from atoll.data.cache import DOCUMENT, Cache, CacheManifest, SourceFacts, SourceFile
from atoll.data.cachewriter import write_cache
from atoll.data.explain import explain_update, updates_of_document
from atoll.data.loader import TokenLoader
from atoll.errors import CacheError, UsageError

ORDER = {"context_length": 10, "seed": 4, "group_shards": 2}


def decode(ids) -> str:
    return " ".join(str(token) for token in ids)


def counter_cache(folder, *, tokens=1000, starts=(0, 7, 300, 301, 800), shard_tokens=64) -> Cache:
    return write_cache(
        folder,
        train=np.arange(tokens),
        train_documents=np.array(starts),
        shard_tokens=shard_tokens,
    )


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Cache:
    return counter_cache(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def mixture(tmp_path_factory) -> Cache:
    """Three sources, mixed document by document, with the files that they were read from."""
    folder = tmp_path_factory.mktemp("mixture")
    documents = np.zeros(30, DOCUMENT)
    documents["start"] = np.arange(30) * 17
    documents["source"] = np.arange(30) % 3
    documents["number"] = 1000 - np.arange(30)
    written = write_cache(
        folder, train=np.arange(30 * 17), train_documents=documents, shard_tokens=64
    )
    facts = {"weight": 1.0, "revision": None, "files": 1, "bytes": 0, "records": 1001}
    sources = [
        SourceFacts(name=name, **facts, documents=10, text_bytes=0) for name in ("a", "b", "c")
    ]
    files = [
        SourceFile(source=0, path="a.jsonl", bytes=0, sha256="", first_number=0, records=990),
        SourceFile(source=0, path="b.jsonl", bytes=0, sha256="", first_number=990, records=20),
        SourceFile(source=1, path="c.parquet", bytes=0, sha256="", first_number=0, records=2000),
    ]
    listing = "".join(file.model_dump_json() + "\n" for file in files)
    (folder / written.manifest.listing.file).write_text(listing, encoding="utf-8")
    manifest = written.manifest.model_copy(update={"sources": sources})
    (folder / "manifest.json").write_bytes(
        CacheManifest.model_validate(manifest.model_dump()).to_bytes()
    )
    return Cache(folder)


@st.composite
def caches(draw):
    tokens = draw(st.integers(30, 200))
    starts = draw(st.sets(st.integers(1, tokens - 1), max_size=12))
    shard_tokens = draw(st.integers(tokens // 8, 80))
    return tokens, sorted({0, *starts}), shard_tokens, draw(st.integers(1, 12))


@given(caches(), st.integers(1, 3), st.integers(1, 4))
@settings(deadline=None, max_examples=25)
def test_every_row_is_explained_as_the_loader_gives_it(
    tmp_path_factory, facts, passes, rows_per_update
):
    tokens, starts, shard_tokens, length = facts
    cache = counter_cache(
        tmp_path_factory.mktemp("cache"), tokens=tokens, starts=starts, shard_tokens=shard_tokens
    )
    order = {"context_length": length, "seed": 1, "group_shards": 2, "passes": passes}
    with TokenLoader(cache, "train", prefetch=False, **order) as loader:
        for step in range(1, loader.num_rows // rows_per_update + 1):
            batch = loader.batch((step - 1) * rows_per_update, rows_per_update)
            rows = explain_update(
                cache, step=step, rows_per_update=rows_per_update, decode=decode, **order
            )
            for index, row in enumerate(rows):
                expected = [*batch.inputs_BT[index].tolist(), int(batch.targets_BT[index, -1])]
                assert " ".join(span.text for span in row.spans) == decode(expected)
                assert (row.start, row.stop) == (expected[0], expected[-1] + 1)
                for span in row.spans:
                    first = row.start + span.row_start
                    document = np.searchsorted(starts, first, side="right") - 1
                    assert (span.document, span.offset) == (document, first - starts[document])
                    assert span.text == decode(range(first, first + span.tokens))


def test_rows_name_their_place_in_the_run(cache):
    rows = explain_update(cache, step=5, rows_per_update=8, passes=1, decode=decode, **ORDER)

    assert [(row.row, row.cursor, row.pass_index) for row in rows] == [
        (index, 32 + index, 0) for index in range(8)
    ]
    assert all(row.group == row.start // 128 for row in rows)
    assert all(row.start == 10 * row.sequence for row in rows)


def test_chosen_rows_are_those_of_the_whole_update(cache):
    whole = explain_update(cache, step=3, rows_per_update=8, decode=decode, **ORDER)

    part = explain_update(
        cache, step=3, rows_per_update=8, rows=range(2, 5), decode=decode, **ORDER
    )

    assert part == whole[2:5]


def test_documents_of_a_mixture_keep_their_source_number_and_file(mixture):
    rows = [
        row
        for step in range(1, 51)
        for row in explain_update(mixture, step=step, rows_per_update=1, decode=decode, **ORDER)
    ]

    for row in rows:
        for span in row.spans:
            place, offset = divmod(row.start + span.row_start, 17)
            number = 1000 - place
            first_file = "a.jsonl" if number < 990 else "b.jsonl"
            expected_file = {0: first_file, 1: "c.parquet", 2: None}[place % 3]
            assert span.source == "abc"[place % 3]
            assert (span.document, span.offset) == (number, offset)
            assert span.file == expected_file


@pytest.mark.parametrize("passes", [1, 2])
def test_updates_of_a_document_are_those_whose_rows_hold_it(mixture, passes):
    order = {**ORDER, "passes": passes, "rows_per_update": 4}
    seen: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for step in range(1, passes * 50 // 4 + 1):
        for row in explain_update(mixture, step=step, decode=decode, **order):
            for span in row.spans:
                seen.setdefault((span.source, span.document), []).append((step, row.row))

    for place in range(30):
        source, document = "abc"[place % 3], 1000 - place
        found = updates_of_document(mixture, source=source, document=document, **order)
        assert [(item.step, item.row) for item in found] == seen.get((source, document), [])


def test_text_is_decoded_by_the_tokenizer_of_the_cache(tmp_path):
    words = {"the": 0, "cat": 1, "sat": 2}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="the"))
    ids = np.array([0, 1, 2] * 5)
    cache = write_cache(
        tmp_path, train=ids, shard_tokens=64, tokenizer_json=tokenizer.to_str().encode()
    )

    (row,) = explain_update(
        cache, step=1, rows_per_update=1, context_length=14, seed=0, group_shards=1
    )

    assert row.spans[0].text == " ".join(["the cat sat"] * 5)


def test_an_update_is_explained_without_the_shards_it_does_not_touch(tmp_path):
    cache = counter_cache(tmp_path)
    (expected,) = explain_update(cache, step=1, rows_per_update=1, decode=decode, **ORDER)
    for shard in cache.manifest.splits["train"].shards[3:]:
        (cache.folder / shard.file).unlink()
        (cache.folder / shard.documents_file).unlink()

    (found,) = explain_update(cache, step=1, rows_per_update=1, decode=decode, **ORDER)

    assert found == expected


def test_an_explanation_is_plain_json(cache):
    from dataclasses import asdict

    rows = explain_update(cache, step=1, rows_per_update=2, decode=decode, **ORDER)

    assert json.loads(json.dumps([asdict(row) for row in rows]))[0]["spans"][0]["tokens"] > 0


@pytest.mark.parametrize("step", [0, -1, 13])
def test_an_update_that_does_not_exist_is_refused_with_the_number_there_are(cache, step):
    with pytest.raises(UsageError, match=f"update {step} does not exist: .* hold 12 updates"):
        explain_update(cache, step=step, rows_per_update=8, decode=decode, **ORDER)


def test_a_row_that_does_not_exist_is_refused(cache):
    with pytest.raises(UsageError, match="rows 0 to 7"):
        explain_update(cache, step=1, rows_per_update=8, rows=range(6, 9), decode=decode, **ORDER)


def test_unknown_sources_and_documents_are_refused_by_name(cache):
    with pytest.raises(UsageError, match="no source 'books'") as caught:
        updates_of_document(cache, source="books", document=0, rows_per_update=1, **ORDER)
    assert "arrays" in str(caught.value.hint)
    with pytest.raises(UsageError, match="'arrays' has no document 5"):
        updates_of_document(cache, source="arrays", document=5, rows_per_update=1, **ORDER)


@pytest.mark.parametrize("ending", ["bin", "docs"])
def test_a_file_of_another_size_is_refused_by_name(tmp_path, ending):
    cache = counter_cache(tmp_path)
    for path in cache.folder.glob(f"train-*.{ending}"):
        path.write_bytes(path.read_bytes() + b"\0")

    with pytest.raises(
        CacheError, match=rf"train-0000\d\.{ending} has .* bytes; the manifest says"
    ):
        explain_update(cache, step=1, rows_per_update=1, decode=decode, **ORDER)

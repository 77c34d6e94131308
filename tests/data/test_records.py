"""How files become records, and what the ledger says about those that are not as they should be."""

import gzip
import io
import json
import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.data.raw import RawFile
from atoll.data.records import read_records, split_lines
from atoll.data.sources import PlannedFile, format_of
from atoll.errors import DataError


def records(path, *, text_field="text", max_bytes=1 << 20):
    """Return (text or None, kinds, examples) of each record of a file."""
    form, compression = format_of(path.name, "auto")
    planned = PlannedFile(0, path.name, path, path.stat().st_size, form, compression)
    raw = RawFile(planned)
    try:
        found = list(read_records(raw, text_field=text_field, max_bytes=max_bytes))
        raw.finish()
    finally:
        raw.close()
    for record in found:
        assert record.utf8 == (record.text or "").encode()
    return [
        (r.text, [note.kind for note in r.notes], [note.example for note in r.notes]) for r in found
    ]


def texts(path, **options):
    return [text for text, _, _ in records(path, **options)]


def kinds(path, **options):
    return [found for _, found, _ in records(path, **options)]


# Text files


def test_a_text_file_is_one_document_with_every_character_kept(text_file):
    content = "one\r\ntwo\u2028three\u0085four\n\n  five \n"
    assert records(text_file("a.txt", content)) == [(content, [], [])]


@pytest.mark.parametrize("content", ["", " \n\t\u3000"])
def test_a_file_without_content_is_counted_as_empty(text_file, content):
    assert records(text_file("a.txt", content)) == [(None, ["empty"], ["a.txt"])]


def test_bytes_that_are_not_utf8_are_replaced_and_counted_with_the_first_place(text_file):
    found = records(text_file("a.txt", b"caf\xe9 au lait\xff"))
    assert found == [("caf� au lait�", ["invalid_utf8"], ["a.txt: byte 3 is 0xe9"])]


def test_a_byte_order_mark_is_removed_and_counted(text_file):
    found = records(text_file("a.txt", b"\xef\xbb\xbfhello"))
    assert found == [("hello", ["byte_order_mark"], ["a.txt"])]


def test_a_binary_file_is_left_out(text_file):
    found = records(text_file("a.txt", b"GIF89a\0\1"))
    assert found == [(None, ["binary"], ["a.txt: byte 6 is zero"])]


def test_a_text_of_just_the_limit_is_kept_and_one_byte_more_is_oversized(text_file):
    assert texts(text_file("a.txt", "x" * 10), max_bytes=10) == ["x" * 10]
    assert kinds(text_file("b.txt", "x" * 11), max_bytes=10) == [["oversized"]]


def test_a_packed_text_that_unpacks_to_too_much_is_left_without_being_held(tmp_path):
    path = tmp_path / "bomb.txt.gz"
    with gzip.open(path, "wb") as file:
        for _ in range(64):
            file.write(bytes(1 << 20))
    assert kinds(path, max_bytes=1 << 16) == [["oversized"]]


# JSONL

TRICKY = "one\u2028two\u2029three\u0085four\rfive\x0b\x0c\x1c six\r\nseven"


def test_jsonl_is_cut_at_line_feeds_only(text_file):
    lines = json.dumps({"text": TRICKY}, ensure_ascii=False) + "\r\n" + '{"text": "b"}'
    assert texts(text_file("a.jsonl", lines)) == [TRICKY, "b"]


@given(
    st.lists(st.binary(max_size=12).map(lambda b: b.replace(b"\n", b"")), max_size=12),
    st.integers(1, 9),
    st.integers(4, 9),
    st.booleans(),
)
@settings(deadline=None, max_examples=200)
def test_lines_do_not_depend_on_how_the_bytes_arrive(lines, piece_bytes, max_bytes, is_ended):
    content = b"\n".join(lines) + (b"\n" if is_ended and lines else b"")
    pieces = [content[i : i + piece_bytes] for i in range(0, len(content), piece_bytes)]
    found = list(split_lines(pieces, max_bytes=max_bytes))
    expected = content.split(b"\n")
    if not expected[-1]:
        expected.pop()
    assert [line.data for line in found] == [
        line if len(line) <= max_bytes else None for line in expected
    ]
    starts = [0]
    for line in expected:
        starts.append(starts[-1] + len(line) + 1)
    assert [line.start for line in found] == starts[:-1]


@pytest.mark.parametrize(
    ("line", "kind", "example"),
    [
        ("", "blank_line", "a.jsonl:2 (byte 14)"),
        ('{"text": ""}', "empty", "a.jsonl:2 (byte 14)"),
        ('{"text": "x"', "bad_json", "a.jsonl:2 (byte 14): Expecting ',' delimiter"),
        ('["text"]', "bad_json", "a.jsonl:2 (byte 14): list instead of an object"),
        ('{"body": "x"}', "missing_field", "a.jsonl:2 (byte 14): no 'text' among body"),
        ("{}", "missing_field", "a.jsonl:2 (byte 14): no 'text' among no fields"),
        ('{"text": null}', "missing_field", "a.jsonl:2 (byte 14): no 'text' among text"),
        ('{"text": 7}', "non_string_field", "a.jsonl:2 (byte 14): 'text' holds a int"),
        ('{"text": "' + "x" * 101 + '"}', "oversized", "a.jsonl:2 (byte 14): 101 bytes"),
        ("[" * 100_000, "bad_json", "a.jsonl:2 (byte 14): maximum recursion depth"),
    ],
)
def test_a_line_that_is_left_out_is_named_with_line_and_byte(text_file, line, kind, example):
    content = f'{{"text": "a"}}\n{line}\n{{"text": "c"}}\n'
    found = records(
        text_file("a.jsonl", content), max_bytes=100 if kind == "oversized" else 1 << 20
    )
    assert [text for text, _, _ in found] == ["a", None, "c"]
    assert found[1][1] == [kind]
    assert found[1][2][0].startswith(example)


@pytest.mark.slow
def test_a_line_of_a_gigabyte_is_passed_over_without_being_held(tmp_path):
    path = tmp_path / "long.jsonl"
    with open(path, "wb") as file:
        file.write(b'{"text": "a"}\n{"text": "')
        file.seek((1 << 30) - 1, io.SEEK_CUR)  # sparse: takes no room
        file.write(b'"}\n{"text": "c"}\n')
    import tracemalloc

    tracemalloc.start()
    found = records(path, max_bytes=1 << 10)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [(text, found) for text, found, _ in found] == [
        ("a", []),
        (None, ["oversized"]),
        ("c", []),
    ]
    assert peak_bytes < 8 << 20  # two pieces, and the limit for a line, 1 MiB and 3 KiB


@pytest.mark.parametrize(
    ("escaped", "text", "found"),
    [
        (r"a\ud800b", "a�b", ["lone_surrogate"]),
        (r"\udc00", "�", ["lone_surrogate"]),
        (r"a\ud83d\ude42", "a🙂", []),
    ],
)
def test_half_a_surrogate_pair_is_replaced_and_counted(text_file, escaped, text, found):
    assert records(text_file("a.jsonl", f'{{"text": "{escaped}"}}\n'))[0][:2] == (text, found)


def test_invalid_utf8_in_a_line_is_replaced_and_counted(text_file):
    found = records(text_file("a.jsonl", b'{"text": "caf\xe9"}\n'))
    assert found == [("caf�", ["invalid_utf8"], ["a.jsonl:1 (byte 0): byte 13 is 0xe9"])]


def test_another_field_may_hold_the_text(text_file):
    assert texts(text_file("a.jsonl", '{"body": "x", "text": 1}\n'), text_field="body") == ["x"]


LINES = b"".join(json.dumps({"text": f"{i} " * 50}).encode() + b"\n" for i in range(300))


def packed(name):
    return {
        "a.jsonl.gz": gzip.compress(LINES),
        "a.jsonl.zst": zstandard.compress(LINES),
    }[name]


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst"])
def test_packed_lines_read_like_plain_ones(text_file, name):
    assert texts(text_file(name, packed(name))) == texts(text_file("b.jsonl", LINES))


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst"])
def test_streams_one_after_the_other_are_one_file(text_file, name):
    assert len(texts(text_file(name, packed(name) * 3))) == 900


def test_zeros_after_a_gzip_stream_are_padding(text_file):
    assert len(texts(text_file("a.jsonl.gz", packed("a.jsonl.gz") + bytes(512)))) == 300


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst"])
@pytest.mark.parametrize("kept", [0, 1, 7, 20, -9, -1])
def test_a_packed_file_that_is_cut_is_truncated_wherever_it_is_cut(text_file, name, kept):
    content = packed(name)[:kept]
    found = records(text_file(name, content))
    assert found[-1][1] == ["truncated"]
    assert f"byte {len(content)}" in found[-1][2][0]
    assert all(text is not None for text, _, _ in found[:-1])


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst"])
def test_a_packed_file_with_a_damaged_middle_is_truncated_there(text_file, name):
    content = bytearray(packed(name))
    middle = len(content) // 2
    content[middle : middle + 8] = b"\xff" * 8
    assert kinds(text_file(name, bytes(content)))[-1] == ["truncated"]


def test_a_last_line_that_is_cut_is_truncated_and_a_whole_one_needs_no_line_feed(text_file):
    assert kinds(text_file("a.jsonl", '{"text": "a"}\n{"text": "b')) == [[], ["truncated"]]
    assert texts(text_file("b.jsonl", '{"text": "a"}\n{"text": "b"}')) == ["a", "b"]


# Parquet


def parquet(path, column, *, name="text", **options):
    pq.write_table(pa.table({name: column, "other": range(len(column))}), path, **options)
    return path


def test_each_row_of_a_parquet_file_is_a_document(tmp_path):
    draw = random.Random(1)
    column = ["".join(draw.choices("ab\u2028\n", k=20)) for _ in range(1000)]
    path = parquet(tmp_path / "a.parquet", column, row_group_size=100)
    assert texts(path) == column


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())]
)
def test_every_arrow_type_of_text_is_read(tmp_path, kind):
    path = parquet(tmp_path / "a.parquet", pa.array(["a", None, "", "b", "a"]).cast(kind))
    assert texts(path) == ["a", None, None, "b", "a"]
    assert kinds(path) == [[], ["missing_field"], ["empty"], [], []]


def test_a_parquet_file_without_the_column_names_those_it_has(tmp_path):
    path = parquet(tmp_path / "a.parquet", ["a"], name="body")
    with pytest.raises(DataError, match=r"a.parquet has no column 'text'; it has body, other\."):
        records(path)


def test_a_column_that_is_not_text_is_refused_with_its_type(tmp_path):
    path = parquet(tmp_path / "a.parquet", ["a"], name="body")
    with pytest.raises(DataError, match=r"column 'other' holds int64, not text\."):
        records(path, text_field="other")


@pytest.mark.parametrize("kept", [0, 3, 100, -1])
def test_a_parquet_file_that_is_cut_is_truncated(tmp_path, kept):
    path = parquet(tmp_path / "a.parquet", ["abc"] * 1000)
    path.write_bytes(path.read_bytes()[:kept])
    assert kinds(path) == [["truncated"]]


# The file itself


def test_a_file_that_grows_while_it_is_read_is_an_error(text_file):
    path = text_file("a.txt", "hello")
    raw = RawFile(PlannedFile(0, "a.txt", path, 3, "text", None))
    with pytest.raises(DataError, match=r"changed while it was read: 3 bytes .* 5 now"):
        raw.finish()
    raw.close()


def test_a_file_that_may_not_be_read_is_named(tmp_path):
    with pytest.raises(DataError, match=r"cannot read .*gone\.txt: No such file"):
        RawFile(PlannedFile(0, "gone.txt", tmp_path / "gone.txt", 3, "text", None))

"""Which files a source has, and in which order."""

import glob
import os
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.config.data import SourceConfig
from atoll.data.sources import format_of, list_files, matches_glob
from atoll.errors import DataError


def paths(path, **options):
    return [file.path for file in list_files(SourceConfig(path=str(path), **options), 0)]


def test_files_of_a_folder_come_depth_first_by_name_and_hidden_ones_do_not(tmp_path, text_file):
    for name in ("b.txt", "a/z.txt", "a/b/c.txt", "a.txt", "c.jsonl", ".hidden", ".git/config"):
        text_file(name, "x")
    assert paths(tmp_path) == ["a/b/c.txt", "a/z.txt", "a.txt", "b.txt", "c.jsonl"]


def test_the_order_does_not_depend_on_how_files_were_made(tmp_path):
    names = [f"{number}.txt" for number in (3, 1, 2, 10, 0)]
    for place, order in enumerate((names, sorted(names))):
        for name in order:
            (tmp_path / str(place)).mkdir(exist_ok=True)
            (tmp_path / str(place) / name).write_text("x")
    assert paths(tmp_path / "0") == paths(tmp_path / "1") == sorted(names)


@pytest.mark.skipif(not hasattr(os, "symlink"), reason="needs links")
def test_a_link_to_a_folder_is_not_entered_so_loops_end(tmp_path, text_file):
    text_file("real/a.txt", "x")
    (tmp_path / "real" / "loop").symlink_to(tmp_path / "real", target_is_directory=True)
    assert paths(tmp_path) == ["real/a.txt"]


@pytest.mark.parametrize(
    "pattern", ["*.txt", "**/*.txt", "a/**", "a/*/c.txt", "?.txt", "[ab].txt", "**/b/**", "*/*.txt"]
)
def test_a_glob_finds_what_the_standard_library_finds(tmp_path, text_file, pattern, monkeypatch):
    for name in ("a.txt", "b.txt", "c.md", "a/x.txt", "a/b/c.txt", "a/b/d.md", "b/b/e.txt"):
        text_file(name, "x")
    found = glob.glob(str(tmp_path / pattern), recursive=True)
    expected = {Path(name) for name in found if os.path.isfile(name)}
    assert expected
    source = SourceConfig(path=str(tmp_path / pattern))
    assert {file.location for file in list_files(source, 0)} == expected
    monkeypatch.chdir(tmp_path)
    source = SourceConfig(path=pattern)
    assert {file.location.resolve() for file in list_files(source, 0)} == expected


parts = st.lists(st.sampled_from(["a", "b", "ab"]), max_size=5)


@given(parts, parts)
@settings(deadline=None, max_examples=100)
def test_two_stars_stand_for_any_number_of_parts(head, tail):
    assert matches_glob([*head, *tail], [*head, "**", *tail])
    assert not matches_glob([*head, "x"], [*head, "**", "y"])


@pytest.mark.parametrize(
    ("name", "given_format", "expected"),
    [
        ("a.txt", "auto", ("text", None)),
        ("a.py", "auto", ("text", None)),
        ("A.JSONL", "auto", ("jsonl", None)),
        ("a.jsonl.gz", "auto", ("jsonl", "gz")),
        ("a.jsonl.zst", "auto", ("jsonl", "zst")),
        ("a.parquet", "auto", ("parquet", None)),
        ("a.txt.gz", "auto", ("text", "gz")),
        ("a.json", "jsonl", ("jsonl", None)),
        ("a.data.zst", "jsonl", ("jsonl", "zst")),
        ("a.jsonl", "text", ("text", None)),
    ],
)
def test_the_format_goes_by_the_name_unless_it_is_given(name, given_format, expected):
    assert format_of(name, given_format) == expected


def test_a_path_that_is_not_there_is_said_with_the_folder_it_was_looked_for_in(tmp_path):
    with pytest.raises(DataError, match=r"nowhere does not exist\.") as caught:
        paths(tmp_path / "nowhere")
    assert str(Path.cwd()) in (caught.value.hint or "")


@pytest.mark.skipif(sys.platform != "linux", reason="other systems refuse such names")
def test_a_file_name_that_is_not_utf8_is_escaped(tmp_path):
    (tmp_path / os.fsdecode(b"\xff.txt")).write_text("x")
    assert paths(tmp_path) == ["\\xff.txt"]


def test_the_standard_library_has_its_modules_and_not_its_tests():
    found = paths("stdlib")
    assert {"argparse.py", "json/decoder.py", "asyncio/tasks.py"} <= set(found)
    assert not [path for path in found if "/test/" in f"/{path}" or "site-packages" in path]
    assert found == paths("stdlib")


def test_site_packages_has_the_installed_packages():
    assert "pytest/__init__.py" in paths("site-packages")

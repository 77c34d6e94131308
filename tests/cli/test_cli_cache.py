"""`atoll cache`: what it shows, and how damage is named."""

import json

import pytest
from small_corpus import arguments


def test_cache_show_takes_a_folder_or_a_recipe(atoll, corpus):
    folder = atoll(*arguments()).out.strip()
    by_folder = atoll("cache", "show", folder)
    by_recipe = atoll("cache", "show", *arguments()[1:])
    assert by_folder.code == 0
    assert by_folder.out == by_recipe.out
    assert "validation" in by_folder.out
    assert json.loads(atoll("cache", "show", folder, "--json").out)["folder"] == folder


@pytest.mark.parametrize("verb", ["show", "verify", "explain"])
@pytest.mark.parametrize("path", ["nowhere", "corpus", "corpus/00.txt"])
def test_a_path_that_is_no_cache_exits_2_and_says_what_to_name(atoll, corpus, verb, path):
    outcome = atoll("cache", verb, path)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err == (
        f"{path} holds no finished token cache (no manifest.json).\n\n"
        "hint: name the folder that `atoll prepare` printed, or its recipe with --config "
        "and --set\n"
    )


def test_a_recipe_without_a_cache_says_how_to_make_one(atoll, corpus):
    outcome = atoll("cache", "show", *arguments()[1:])
    assert outcome.code == 1
    assert outcome.err.endswith(
        "holds no finished token cache (no manifest.json).\n\n"
        "hint: run `atoll prepare` with the same --config and --set\n"
    )


def test_cache_verify_names_file_and_mib_and_exits_1(atoll, corpus):
    folder = atoll(*arguments()).out.strip()
    assert atoll("cache", "verify", folder).code == 0
    path = corpus / folder / "train-00000.bin"
    content = bytearray(path.read_bytes())
    content[11] ^= 4
    path.write_bytes(content)
    outcome = atoll("cache", "verify", folder)
    assert outcome.code == 1
    assert outcome.out == "train-00000.bin, MiB 0: its bytes do not match the digest\n"
    assert "hint: restore these files" in outcome.err
    facts = json.loads(atoll("cache", "verify", folder, "--json").out)
    assert facts["damages"] == [
        {"file": "train-00000.bin", "mib": 0, "found": "its bytes do not match the digest"}
    ]


EXPLAIN = [
    *("--set", "model.context_length=16"),
    *("--set", "training.batch_tokens=64"),
    *("--set", "training.micro_batch_size=4"),
]


def test_cache_explain_shows_the_documents_of_an_update_and_the_way_back(atoll, corpus):
    atoll(*arguments())
    rest = [*arguments()[1:], *EXPLAIN]
    shown = atoll("cache", "explain", *rest, "--step", "2", "--row", "1")
    assert shown.code == 0
    assert shown.out.startswith("update 2\n\nrow 1: sequence ")
    assert "document" in shown.out
    (row,) = json.loads(atoll("cache", "explain", *rest, "--step", "2", "--row", "1", "--json").out)
    number = row["spans"][0]["document"]
    assert row["spans"][0]["file"] == f"{number:02d}.txt"
    back = atoll("cache", "explain", *rest, "--document", f"corpus:{number}")
    assert f"update 2, row 1: sequence {row['sequence']}, pass 0" in back.out.splitlines()


def test_cache_explain_of_no_document_says_how_one_is_written(atoll, corpus):
    atoll(*arguments())
    outcome = atoll("cache", "explain", *arguments()[1:], *EXPLAIN, "--document", "seven")
    assert outcome.code == 2
    assert "write SOURCE:NUMBER" in outcome.err

"""Killed anywhere by a real SIGKILL, preparing goes on and ends with the same bytes."""

import gzip
import json
import os
import random
import shutil

import pytest
from corpora import SMALL_PACE, folder_digests, pseudo_text

from atoll.data.prepare import FAILPOINTS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="children are made by fork"),
]

KILLED = -9

# So that a failpoint that is passed many times is also hit in the middle of its phase.
LATER_HITS = {
    "prepare.encode": 9,
    "prepare.journal.after_rename": 2,
    "prepare.arrange.before_rename": 2,
    "prepare.shard.before_rename": 4,
    "prepare.shard.documents.after_rename": 3,
    "prepare.receipt.after_rename": 5,
    "prepare.hub": 2,
}


@pytest.fixture(scope="module")
def case(tmp_path_factory, preparing):
    """A corpus of three sources, and the cache that an undisturbed preparation makes of it."""
    root = tmp_path_factory.mktemp("kill")
    for number in range(30):
        path = root / "texts" / f"{number % 4}" / f"{number:02d}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(pseudo_text(number % 27, 150))
    with gzip.open(root / "lines.jsonl.gz", "wt") as lines:
        for number in range(150):
            lines.write(json.dumps({"text": pseudo_text(1000 + number % 140, 40)}) + "\n")
        lines.write('{"other": 1}\n\n{"text": ""}\n')
    request = {
        "data": {
            "source": [
                {"path": str(root / "texts")},
                {"path": str(root / "lines.jsonl.gz")},
                {"path": "hub:someone/rows", "revision": "main"},
            ],
            "tokenizer": {"vocab_size": 400, "train_bytes": 20_000},
            "validation_fraction": 0.1,
            "on_bad_record": "skip",
            "shuffle_buffer": 32,
            "shard_tokens": 5_000,
        },
        "model": {"vocab_size": 400},
        "pace": SMALL_PACE,
        "hub": [{"text": pseudo_text(2000 + number, 30)} for number in range(60)],
    }

    def call(name, workers=2, **more):
        data = {**request["data"], "cache_dir": str(root / name), "prepare_workers": workers}
        return preparing(**{**request, "data": data, **more})

    answer = call("whole")
    assert answer["code"] == 0
    expected = folder_digests(root / "whole")
    shards = {path.split("/")[1] for path in expected if path.endswith(".bin")}
    assert len(shards) >= 6, "the corpus is to fill several shards of both splits"
    assert not any("work" in path or ".tmp" in path for path in expected)
    return root, call, expected, answer["seconds"]


@pytest.mark.parametrize("failpoint", FAILPOINTS)
def test_killed_at_a_failpoint_the_next_attempt_ends_byte_identical(case, failpoint):
    root, call, expected, _ = case
    for hit in {1, LATER_HITS.get(failpoint, 1)}:
        shutil.rmtree(root / "cut", ignore_errors=True)
        assert call("cut", failpoints=f"{failpoint}:{hit}=kill")["code"] == KILLED
        assert call("cut")["code"] == 0
        assert folder_digests(root / "cut") == expected


@pytest.mark.parametrize("seed", range(20))
def test_killed_at_a_random_instant_the_next_attempt_ends_byte_identical(case, seed):
    root, call, expected, seconds = case
    shutil.rmtree(root / "cut", ignore_errors=True)
    # Twenty strata of the whole duration, so that each phase is hit whatever machine this is.
    instant = (seed + random.Random(seed).random()) / 20 * seconds
    assert call("cut", kill_after_seconds=instant)["code"] in (KILLED, 0)
    assert call("cut")["code"] == 0
    assert folder_digests(root / "cut") == expected


def test_killed_again_and_again_it_ends_byte_identical(case):
    root, call, expected, seconds = case
    shutil.rmtree(root / "cut", ignore_errors=True)
    draw = random.Random(7)
    for _ in range(6):
        call("cut", kill_after_seconds=draw.uniform(0.1, 0.9) * seconds)
    assert call("cut")["code"] == 0
    assert folder_digests(root / "cut") == expected


@pytest.mark.parametrize(
    "failpoint",
    [
        "prepare.hub",
        "prepare.plan.before_fsync",
        "prepare.encode:5",
        "prepare.dedupe",
        "prepare.arrange.before_fsync",
        "prepare.shard.before_fsync:3",
        "prepare.manifest.before_fsync",
    ],
)
def test_a_full_disk_is_said_and_survived(case, failpoint):
    root, call, expected, _ = case
    shutil.rmtree(root / "full", ignore_errors=True)
    assert call("full", failpoints=f"{failpoint}=enospc")["code"] == 1
    assert call("full")["code"] == 0
    assert folder_digests(root / "full") == expected


@pytest.mark.parametrize("workers", [1, 5])
def test_any_number_of_workers_gives_the_same_bytes(case, workers):
    root, call, expected, _ = case
    name = f"workers-{workers}"
    assert call(name, workers=workers)["code"] == 0
    assert folder_digests(root / name) == expected

"""`atoll prepare`: streams, exit codes, signals, and what bad inputs are told."""

import gzip
import io
import json
import os
import signal
import subprocess
import sys

import pytest
from small_corpus import arguments

from atoll.cli.prepare_progress import show_progress
from atoll.data.progress import Progress
from atoll.interrupt import raise_on_signal


def process(*words, **environment):
    """Run one command line in a process of its own."""
    code = "from atoll.cli.main import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *words],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


# What a run prints


def test_prepare_prints_the_folder_alone_on_standard_output(atoll, corpus):
    outcome = atoll(*arguments())
    assert outcome.code == 0
    folder = corpus / outcome.out.strip()
    assert (folder / "manifest.json").is_file()
    assert "documents" in outcome.err
    assert atoll(*arguments()).out == outcome.out


def test_prepare_gives_its_facts_to_machines(atoll, corpus):
    facts = json.loads(atoll(*arguments("--json")).out)
    assert facts["splits"]["train"]["documents"] + facts["splits"]["validation"]["documents"] == 30
    assert facts["sources"][0]["files"] == 30
    assert facts["tokenizer"]["vocab_size"] <= 300


# What bad inputs are told. All of these are the user's to mend, so they exit with 2.

GOOD = '{"text": "good"}\n'


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", f"{GOOD}{{broken\n", "a.jsonl:2 (byte 17): Expecting property name"),
        ("a.jsonl", f'{GOOD}{{"text": 3}}\n', "a.jsonl:2 (byte 17): 'text' holds a int"),
        ("a.jsonl", f'{GOOD}{{"body": ""}}\n', "a.jsonl:2 (byte 17): no 'text' among body"),
        ("a.jsonl", f'{GOOD}{{"text": "cut', "a.jsonl:2 (byte 17): Unterminated string"),
        (
            "a.jsonl.gz",
            gzip.compress(GOOD.encode(), mtime=0)[:-4],
            "a.jsonl.gz:2: ends at byte 33 before",
        ),
        ("a.jsonl.zst", b"no zstandard", "a.jsonl.zst:1: damaged before byte 12"),
        ("a.parquet", b"PAR1....", "a.parquet:1: "),
    ],
    ids=["broken", "number", "no field", "cut line", "cut gzip", "no zstd", "no parquet"],
)
def test_a_damaged_record_stops_with_its_place_and_can_be_skipped(
    atoll, corpus, name, content, message
):
    path = corpus / "corpus" / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    outcome = atoll(*arguments())
    assert (outcome.code, outcome.out) == (2, "")
    assert message in outcome.err
    assert "hint: repair the file, or set data.on_bad_record=skip" in outcome.err
    facts = json.loads(atoll(*arguments("--set", "data.on_bad_record=skip", "--json")).out)
    ((_, entry),) = facts["ledger"].items()
    assert entry["count"] == 1
    assert entry["examples"][0].startswith(message)


@pytest.mark.parametrize(
    ("source", "message", "hint"),
    [
        ("nowhere", "nowhere does not exist.", "data.source is relative to the folder"),
        ("empty", "empty holds no file to read.", "check the path"),
        ("'corpus/*.md'", "corpus/*.md holds no file to read.", "globs start at"),
        ("blank", "the corpus holds no training document", "check data.source"),
    ],
)
def test_an_empty_corpus_is_the_users_to_mend(atoll, corpus, source, message, hint):
    (corpus / "empty").mkdir()
    (corpus / "blank").mkdir()
    (corpus / "blank" / "a.txt").write_text(" \n")
    outcome = atoll(*arguments(source=source))
    assert (outcome.code, outcome.out) == (2, "")
    assert message in outcome.err
    assert hint in outcome.err


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("data.tokenizer.vocab_size=400", "has ids up to 399, but model.vocab_size is 300"),
        ("data.tokenizer.path=nowhere", "data.tokenizer 'nowhere' holds no tokenizer.json"),
        ("model.vocab_size=200", "a tokenizer trained here needs at least 256 ids"),
        ("data.source={path: 'hub:a/b'}", "names no revision"),
    ],
)
def test_settings_that_cannot_work_are_refused(atoll, corpus, setting, message):
    outcome = atoll(*arguments("--set", setting))
    assert (outcome.code, outcome.out) == (2, "")
    assert message in outcome.err


def test_every_kind_of_expected_loss_is_counted_with_an_example(atoll, corpus):
    folder = corpus / "corpus"
    (folder / "blank.jsonl").write_text(f"{GOOD}\n{GOOD}")
    (folder / "binary.txt").write_bytes(b"\0")
    (folder / "empty.txt").write_bytes(b"")
    (folder / "latin.txt").write_bytes(b"caf\xe9")
    (folder / "long.txt").write_bytes(b"x" * 2001)
    (folder / "mark.txt").write_bytes(b"\xef\xbb\xbfmark")
    (folder / "pair.jsonl").write_text('{"text": "half \\ud800"}\n')
    outcome = atoll(*arguments("--json", "--set", "data.max_document_bytes=2000"))
    ledger = json.loads(outcome.out)["ledger"]
    assert {kind: (entry["count"], entry["examples"]) for kind, entry in ledger.items()} == {
        "binary": (1, ["binary.txt: byte 0 is zero"]),
        "blank_line": (1, ["blank.jsonl:2 (byte 17)"]),
        "byte_order_mark": (1, ["mark.txt"]),
        "duplicate": (1, ["blank.jsonl:3 repeats blank.jsonl:1"]),
        "empty": (1, ["empty.txt"]),
        "invalid_utf8": (1, ["latin.txt: byte 3 is 0xe9"]),
        "lone_surrogate": (1, ["pair.jsonl:1 (byte 0)"]),
        "oversized": (1, ["long.txt: over 2,000 bytes"]),
    }
    for kind in ledger:
        assert kind in outcome.err


# Signals


@pytest.mark.parametrize(
    "place", ["prepare.tokenizer", "prepare.encode", "prepare.shard.before_fsync"]
)
def test_ctrl_c_exits_130_and_the_same_command_goes_on(atoll, corpus, place):
    stopped = process(*arguments(), ATOLL_FAILPOINTS=f"{place}=interrupt")
    assert (stopped.returncode, stopped.stdout) == (130, "")
    assert stopped.stderr.endswith(
        "preparing was interrupted by SIGINT; finished work is kept.\n\n"
        "hint: run the same command again to go on\n"
    )
    assert atoll(*arguments()).code == 0


def test_a_second_signal_ends_at_once():
    code = (
        "import signal, sys\n"
        "from atoll.interrupt import raise_on_signal\n"
        "with raise_on_signal('waiting'):\n"
        "    try:\n"
        "        signal.raise_signal(signal.SIGINT)\n"
        "    finally:\n"
        "        signal.raise_signal(signal.SIGINT)\n"
        "        print('still here')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_handlers_are_put_back_afterwards():
    before = signal.getsignal(signal.SIGINT)
    with raise_on_signal("waiting"):
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before


# What it needs


def test_preparing_needs_no_torch(corpus):
    code = (
        "import sys\n"
        "from atoll.cli.main import run\n"
        f"assert run({arguments()!r}) == 0\n"
        "heavy = {'torch', 'transformers', 'pyarrow', 'datasets', 'huggingface_hub', 'pandas'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[1] == "[]"


# Progress


class Clock:
    def __init__(self):
        self.seconds = 100.0

    def __call__(self):
        return self.seconds


def test_progress_elsewhere_than_on_a_terminal_is_a_line_every_ten_seconds():
    clock, stream = Clock(), io.StringIO()
    with show_progress(stream, clock=clock) as see:
        for second in range(31):
            clock.seconds = 100.0 + second
            see(Progress("encode", second * 2_000_000, 100_000_000))
        see(Progress("arrange", 0, None))
    assert stream.getvalue().splitlines() == [
        "encoding",
        "encoding: 20 of 100 MB, 2 MB/s, 40 s left",
        "encoding: 40 of 100 MB, 2 MB/s, 30 s left",
        "encoding: 60 of 100 MB, 2 MB/s, 20 s left",
        "finding duplicates, shuffling",
    ]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_on_a_terminal_is_a_bar_with_rate_and_time_left(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    clock, stream = Clock(), Terminal()
    with show_progress(stream, clock=clock) as see:
        see(Progress("train", 0, None))
        clock.seconds += 1
        see(Progress("copy", 7, None))
        see(Progress("encode", 0, 7_200_000_000))
        clock.seconds += 10
        see(Progress("encode", 10_000_000, 7_200_000_000))
    # Only the last state is sure to be drawn: the bar is drawn by a thread of its own.
    assert "encoding" in stream.getvalue()
    assert "10 of 7,200 MB, 1 MB/s, 1 h 59 min left" in stream.getvalue()

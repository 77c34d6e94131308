"""Shell commands that fail, hang, talk or ask; each is one clear error or none."""

import os
from pathlib import Path
from time import monotonic

import pytest

from atoll.bench.scenarios.commands import commands
from atoll.errors import AtollError

pytestmark = pytest.mark.skipif(
    os.name != "posix", reason="the commands are those of a POSIX shell"
)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("echo before; echo why >&2; exit 3", r"command B ended with exit code 3: before \| why"),
        ("exit 4", "command B ended with exit code 4: exit 4"),
        ("kill -9 $$", r"command B was ended by signal 9 \(Killed\)"),
        ("no-such-thing-here", "command B ended with exit code 127, no such command: .*not found"),
    ],
)
def test_a_failing_command_is_named_with_its_end_and_last_lines(line, message):
    contest = commands("true", line)
    contest.a.work()
    with pytest.raises(AtollError, match=message):
        contest.b.work()


def test_only_the_last_lines_of_a_talkative_command_are_shown():
    talk = "i=0; while [ $i -lt 3000 ]; do echo line $i; i=$((i+1)); done; exit 1"
    with pytest.raises(AtollError) as raised:
        commands(talk, "true").a.work()
    assert raised.value.message == "command A ended with exit code 1: " + " | ".join(
        f"line {number}" for number in range(2995, 3000)
    )


def test_a_command_that_would_read_finds_nothing_to_read():
    commands('read word; test -z "$word"', "true").a.work()


def test_a_command_over_its_time_is_ended_with_all_it_started(tmp_path):
    file = tmp_path / "pid"
    line = f"sleep 600 & echo $! > {file}; echo waiting; wait"
    started = monotonic()
    with pytest.raises(AtollError, match=r"command A ran longer than 0.5 s, .* ended: waiting"):
        commands(line, "true", timeout_seconds=0.5).a.work()
    assert monotonic() - started < 60
    if Path("/proc/self/stat").exists():
        stat = Path("/proc", file.read_text().strip(), "stat")
        limit = monotonic() + 10
        while _runs(stat):
            assert monotonic() < limit, "what the command started goes on"


def test_a_command_within_its_time_is_left_alone():
    commands("true", "true", timeout_seconds=60).b.work()


def _runs(stat: Path) -> bool:
    try:
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False

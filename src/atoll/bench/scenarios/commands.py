"""Any two shell commands, by the wall seconds of the whole process."""

import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from typing import IO

from atoll.bench.contest import Contest, Target
from atoll.bench.timing import Condition
from atoll.errors import AtollError

SHOWN_LINES = 5
SHOWN_BYTES = 4096
"""Of what a command wrote last, that an error shows."""

NO_SUCH_COMMAND = 127
"""Exit code of a POSIX shell that does not find what it is to run."""


def commands(
    a: str, b: str, *, at_least: float | None = None, timeout_seconds: float | None = None
) -> Contest:
    """Return the contest of two command lines, each run by the system's shell.

    Nothing can be typed into a command, and what it writes is kept in a file until it ends.

    Args:
        a: Command A.
        b: Command B.
        at_least: Speed of A over B that is asked for, or None to measure only.
        timeout_seconds: Longest time that one run may take; None: any.
    """
    target = None if at_least is None else Target("speed", at_least)
    ours, theirs = _condition("A", a, timeout_seconds), _condition("B", b, timeout_seconds)
    return Contest("commands", ours, theirs, target)


def _condition(letter: str, command: str, timeout_seconds: float | None) -> Condition:
    return Condition(command, lambda: _run(letter, command, timeout_seconds))


def _run(letter: str, command: str, timeout_seconds: float | None) -> None:
    with tempfile.TemporaryFile() as output:
        # The command is the user's own, typed to be run by a shell. A group of its own lets all
        # that it started be ended with it.
        process = subprocess.Popen(
            command,
            shell=True,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            _end(process)
            raise AtollError(
                f"command {letter} ran longer than {timeout_seconds:g} s, and was ended: "
                f"{_last_lines(output) or command}",
                hint="raise --timeout, or give the command less to do",
            ) from None
        except BaseException:  # above all Ctrl-C, which reaches this process only
            _end(process)
            raise
        if code != 0:
            raise AtollError(
                f"command {letter} {_ending(code)}: {_last_lines(output) or command}",
                hint="both commands must succeed each time they run; try it by itself first",
            )


def _ending(code: int) -> str:
    if code < 0:
        return f"was ended by signal {-code} ({signal.strsignal(-code)})"
    missing = ", no such command" if code == NO_SUCH_COMMAND else ""
    return f"ended with exit code {code}{missing}"


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a command and all that it started."""
    if sys.platform == "win32":
        process.kill()
    else:
        with suppress(ProcessLookupError):  # it ended by itself meanwhile
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _last_lines(output: IO[bytes]) -> str:
    size = output.seek(0, os.SEEK_END)
    output.seek(max(0, size - SHOWN_BYTES))
    text = output.read().decode(errors="replace").strip()
    return " | ".join(text.splitlines()[-SHOWN_LINES:])

"""Any two shell commands, by the wall seconds of the whole process."""

import subprocess

from atoll.bench.contest import Contest, Target
from atoll.bench.timing import Condition
from atoll.errors import AtollError


def commands(a: str, b: str, *, at_least: float | None = None) -> Contest:
    """Return the contest of two command lines, each run by the system's shell.

    Args:
        a: Command A.
        b: Command B.
        at_least: Speed of A over B that is asked for, or None to measure only.
    """
    target = None if at_least is None else Target("speed", at_least)
    return Contest("commands", _condition("A", a), _condition("B", b), target)


def _condition(letter: str, command: str) -> Condition:
    return Condition(command, lambda: _run(letter, command))


def _run(letter: str, command: str) -> None:
    # The command is the user's own, typed to be run by a shell.
    done = subprocess.run(command, shell=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    if done.returncode != 0:
        said = " | ".join(done.stderr.decode(errors="replace").strip().splitlines()[-3:])
        raise AtollError(
            f"command {letter} ended with exit code {done.returncode}: {said or command}",
            hint="both commands must succeed each time they run; try it by itself first",
        )

"""How tests call the command line in their own process."""

import logging
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from atoll.cli.main import run

sys.path.insert(0, str(Path(__file__).parent))


@dataclass(frozen=True, slots=True)
class Outcome:
    code: int
    out: str
    err: str


@pytest.fixture(autouse=True)
def _logging_as_before():
    logger = logging.getLogger("atoll")
    before = logger.level, logger.propagate, logger.handlers[:]
    yield
    logger.level, logger.propagate, logger.handlers[:] = before


@pytest.fixture
def atoll(capsys):
    """Run one command line and return its exit code and both streams."""

    def call(*arguments):
        code = run([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return call


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    """A folder with a corpus of thirty documents, as the working folder."""
    (tmp_path / "corpus").mkdir()
    for number in range(30):
        (tmp_path / "corpus" / f"{number:02d}.txt").write_text(f"document {number}\n" * 9)
    monkeypatch.chdir(tmp_path)
    return tmp_path

"""How tests call the command line in their own process."""

import logging
from dataclasses import dataclass

import pytest

from atoll.cli.main import run


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

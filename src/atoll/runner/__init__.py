"""One run: build, resume, loop, save, evaluate; the only composer of the rooms below."""

from atoll.runner.compose import run
from atoll.runner.result import RunResult

__all__ = ["RunResult", "run"]

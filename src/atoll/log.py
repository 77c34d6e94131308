"""Logging to standard error and to the run's log file, and one-JSON-object-per-line metrics."""

import json
import logging
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FORMAT = "%(asctime)s %(levelname).1s %(name)s: %(message)s"


def configure_logging(*, verbose: bool = False) -> None:
    """Send atoll's log lines to standard error, `info` and above, or `debug` when verbose."""
    root = logging.getLogger("atoll")
    root.setLevel(logging.DEBUG if verbose else logging.INFO)
    root.handlers[:] = [_handler(logging.StreamHandler(sys.stderr))]
    root.propagate = False


def log_to_file(path: Path) -> logging.Handler:
    """Also append atoll's log lines to `path`; give the result to `stop_logging` afterwards."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = _handler(logging.FileHandler(path, encoding="utf-8"))
    logging.getLogger("atoll").addHandler(handler)
    return handler


def stop_logging(handler: logging.Handler) -> None:
    """Detach and close what `log_to_file` returned."""
    logging.getLogger("atoll").removeHandler(handler)
    handler.close()


class JsonLines:
    """Appends one JSON object a line; every line is flushed, so that a kill loses none before it.

    A last line cut short by an earlier kill is dropped when the file is opened again.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        _drop_torn_line(path)
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - closed by close()

    def write(self, record: Mapping[str, Any]) -> None:
        """Append `record` with the wall-clock second it was written at, as `time_seconds`."""
        line = {"time_seconds": round(time.time(), 3), **record}
        self._file.write(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _handler(handler: logging.Handler) -> logging.Handler:
    handler.setFormatter(logging.Formatter(FORMAT, datefmt="%Y-%m-%d %H:%M:%S"))
    return handler


def _drop_torn_line(path: Path) -> None:
    if not path.exists():
        return
    with open(path, "r+b") as file:
        data = file.read()
        if data and not data.endswith(b"\n"):
            file.truncate(data.rfind(b"\n") + 1)

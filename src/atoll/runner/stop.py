"""Stopping at a clean point: the first signal asks, the second one ends the process."""

import logging
import os
import signal
import threading
from types import FrameType
from typing import Any

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGINT, signal.SIGTERM)
INTERRUPTED_EXIT_CODE = 130


class StopRequest:
    """Whether a signal, or a caller, has asked the run to stop after the current update.

    As a context it listens for SIGINT and SIGTERM; a second one ends the process at once, which
    no file minds: each is complete or absent. Outside the main thread Python allows no handlers,
    so there only `ask` is heard.
    """

    def __init__(self) -> None:
        self._reason: str | None = None
        self._before: dict[signal.Signals, Any] = {}

    @property
    def requested(self) -> bool:
        return self._reason is not None

    @property
    def reason(self) -> str | None:
        """Name of the signal, or what `ask` was given."""
        return self._reason

    def ask(self, reason: str) -> None:
        """Ask for a stop; the first reason is kept."""
        self._reason = self._reason or reason

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self.requested:
            os._exit(INTERRUPTED_EXIT_CODE)
        self.ask(name)
        logger.warning("%s: finishing this update; a second signal ends at once", name)

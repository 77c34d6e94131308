"""Ctrl-C and SIGTERM in work that can be killed anywhere: the first ends it, the second at once."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from atoll.errors import InterruptedRunError


@contextlib.contextmanager
def raise_on_signal(what: str) -> Iterator[None]:
    """Raise InterruptedRunError in the main thread at the first signal; end at a second one.

    Python allows handlers in the main thread only; elsewhere this does nothing.

    Args:
        what: The work, as in "preparing was interrupted".
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    seen: list[int] = []

    def handle(number: int, _frame: FrameType | None) -> None:
        seen.append(number)
        if len(seen) > 1:
            os._exit(InterruptedRunError.exit_code)
        raise InterruptedRunError(
            f"{what} was interrupted by {signal.Signals(number).name}; finished work is kept.",
            hint="run the same command again to go on",
        )

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

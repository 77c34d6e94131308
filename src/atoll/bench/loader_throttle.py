"""A reader as slow as somebody asks, to see that a profile says so."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError

import numpy as np

from atoll.data.groups import GroupSource, Take


class ThrottledSource:
    """Reads groups as `source` does, and lets each begin later by a fixed time.

    The delay lies inside the read, in whichever thread reads, and ends early when that is stopped.
    """

    def __init__(
        self,
        source: GroupSource,
        *,
        delay_seconds: float,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        """Read from `source`.

        Args:
            source: What reads.
            delay_seconds: Added to the read of every group; 0 < delay_seconds.
            sleep: Waits where no other thread can stop the read.
        """
        self._source = source
        self._delay_seconds = delay_seconds
        self._sleep = sleep
        self.dtype = source.dtype

    def read(self, group: int, take: Take, *, stop: threading.Event | None = None) -> None:
        waited = False

        def take_late(position: int, piece: np.ndarray) -> None:
            nonlocal waited
            if not waited:
                waited = True
                self._wait(stop)
            take(position, piece)

        self._source.read(group, take_late, stop=stop)

    def _wait(self, stop: threading.Event | None) -> None:
        if stop is None:
            self._sleep(self._delay_seconds)
        elif stop.wait(self._delay_seconds):
            raise CancelledError

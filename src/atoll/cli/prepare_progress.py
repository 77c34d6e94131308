"""How far `atoll prepare` is: a live bar on a terminal, plain lines elsewhere."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from time import monotonic
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as RichBar

from atoll.data.progress import Phase, Progress

_LABELS: dict[Phase, tuple[str, str]] = {
    "copy": ("copying from the hub", "rows"),
    "tokenizer": ("sampling text for the tokenizer", "MB"),
    "train": ("training the tokenizer", ""),
    "encode": ("encoding", "MB"),
    "arrange": ("finding duplicates, shuffling", ""),
    "assemble": ("writing shards", "M tokens"),
    "compare": ("comparing source files", "MB"),
    "verify": ("reading the cache", "MB"),
}

_SECONDS_BETWEEN_LINES = 10.0


@contextlib.contextmanager
def show_progress(
    stream: TextIO | None = None, *, clock: Callable[[], float] = monotonic
) -> Iterator[Callable[[Progress], None]]:
    """Yield what `prepare` reports to; it shows rate and time left on standard error."""
    target: TextIO = sys.stderr if stream is None else stream
    if not target.isatty():
        yield _Lines(target, clock)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[figures]}"))
    with RichBar(*columns, console=Console(file=target), transient=True) as bar:
        yield _Bar(bar, clock)


class _Meter:
    """Knows when the phase began, and so its rate and the time left."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._phase: Phase | None = None
        self._started = 0.0
        self._first = 0

    def is_new(self, progress: Progress) -> bool:
        """Note a progress and say whether it is the first of its phase."""
        if progress.phase == self._phase:
            return False
        self._phase, self._started, self._first = progress.phase, self._clock(), progress.done
        return True

    def text(self, progress: Progress) -> str:
        """Return done, total, rate and time left, as far as they are known."""
        unit = _LABELS[progress.phase][1]
        if not unit or not progress.done:
            return ""
        scale = 1 if unit == "rows" else 1e6
        parts = [_amount(progress.done / scale)]
        if progress.total:
            parts = [f"{_amount(progress.done / scale)} of {_amount(progress.total / scale)}"]
        parts[0] += f" {unit}"
        elapsed_seconds = self._clock() - self._started
        if elapsed_seconds > 0 and progress.done > self._first:
            rate = (progress.done - self._first) / elapsed_seconds
            parts.append(f"{_amount(rate / scale)} {unit}/s")
            if progress.total:
                parts.append(f"{_duration((progress.total - progress.done) / rate)} left")
        return ", ".join(parts)


class _Lines:
    """A line when a phase begins, and then one every few seconds."""

    def __init__(self, stream: TextIO, clock: Callable[[], float]) -> None:
        self._stream = stream
        self._clock = clock
        self._meter = _Meter(clock)
        self._last = 0.0

    def __call__(self, progress: Progress) -> None:
        is_new = self._meter.is_new(progress)
        if not is_new and self._clock() - self._last < _SECONDS_BETWEEN_LINES:
            return
        self._last = self._clock()
        figures = self._meter.text(progress)
        label = _LABELS[progress.phase][0]
        self._stream.write(f"{label}: {figures}\n" if figures else f"{label}\n")
        self._stream.flush()


class _Bar:
    """A bar for the phase at hand."""

    def __init__(self, bar: RichBar, clock: Callable[[], float]) -> None:
        self._bar = bar
        self._meter = _Meter(clock)
        self._task = bar.add_task("", total=None, figures="")

    def __call__(self, progress: Progress) -> None:
        if self._meter.is_new(progress):
            self._bar.reset(self._task, description=_LABELS[progress.phase][0], figures="")
        self._bar.update(
            self._task,
            completed=progress.done,
            total=progress.total,
            figures=self._meter.text(progress),
        )


def _amount(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"

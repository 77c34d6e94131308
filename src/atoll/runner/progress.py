"""What a person sees while a run goes on: a live bar on a terminal, plain lines elsewhere."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as RichBar


@dataclass(frozen=True, slots=True)
class Pace:
    """How far a run is.

    Attributes:
        step: Finished updates.
        total_steps: Updates of the whole run.
        loss_nats_per_token: Mean of the last window.
        targets_per_second: Rate of the last window.
        seconds_left: At that rate, without evaluations; None until one is known.
        models: Local models.
        consensus_distance: How far they are from their mean; None where that is not measured.
    """

    step: int
    total_steps: int
    loss_nats_per_token: float
    targets_per_second: float
    seconds_left: float | None
    models: int = 1
    consensus_distance: float | None = None


class Progress(Protocol):
    """Where a run tells people what it does."""

    def note(self, text: str) -> None:
        """Say something once."""
        ...

    def work(self, what: str, done: int, total: int | None) -> None:
        """Show how far some other work is, in units of its own; None: nobody knows how much."""
        ...

    def tick(self, step: int, total_steps: int) -> None:
        """Count one more update."""
        ...

    def pace(self, pace: Pace) -> None:
        """Show the figures of the last window."""
        ...


class Silence:
    """Says nothing: for programs that use the library."""

    def note(self, text: str) -> None:
        return None

    def work(self, what: str, done: int, total: int | None) -> None:
        return None

    def tick(self, step: int, total_steps: int) -> None:
        return None

    def pace(self, pace: Pace) -> None:
        return None


class Lines:
    """One plain line for each note, each kind of work and each window: for logs and pipes."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._what = ""

    def note(self, text: str) -> None:
        self._write(text)

    def work(self, what: str, done: int, total: int | None) -> None:
        if what != self._what:
            self._what = what
            self._write(what)

    def tick(self, step: int, total_steps: int) -> None:
        return None

    def pace(self, pace: Pace) -> None:
        self._write(f"update {pace.step}/{pace.total_steps}  {_figures(pace)}")

    def _write(self, text: str) -> None:
        self._stream.write(text + "\n")
        self._stream.flush()


class LiveBar:
    """A bar that counts every update, with the figures of the last window beside it."""

    def __init__(self, bar: RichBar) -> None:
        self._bar = bar
        self._task = bar.add_task("", total=None, figures="")

    def note(self, text: str) -> None:
        self._bar.console.print(text, highlight=False, markup=False)

    def work(self, what: str, done: int, total: int | None) -> None:
        self._bar.update(self._task, description=what, completed=done, total=total, figures="")

    def tick(self, step: int, total_steps: int) -> None:
        self._bar.update(self._task, description="update", completed=step, total=total_steps)

    def pace(self, pace: Pace) -> None:
        self._bar.update(self._task, figures=_figures(pace))


@contextmanager
def live_progress(stream: TextIO | None = None) -> Iterator[Progress]:
    """Yield what suits standard error: a bar on a terminal, plain lines elsewhere."""
    target: TextIO = sys.stderr if stream is None else stream
    if not target.isatty():
        yield Lines(target)
        return
    columns = (
        TextColumn("{task.description}"),
        MofNCompleteColumn(),
        BarColumn(),
        TextColumn("{task.fields[figures]}"),
    )
    with RichBar(*columns, console=Console(file=target)) as bar, _log_above_bar():
        yield LiveBar(bar)


@contextmanager
def _log_above_bar() -> Iterator[None]:
    """Send log lines through the stream that the bar has put in place, so that they stay whole."""
    handlers: list[logging.StreamHandler[Any]] = [
        handler
        for handler in logging.getLogger("atoll").handlers
        if type(handler) is logging.StreamHandler
    ]
    before = [handler.setStream(sys.stderr) for handler in handlers]
    try:
        yield
    finally:
        for handler, stream in zip(handlers, before, strict=True):
            if stream is not None:
                handler.setStream(stream)


def duration(seconds: float) -> str:
    """Return a duration for people: 45 s, 3 min 20 s, 2 h 5 min, 3 d 4 h."""
    whole = round(seconds)
    for size, unit, small_size, small in ((86400, "d", 3600, "h"), (3600, "h", 60, "min")):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // small_size} {small}"
    return f"{whole // 60} min {whole % 60} s" if whole >= 60 else f"{whole} s"


def rate(per_second: float) -> str:
    """Return a rate for people: 812/s, 9.4k/s, 2.31M/s."""
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if per_second >= size:
            return f"{per_second / size:.3g}{unit}/s"
    return f"{per_second:.0f}/s"


def _figures(pace: Pace) -> str:
    left = "" if pace.seconds_left is None else f"  {duration(pace.seconds_left)} left"
    apart = ""
    if pace.consensus_distance is not None:
        apart = f"  {pace.models} local models {pace.consensus_distance:.3g} from their mean"
    return (
        f"loss {pace.loss_nats_per_token:.4f}{apart}  targets {rate(pace.targets_per_second)}{left}"
    )

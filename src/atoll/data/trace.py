"""What a loader did and how long each stage took; nothing is measured unless somebody listens."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Activation:
    """The moment at which a shard group became the one that rows are taken from.

    Attributes:
        batch: The call of `batch` that needed it, counted from 1.
        group: Its number in the split.
        cursor: The first row taken from it.
        prefetched: Whether the background reader had been asked for it.
        ready: Whether its read had ended by then; None when it was read in the foreground.
        seconds: How long that call waited for it.
        started: When it began to wait, by the trace's clock.
    """

    batch: int
    group: int
    cursor: int
    prefetched: bool
    ready: bool | None
    seconds: float
    started: float


@dataclass(frozen=True, slots=True)
class Read:
    """One group read: tokens [start, stop) of a split, digests checked, by which thread.

    `storage_bytes` were not in memory and came from storage: 0 is a warm read. None where the
    kernel does not count them for a thread. `started` is when, by the trace's clock.
    """

    split: str
    start: int
    stop: int
    bytes: int
    seconds: float
    thread: str
    storage_bytes: int | None
    started: float


@dataclass(slots=True)
class LoaderTrace:
    """Collects records and stage times of one loader.

    Stages: `batch` (all of one call), and inside it `pin`, `copy_enqueue` or `gather`, depending on
    the placement. A GPU's own times are taken with events and never waited for here.

    Attributes:
        copy_sample_interval: Every how many copies one is bracketed by CUDA events.
        gap_device: A GPU on whose current stream every call of `batch` is bracketed by events.
        clock: Seconds from any origin.
        activations: In the order they happened.
        reads: In the order they ended.
        stage_seconds: Wall seconds of every call of each stage.
        copy_events: A (start, end) pair of timed events for each sampled copy.
        gap_events: Such a pair for each call of `batch`, where there is a `gap_device`. Between
            them the stream did nothing but wait for the call, and copy or gather for it.
    """

    copy_sample_interval: int = 64
    gap_device: torch.device | None = None
    clock: Callable[[], float] = perf_counter
    activations: list[Activation] = field(default_factory=list)
    reads: list[Read] = field(default_factory=list)
    stage_seconds: dict[str, list[float]] = field(default_factory=dict)
    copy_events: list[tuple[Any, Any]] = field(default_factory=list)
    gap_events: list[tuple[Any, Any]] = field(default_factory=list)

    def batch(self, work: Callable[[], Result]) -> Result:
        """Do one call of `batch` as a stage of that name."""
        if self.gap_device is None:
            return self.stage("batch", work)
        stream = torch.cuda.current_stream(self.gap_device)
        start = stream.record_event(torch.cuda.Event(enable_timing=True))
        result = self.stage("batch", work)
        self.gap_events.append((start, stream.record_event(torch.cuda.Event(enable_timing=True))))
        return result

    def stage(self, name: str, work: Callable[[], Result]) -> Result:
        """Do `work` and add its wall seconds to a stage."""
        started = self.clock()
        result = work()
        self.stage_seconds.setdefault(name, []).append(self.clock() - started)
        return result

    def copy(self, pinned: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Enqueue a copy to a GPU as stage `copy_enqueue`; events around it are sampled."""
        index = len(self.stage_seconds.get("copy_enqueue", ()))
        sampled = index % self.copy_sample_interval == 0
        stream = torch.cuda.current_stream(device)
        start = stream.record_event(torch.cuda.Event(enable_timing=True)) if sampled else None
        result = self.stage("copy_enqueue", lambda: pinned.to(device, non_blocking=True))
        if start is not None:
            end = stream.record_event(torch.cuda.Event(enable_timing=True))
            self.copy_events.append((start, end))
        return result


def thread_storage_bytes() -> int | None:
    """Return the bytes that this thread has had fetched from storage, None where nobody counts.

    Linux counts what a thread asks of a block device or a network file system, its readahead
    included, and nothing for pages that are in memory.
    """
    try:
        text = _THREAD_IO.read_text(encoding="ascii")
    except OSError:
        return None
    counts = dict(line.split(": ") for line in text.splitlines())
    return int(counts["read_bytes"]) if "read_bytes" in counts else None


_THREAD_IO = Path("/proc/thread-self/io")

"""Windows of updates in counterbalanced order, their rates, and ratios between modes.

A window is a number of updates between two moments at which the device has done everything asked
of it; the scalars are read once in it, as training does every `training.log_every` updates. With
two modes windows come in blocks ABBA and BAAB, with three in palindromes, so that a linear drift of
the machine cancels inside each block.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Literal

import torch

from atoll.bench.compare import (
    Sample,
    block_log_ratios,
    ratio_interval,
    void_blocks,
)
from atoll.bench.contest import FEWEST_BLOCKS, LARGEST_VOID_SHARE
from atoll.bench.order import counterbalanced
from atoll.bench.throughput_modes import Contender, Mode
from atoll.bench.timing import SYSTEM, Stopwatch
from atoll.errors import UsageError
from atoll.seeds import derive_seed

WARM_UP_WINDOWS = 2
"""Windows of each mode that do not count: the first compiles, the second settles allocators."""

WARM_UP_UPDATES = 4
"""Updates at least in each of them: an update that becomes a CUDA graph is recorded at its third.
"""

Letter = Literal["A", "B"]


@dataclass(frozen=True, slots=True)
class Window:
    """One timed window.

    Attributes:
        mode: What ran.
        block: Its block, counted from 0; None for a warm-up window, which no figure counts.
        seconds: Wall time.
        peak_bytes: Most device memory that this mode would take alone; None on a CPU.
    """

    mode: Mode
    block: int | None
    seconds: float
    peak_bytes: int | None


def window_order(modes: Sequence[Mode], *, windows: int, seed: int) -> list[tuple[Mode, ...]]:
    """Return blocks of modes in the order in which they run.

    Args:
        modes: One to three.
        windows: Of each mode; even where there are several modes, since a block holds two.
        seed: Published with the result.
    """
    if windows < 1 or (len(modes) > 1 and windows % 2):
        raise UsageError(
            f"{windows} windows of each of {len(modes)} modes were asked for.",
            hint="give --windows an even number of at least 2"
            if len(modes) > 1
            else "give --windows at least 1",
        )
    if len(modes) == 1:
        return [(modes[0],)] * windows
    if len(modes) == 2:
        a, b = modes
        orders = counterbalanced(seed, windows // 2, purpose="throughput")
        return [tuple(a if letter == "A" else b for letter in order) for order in orders]
    turn = derive_seed(seed, "bench", "throughput") % len(modes)
    blocks = []
    for number in range(windows // 2):
        first = (turn + number) % len(modes)
        half = (*modes[first:], *modes[:first])
        blocks.append((*half, *reversed(half)))
    return blocks


def run_windows(
    contenders: Sequence[Contender],
    *,
    windows: int,
    updates: int,
    seed: int,
    stopwatch: Stopwatch = SYSTEM,
    note: Callable[[str], object] = lambda line: None,
) -> list[Window]:
    """Warm every mode up, then time all windows; each is kept.

    Args:
        contenders: One for each mode.
        windows: Timed ones of each mode.
        updates: In each window.
        seed: Decides the order.
        stopwatch: How windows are timed.
        note: Takes lines for people.
    """
    by_mode: dict[Mode, Contender] = {contender.mode: contender for contender in contenders}
    order = window_order(list(by_mode), windows=windows, seed=seed)
    found = []
    for contender in contenders:
        for _ in range(WARM_UP_WINDOWS):
            found.append(_window(contender, None, warm_up_updates(updates), stopwatch))
        note(f"{contender.mode}: warmed up, {found[-1].seconds:.2f} s a window")
    for number, block in enumerate(order):
        found += [_window(by_mode[mode], number, updates, stopwatch) for mode in block]
    return found


def warm_up_updates(updates: int) -> int:
    """Return the updates of a warm-up window, given those of a timed one."""
    return max(updates, WARM_UP_UPDATES)


def rates(windows: Sequence[Window], mode: Mode, *, targets: int) -> dict[str, Any]:
    """Return median, extremes and every sample of a mode's rate in targets a second.

    Args:
        windows: Of all modes.
        mode: Which.
        targets: Of one window.
    """
    own = [window for window in windows if window.mode == mode]
    timed = [window for window in own if window.block is not None]
    per_second = [targets / window.seconds for window in timed]
    # Warm-up counts here: a replayed graph asks the allocator for nothing, its recording did.
    peaks = [window.peak_bytes for window in own if window.peak_bytes is not None]
    return {
        "targets_per_second": {
            "median": median(per_second),
            "min": min(per_second),
            "max": max(per_second),
        },
        "num_windows": len(timed),
        "seconds": [window.seconds for window in timed],
        "warm_up_seconds": [window.seconds for window in own if window.block is None],
        "peak_device_bytes": max(peaks, default=None),
    }


def speed_ratio(windows: Sequence[Window], a: Mode, b: Mode) -> dict[str, Any]:
    """Return the speed of `a` over `b`, paired by block, with a 95% interval where blocks allow.

    `verdict` is `void` where more than a third of the blocks are, `too few` where fewer than
    FEWEST_BLOCKS are sound, otherwise `faster`, `slower` or `undecided` by the interval.
    """
    letters: dict[Mode, Letter] = {a: "A", b: "B"}
    samples: list[Sample] = []
    for window in windows:
        if window.block is not None and window.mode in letters:
            place = sum(sample.block == window.block for sample in samples)
            samples.append(Sample(window.block, place, letters[window.mode], window.seconds))
    void = void_blocks(samples)
    total = samples[-1].block + 1
    record: dict[str, Any] = {
        "a": a,
        "b": b,
        "num_blocks": total,
        "void_blocks": void,
        "block_log_time_ratios": block_log_ratios(samples),
    }
    if len(void) > LARGEST_VOID_SHARE * total:
        everything = ratio_interval(block_log_ratios(samples)).inverse()
        return record | {"verdict": "void", "ratio": everything.ratio, "interval": None}
    found = ratio_interval(block_log_ratios(samples, leave_out=void)).inverse()
    if found.num_blocks < FEWEST_BLOCKS:
        return record | {"verdict": "too few", "ratio": found.ratio, "interval": None}
    verdict = "faster" if found.low > 1 else "slower" if found.high < 1 else "undecided"
    return record | {"verdict": verdict, "ratio": found.ratio, "interval": asdict(found)}


def _window(contender: Contender, block: int | None, updates: int, stopwatch: Stopwatch) -> Window:
    device = contender.device
    stopwatch.settle()
    before = _allocated(device)
    if before is not None:
        torch.cuda.reset_peak_memory_stats(device)
    started = stopwatch.clock()
    contender.run(updates)
    seconds = stopwatch.clock() - started
    peak, after = None, _allocated(device)
    if before is not None and after is not None:
        others = before - contender.resident_bytes
        contender.resident_bytes = after - others
        peak = torch.cuda.max_memory_allocated(device) - others
    return Window(contender.mode, block, seconds, peak)


def _allocated(device: torch.device) -> int | None:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else None

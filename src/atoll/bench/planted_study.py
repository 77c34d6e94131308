"""The whole study of planted slowdowns: work, length, runs in blind order, one JSON document."""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import Field

from atoll.bench.compare import VOID_RULE
from atoll.bench.contest import VERDICT_RULE, num_aa_blocks
from atoll.bench.document import SAMPLE_FIELDS
from atoll.bench.machine import machine, now, versions
from atoll.bench.planted import (
    OUTCOMES,
    Measured,
    Repeat,
    conditions,
    judge_run,
    measure,
    planting,
    run_record,
    score,
)
from atoll.bench.timing import SYSTEM, Stopwatch
from atoll.config.base import Section
from atoll.seeds import derive_seed

if TYPE_CHECKING:
    from atoll.bench.throughput_modes import Contender

FORMAT_VERSION = 1

PIECES = 100
"""Pieces of work of a window come in hundreds, so that each percentage is a whole number."""

SPARE_UPDATES = 1 << 40


class PlantedSettings(Section):
    runs: int = Field(default=20, ge=1)
    """Runs of each size."""
    percents: tuple[Annotated[int, Field(ge=0)], ...] = Field(default=(0, 2, 5, 10), min_length=1)
    """Sizes in percent of additional work; 0 plants nothing."""
    minutes: float = Field(default=10.0, gt=0)
    """How long the whole takes, about; decides the length of windows."""
    work: Literal["numpy", "training"] = "numpy"
    """One piece: two passes over an array, or one update of a recipe with one short row."""
    elements: int = Field(default=4096, ge=1)
    """Length of the array."""
    recipe: str = "smoke"
    """Recipe of the update."""


@dataclass(frozen=True, slots=True)
class Length:
    """How long everything is.

    Attributes:
        pieces: In a window without a slowdown, a multiple of `PIECES`.
        piece_seconds: Of one, found beforehand.
        minutes: That the whole takes, about.
    """

    pieces: int
    piece_seconds: float
    minutes: float


def planted_study(
    settings: PlantedSettings,
    *,
    command: Sequence[str],
    seed: int,
    num_blocks: int,
    repeat: Repeat | None = None,
    stopwatch: Stopwatch = SYSTEM,
    note: Callable[[str], object] = lambda line: None,
) -> dict[str, Any]:
    """Make all runs and return one JSON document with rates and every sample.

    Args:
        settings: Sizes, runs and length.
        command: The command line that asked for it.
        seed: Decides what is planted where, and every order.
        num_blocks: Blocks of A against B in each run; at least 2.
        repeat: The work. Default: what `settings.work` says.
        stopwatch: How windows are timed.
        note: Takes lines for people.
    """
    started, before = now(), machine()
    plants = planting(settings.percents, runs=settings.runs, seed=seed)
    with _work(settings, repeat) as work, _nothing_to_collect():
        length = choose_length(settings, work, num_blocks=num_blocks, stopwatch=stopwatch)
        note(
            f"planted slowdowns: {len(plants)} runs of {num_blocks} blocks, windows of "
            f"{1000 * length.pieces * length.piece_seconds:.3g} ms, about {length.minutes:.1f} min"
        )
        measured: list[Measured] = []
        for number, plant in enumerate(plants):
            a, b = conditions(plant, work, pieces=length.pieces)
            order_seed = derive_seed(seed, "bench", "planted order", number)
            measured.append(
                measure(a, b, seed=order_seed, num_blocks=num_blocks, stopwatch=stopwatch)
            )
            if (number + 1) % 10 == 0:
                note(f"{number + 1} of {len(plants)} runs measured")
    judged = [judge_run(run) for run in measured]
    sizes = score(plants, judged)
    for size in sizes:
        note(line(size))
    return {
        "format_version": FORMAT_VERSION,
        "measurement": "planted slowdowns",
        "parameters": settings.model_dump(mode="json"),
        "command": list(command),
        "started": started,
        "finished": now(),
        "machine": before,
        "load_average_1_minute_at_end": machine()["load_average_1_minute"],
        "versions": versions(),
        "order_seed": seed,
        "num_blocks": num_blocks,
        "pieces_per_window": length.pieces,
        "piece_seconds": length.piece_seconds,
        "void_rule": VOID_RULE,
        "verdict_rule": VERDICT_RULE,
        "outcome_rule": OUTCOMES,
        "sample_fields": SAMPLE_FIELDS,
        "sizes": sizes,
        "runs": [
            run_record(plant, run, found)
            for plant, run, found in zip(plants, measured, judged, strict=True)
        ],
        "verdict": "measured",
    }


def choose_length(
    settings: PlantedSettings, repeat: Repeat, *, num_blocks: int, stopwatch: Stopwatch
) -> Length:
    """Return how many pieces a window holds so that the whole takes `settings.minutes`.

    Args:
        settings: Sizes, runs and length.
        repeat: The work; it is warm afterwards.
        num_blocks: Of A against B.
        stopwatch: How windows are timed.
    """
    clock, settle = stopwatch.clock, stopwatch.settle
    settle_seconds = min(_seconds(clock, settle) for _ in range(3))
    repeat(PIECES)
    hundred_seconds = min(_seconds(clock, lambda: repeat(PIECES)) for _ in range(5))
    windows = 2 + 4 * num_aa_blocks(num_blocks) + 4 * num_blocks
    windows *= settings.runs * len(settings.percents)
    wanted_seconds = 60 * settings.minutes / windows - settle_seconds
    hundreds = max(1, int(wanted_seconds / hundred_seconds))
    minutes = windows * (hundreds * hundred_seconds + settle_seconds) / 60
    return Length(hundreds * PIECES, hundred_seconds / PIECES, minutes)


def line(size: dict[str, Any]) -> str:
    """Return what was found of one size, for people."""
    sound = size["sound_runs"]
    parts = [f"planted {size['percent']}%:"]
    if size["percent"]:
        parts.append(f"found in {size['found']} of {sound} runs{_ends(size['detection_rate'])},")
        parts.append(f"the other way in {size['other_way']},")
    else:
        parts.append(
            f"false alarms in {size['other_way']} of {sound} runs{_ends(size['false_alarm_rate'])},"
        )
    parts.append(f"undecided {size['undecided']}; void {size['void']}, too few {size['too_few']}")
    if size["median_percent_found"] is not None:
        parts.append(f"; median found {size['median_percent_found']:.2f}%")
    return " ".join(parts).replace(" ;", ";")


def _ends(rate: dict[str, Any] | None) -> str:
    return "" if rate is None else f" [{rate['low']:.0%}, {rate['high']:.0%}]"


def _seconds(clock: Callable[[], float], call: Callable[[], object]) -> float:
    started = clock()
    call()
    return clock() - started


@contextmanager
def _nothing_to_collect() -> Iterator[None]:
    """Keep what exists already out of the collections before windows, which would take as long."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def _work(settings: PlantedSettings, repeat: Repeat | None) -> Iterator[Repeat]:
    if repeat is not None:
        yield repeat
    elif settings.work == "numpy":
        yield _array_work(settings.elements)
    else:
        with training_contender(settings.recipe) as contender:
            yield contender.run


def _array_work(elements: int) -> Repeat:
    values = np.ones(elements, np.float32)
    # The fixed point is 1, so that values never become small enough to be slow.
    factor, summand = np.float32(0.5), np.float32(0.5)

    def repeat(pieces: int) -> None:
        for _ in range(pieces):
            np.multiply(values, factor, out=values)
            np.add(values, summand, out=values)

    return repeat


@contextmanager
def training_contender(recipe: str) -> Iterator["Contender"]:
    """Yield what makes updates of one model on one row each, on one CPU thread."""
    from atoll.bench.throughput_data import open_rows
    from atoll.bench.throughput_modes import build_contender
    from atoll.config.load import load_config
    from atoll.train.device import resolve_device, resolve_execution
    from atoll.train.exact import torch_switches

    overrides = ["training.micro_batch_size=1", "runtime.device=cpu", "runtime.compile=false"]
    config = load_config([Path(recipe)], overrides).config
    tokens = config.model.context_length
    config = load_config([Path(recipe)], [*overrides, f"training.batch_tokens={tokens}"]).config
    device = resolve_device("cpu")
    with torch_switches(deterministic=False, cpu_threads=1, compiled=False):
        rows = open_rows(config, "synthetic", device, num_updates=SPARE_UPDATES, seed=0)
        with closing(rows):
            execution = resolve_execution(config.runtime, device)
            yield build_contender(config, "single", rows, device, execution)

"""One trial of a loader: real training, stopped by a signal after an exact update, and its record.

What a run is made of is made as `atoll train` makes it; only the loader listens to itself. Nothing
is saved and nothing is judged. The instrumentation waits for the device nowhere: GPU times are
events, which are read when training is over.
"""

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from time import perf_counter
from typing import Any

import torch

from atoll.bench.loader_facts import trial_facts
from atoll.bench.loader_figures import DEFINITIONS, STAGES, figures
from atoll.bench.loader_throttle import ThrottledSource
from atoll.bench.machine import machine, now
from atoll.config.schema import RunConfig
from atoll.data.cache import MANIFEST_NAME, Cache
from atoll.data.loader import TokenLoader
from atoll.data.placement import PlacementName, resolve_placement
from atoll.data.trace import LoaderTrace
from atoll.errors import AtollError, InterruptedRunError, UsageError
from atoll.runner.build import Job, build, cache_folder
from atoll.runner.stop import StopRequest
from atoll.seeds import derive_seed
from atoll.strategy.build import check_strategy
from atoll.train.device import may_compile, resolve_device
from atoll.train.exact import torch_switches
from atoll.train.loop import StepRecord, train

FORMAT_VERSION = 1

STOP_SIGNAL = signal.SIGTERM


@dataclass(frozen=True, slots=True)
class TrialRequest:
    """What one trial is.

    Attributes:
        steps: The update after which the signal stops it.
        exclude: First updates that figures leave out; 0 <= exclude < steps.
        condition: What it is called in a comparison.
        position: Its place in the order of its allocation, from 1.
        read_delay_seconds: Added to every group read; 0 for none.
    """

    steps: int
    exclude: int = 100
    condition: str = "baseline"
    position: int = 1
    read_delay_seconds: float = 0.0


def run_trial(
    config: RunConfig,
    request: TrialRequest,
    *,
    command: list[str],
    note: Callable[[str], object] = lambda line: None,
    clock: Callable[[], float] = perf_counter,
    sleep: Callable[[float], object] = time.sleep,
) -> dict[str, Any]:
    """Train until the stop and return the trial's record.

    Runs in the main thread, which is the only one that signals reach.

    Args:
        config: The recipe; `data.placement` and `data.prefetch` are the condition.
        request: What the trial is.
        command: The command line that asked for it.
        note: Takes lines for people.
        clock: Times everything but the GPU; seconds from any origin.
        sleep: Delays reads in the step thread.

    Raises:
        UserError: It cannot be done as asked; nothing has been trained.
        InterruptedRunError: Another signal came first.
        AtollError: The run did not end interrupted after exactly that update.
    """
    check_strategy(config.strategy)
    device = resolve_device(config.runtime.device)
    cache = _open_cache(config)
    _check(request)
    started, before = now(), machine()
    with (
        torch_switches(
            deterministic=config.runtime.deterministic,
            cpu_threads=config.runtime.cpu_threads,
            compiled=may_compile(config.runtime, device),
        ),
        torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
        build(config, cache, device) as built,
        _traced(built, request, clock, sleep) as (job, trace),
    ):
        if request.steps > job.budget.total_steps:
            raise UsageError(
                f"a trial of {request.steps} updates was asked for, and the recipe's budget has "
                f"{job.budget.total_steps}.",
                hint="ask for fewer with --steps, or raise training.tokens_per_parameters",
            )
        torch.manual_seed(derive_seed(config.runtime.seed, "torch"))
        log = _Log(trace, origin=clock())
        outcome = _train(job, request, log, note)
        raw = _raw(job, request, log)
        facts = trial_facts(job)
    return {
        "format_version": FORMAT_VERSION,
        "measurement": "loader trial",
        "command": command,
        "started": started,
        "finished": now(),
        "machine": before,
        "load_average_1_minute_at_end": machine()["load_average_1_minute"],
        "condition": request.condition,
        "position_in_allocation": request.position,
        "read_delay_seconds": request.read_delay_seconds,
        **outcome,
        **facts,
        "definitions": DEFINITIONS,
        **figures(raw),
        **raw,
    }


@dataclass(slots=True)
class _Log:
    """What is noted after each update; nothing is computed there."""

    trace: LoaderTrace
    origin: float
    calls: dict[str, list[int]] = field(default_factory=dict)
    update_ends: list[float] = field(default_factory=list)
    windows: list[dict[str, Any]] = field(default_factory=list)

    def add(self, record: StepRecord) -> None:
        for stage, seconds in self.trace.stage_seconds.items():
            # A stage that begins late had made no call in the updates before.
            counts = self.calls.setdefault(stage, [0] * len(self.update_ends))
            counts.append(len(seconds))
        self.update_ends.append(self.trace.clock())
        if record.window is not None:
            self.windows.append(
                {
                    "step": record.step,
                    "targets": int(record.window.targets),
                    "seconds": record.window.seconds,
                    "loss_nats_per_token": record.window.loss_nats_per_token,
                }
            )


def _open_cache(config: RunConfig) -> Cache:
    folder = cache_folder(config)
    if not (folder / MANIFEST_NAME).exists():
        raise UsageError(
            f"there is no finished token cache in {folder}.",
            hint="make it with atoll prepare and the same recipe",
        )
    return Cache(folder)


def _check(request: TrialRequest) -> None:
    if not 0 <= request.exclude < request.steps:
        raise UsageError(
            f"{request.exclude} of {request.steps} updates are to be excluded; at least one must "
            "be left.",
            hint="raise --steps or lower --exclude",
        )
    if request.read_delay_seconds < 0:
        raise UsageError(f"reads cannot be {-request.read_delay_seconds:g} s faster.")
    if threading.current_thread() is not threading.main_thread():
        raise UsageError("a trial is stopped by a signal, which only the main thread hears.")


@contextmanager
def _traced(
    built: Job,
    request: TrialRequest,
    clock: Callable[[], float],
    sleep: Callable[[float], object],
) -> Iterator[tuple[Job, LoaderTrace]]:
    """Yield the job with a loader that listens to itself, and what it hears."""
    config, device = built.config, built.device
    built.loader.close()
    trace = LoaderTrace(clock=clock, gap_device=device if device.type == "cuda" else None)
    slow = partial(ThrottledSource, delay_seconds=request.read_delay_seconds, sleep=sleep)
    loader = TokenLoader(
        built.cache,
        "train",
        context_length=config.model.context_length,
        seed=config.data.shuffle_seed,
        group_shards=config.data.shuffle_group_size,
        passes=config.data.passes,
        prefetch=config.data.prefetch,
        placement=resolve_placement(config.data.placement, device),
        device=device,
        trace=trace,
        around_source=slow if request.read_delay_seconds else None,
    )
    with loader:
        yield replace(built, loader=loader), trace


def _train(
    job: Job, request: TrialRequest, log: _Log, note: Callable[[str], object]
) -> dict[str, Any]:
    """Train to the stop and return how it ended, which is exactly as asked."""
    state, stop = job.state, StopRequest()

    def should_stop() -> bool:
        if state.step == request.steps and not stop.requested:
            signal.raise_signal(STOP_SIGNAL)
        return stop.requested

    # The loop reads the device's scalars there, as at every line of metrics, so that the first
    # measured window begins with an idle device.
    plan = replace(job.plan, rest_steps=job.plan.rest_steps | {request.exclude})
    with stop:
        for record in train(
            state, job.loader, plan, should_stop=should_stop, clock=log.trace.clock
        ):
            log.add(record)
            if record.window is not None:
                rate = record.window.targets_per_second
                note(f"update {record.step}/{request.steps}: {rate:,.0f} targets/s")
    job.loader.close()
    job.state.strategy.close()
    if stop.requested and state.step < request.steps:
        raise InterruptedRunError(
            f"{stop.reason} ended the trial after update {state.step} of {request.steps}.",
            hint="a trial makes all its updates or none: run it again",
        )
    pending = job.loader.pending_prefetches
    if stop.reason != STOP_SIGNAL.name or state.step != request.steps or pending:
        raise AtollError(
            f"the trial ended after update {state.step}, stopped by {stop.reason}, with {pending} "
            f"pending prefetches; update {request.steps}, {STOP_SIGNAL.name} and none are required."
        )
    return {"status": "interrupted", "stopped_by": stop.reason, "pending_prefetches": pending}


def _raw(job: Job, request: TrialRequest, log: _Log) -> dict[str, Any]:
    """Return all that figures are computed from; waits for the last events."""
    trace, device = log.trace, job.device
    samples: dict[str, list[float]] = {
        stage: trace.stage_seconds.get(stage, [])
        for stage in _stages(resolve_placement(job.config.data.placement, device), device)
    }
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        samples["device_gap"] = _event_seconds(trace.gap_events)
        if "copy_enqueue" in samples:
            samples["copy_gpu"] = _event_seconds(trace.copy_events)
    return {
        "steps": request.steps,
        "excluded_initial_steps": request.exclude,
        "copy_sample_interval": trace.copy_sample_interval,
        "windows": log.windows,
        "reads": [_since(log.origin, asdict(read)) for read in trace.reads],
        "activations": [_since(log.origin, asdict(entry)) for entry in trace.activations],
        "calls_after_update": log.calls,
        "update_end_seconds": [end - log.origin for end in log.update_ends],
        "samples": samples,
    }


def _since(origin: float, record: dict[str, Any]) -> dict[str, Any]:
    """Return the record with its stamp as seconds since the start of training."""
    started = record.pop("started")
    return record | {"started_seconds": started - origin}


def _stages(placement: PlacementName, device: torch.device) -> list[str]:
    """Return the stages that a placement has on a device, as far as the step thread times them."""
    if device.type != "cuda":
        return ["batch"]
    by_placement: Mapping[PlacementName, list[str]] = {
        "pageable": ["batch", "pin", "copy_enqueue"],
        "pinned": ["batch", "copy_enqueue"],
        "device": ["batch", "gather"],
    }
    assert set(by_placement[placement]) <= set(STAGES)
    return by_placement[placement]


def _event_seconds(pairs: list[tuple[Any, Any]]) -> list[float]:
    return [start.elapsed_time(end) / 1000 for start, end in pairs]

"""`atoll bench throughput`: rates by window, memory, and time by term against measured roofs."""

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

import torch

from atoll.bench.compare import VOID_RULE
from atoll.bench.contest import LARGEST_VOID_SHARE
from atoll.bench.guards import memory_named, no_silent_fallback
from atoll.bench.machine import machine, now, versions
from atoll.bench.roofs import measure_roofs
from atoll.bench.throughput_data import Data, open_rows
from atoll.bench.throughput_modes import (
    Contender,
    Mode,
    build_contender,
    default_mode,
    mode_config,
)
from atoll.bench.throughput_terms import TRACED_UPDATES, compare_terms, trace_terms
from atoll.bench.throughput_windows import (
    FEWEST_BLOCKS,
    WARM_UP_WINDOWS,
    rates,
    run_windows,
    speed_ratio,
    warm_up_updates,
    window_order,
)
from atoll.bench.timing import SYSTEM, Stopwatch
from atoll.config.model import parameter_count
from atoll.config.schema import RunConfig
from atoll.data.batch import Loader
from atoll.errors import UnavailableError, UsageError
from atoll.runner.changes import config_identity
from atoll.runner.result import peak_memory_bytes
from atoll.strategy.build import check_strategy
from atoll.train.binding import source_hash, source_revision
from atoll.train.device import (
    Execution,
    may_compile,
    resolve_device,
    resolve_execution,
)
from atoll.train.exact import torch_switches

FORMAT_VERSION = 1

RULES = (
    f"{VOID_RULE} A ratio has an interval where at least {FEWEST_BLOCKS} blocks are sound, and is "
    f"void where more than {LARGEST_VOID_SHARE:.0%} are not. Rates count targets of all local "
    "models. Terms are sums of kernel durations (on a CPU: of operators' own time) in a trace "
    "apart from the windows; the floor of a kernel is the longer of its operations at the measured "
    "rate of a large product and its bytes at that of a large copy. Bytes that stay in a cache "
    "move faster than a large copy, so that a share may exceed 1 on a CPU with a small model."
)


@dataclass(frozen=True, slots=True)
class Request:
    """What to measure.

    Attributes:
        modes: One to three, each once; empty for what the recipe is.
        updates: Of each model in a window.
        windows: Timed windows of each mode.
        data: Random rows on the device, or the recipe's token cache.
        trace: Whether terms are measured.
        seed: Decides order and synthetic rows.
    """

    modes: tuple[Mode, ...] = ()
    updates: int = 20
    windows: int = 8
    data: Data = "synthetic"
    trace: bool = True
    seed: int = 0


def throughput(
    config: RunConfig,
    request: Request,
    *,
    command: Sequence[str],
    stopwatch: Stopwatch = SYSTEM,
    note: Callable[[str], object] = lambda line: None,
) -> dict[str, Any]:
    """Measure a recipe and return one JSON document.

    Args:
        config: The recipe.
        request: What to measure.
        command: The command line that asked for it.
        stopwatch: How windows are timed.
        note: Takes lines for people.

    Raises:
        UserError: A mode, the data or the device is not there.
        NonFiniteError: A loss or a gradient was not finite.
    """
    modes = request.modes or (default_mode(config),)
    device = resolve_device(config.runtime.device)
    _check(config, request, modes, device)
    runtime = config.runtime
    started, before = now(), machine()
    with (
        torch_switches(
            deterministic=runtime.deterministic,
            cpu_threads=runtime.cpu_threads,
            compiled=may_compile(runtime, device),
        ),
        memory_named(config, device),
        ExitStack() as stack,
    ):
        execution = resolve_execution(runtime, device)
        stack.enter_context(no_silent_fallback(compiled=execution.compiled))
        loaders = [stack.enter_context(closing(_open_rows(config, request, device))) for _ in modes]
        contenders = [
            _build(config, mode, loader, device, execution)
            for mode, loader in zip(modes, loaders, strict=True)
        ]
        measured = _measure(config, contenders, request, device, stopwatch=stopwatch, note=note)
        threads = torch.get_num_threads()
    return {
        "format_version": FORMAT_VERSION,
        "measurement": "throughput",
        "command": list(command),
        "started": started,
        "finished": now(),
        "machine": before,
        "load_average_1_minute_at_end": machine()["load_average_1_minute"],
        "device": _device_facts(device),
        "threads": threads,
        "execution": _execution_facts(execution),
        **_recipe_facts(config),
        "data": {"kind": request.data, "identity": loaders[0].identity},
        **_request_facts(request, modes),
        **measured,
    }


def _recipe_facts(config: RunConfig) -> dict[str, Any]:
    return {
        "versions": versions() | {"cuda": torch.version.cuda},
        "source_hash": source_hash(),
        "source_revision": source_revision(),
        "config_identity": config_identity(config),
        "config": config.model_dump(mode="json"),
        "deterministic": config.runtime.deterministic,
    }


def _request_facts(request: Request, modes: Sequence[Mode]) -> dict[str, Any]:
    return {
        "rules": RULES,
        "order_seed": request.seed,
        "order": window_order(modes, windows=request.windows, seed=request.seed),
        "updates_per_window": request.updates,
        "windows_per_mode": request.windows,
        "warm_up_windows_per_mode": WARM_UP_WINDOWS,
        "updates_per_warm_up_window": warm_up_updates(request.updates),
    }


def _check(
    config: RunConfig, request: Request, modes: Sequence[Mode], device: torch.device
) -> None:
    """Refuse what cannot be measured before anything is built."""
    if len(set(modes)) < len(modes):
        raise UsageError(f"a mode was given twice: {', '.join(modes)}.", hint="give each once")
    for mode in modes:
        check_strategy(mode_config(config, mode).strategy)
    window_order(modes, windows=request.windows, seed=request.seed)
    if request.trace and device.type not in ("cpu", "cuda"):
        raise UnavailableError(
            f"terms cannot be measured on {device}: torch records no kernels there.",
            hint="give --no-trace, or set runtime.device=cpu",
        )


def _open_rows(config: RunConfig, request: Request, device: torch.device) -> Loader:
    count = WARM_UP_WINDOWS * warm_up_updates(request.updates) + request.windows * request.updates
    count += 2 * TRACED_UPDATES if request.trace else 0
    return open_rows(config, request.data, device, num_updates=count, seed=request.seed)


def _build(
    config: RunConfig, mode: Mode, loader: Loader, device: torch.device, execution: Execution
) -> Contender:
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else None
    contender = build_contender(config, mode, loader, device, execution)
    if before is not None:
        contender.resident_bytes = torch.cuda.memory_allocated(device) - before
    return contender


def _measure(
    config: RunConfig,
    contenders: Sequence[Contender],
    request: Request,
    device: torch.device,
    *,
    stopwatch: Stopwatch,
    note: Callable[[str], object],
) -> dict[str, Any]:
    windows = run_windows(
        contenders,
        windows=request.windows,
        updates=request.updates,
        seed=request.seed,
        stopwatch=stopwatch,
        note=note,
    )
    # Read before the roofs, whose buffers are larger than a small model.
    host_bytes = peak_memory_bytes(torch.device("cpu"))
    losses = {contender.mode: contender.loss for contender in contenders}
    traces = {c.mode: trace_terms(c, device) for c in contenders} if request.trace else {}
    dtype = contenders[0].execution.amp or torch.float32
    note(f"measuring the roofs of {device}")
    roofs = measure_roofs(device, dtype, stopwatch=stopwatch)
    modes = {}
    for contender in contenders:
        found = rates(windows, contender.mode, targets=contender.targets * request.updates)
        modes[contender.mode] = {
            "local_models": contender.num_models,
            "parameters_of_all_models": contender.num_models * parameter_count(config.model),
            "targets_per_update": contender.targets,
            "targets_per_window": contender.targets * request.updates,
            "targets_per_backward_of_one_model": contender.micro_targets,
            "loss_nats_per_target": losses[contender.mode],
            **found,
            **compare_terms(contender, found, roofs, traces.get(contender.mode)),
        }
    modes_in_order: list[Mode] = [contender.mode for contender in contenders]
    reserved = torch.cuda.max_memory_reserved(device) if device.type == "cuda" else None
    return {
        "modes": modes,
        "ratios": [speed_ratio(windows, a, b) for a, b in combinations(modes_in_order, 2)],
        "roofs": roofs.facts,
        "peak_host_bytes_of_all_modes": host_bytes,
        "peak_reserved_device_bytes_of_all_modes": reserved,
    }


def _execution_facts(execution: Execution) -> dict[str, Any]:
    return asdict(execution) | {
        "amp": None if execution.amp is None else str(execution.amp).removeprefix("torch.")
    }


def _device_facts(device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        return {"type": device.type, "name": None, "cpu_count": os.cpu_count()}
    properties = torch.cuda.get_device_properties(device)
    return {
        "type": "cuda",
        "name": properties.name,
        "capability": [properties.major, properties.minor],
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
    }

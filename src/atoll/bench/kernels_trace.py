"""A trace of a few updates: what ran on the device, for how long, inside what, and the gaps.

The trace is torch's profiler's, in the form that it exports for Chrome: categories `kernel`,
`gpu_memcpy`, `gpu_memset` on a GPU, `cpu_op`, `cuda_runtime`, `user_annotation` on the host, times
in microseconds. On a CPU an operator's own time is its time without that of operators inside it.
"""

import json
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from atoll.bench.kernels import AFTER_BACKWARD, TERMS, term_of
from atoll.errors import AtollError

UPDATE = "atoll::update"
"""Name of the range around each update of each model."""

DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
HOST = ("cpu_op", "cuda_runtime", "cuda_driver", "user_annotation")
LAUNCH = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "cudaMemcpy", "cudaMemset")
BACKWARD = "autograd::engine::evaluate_function"
SHOWN = 6
"""Names that are listed of each term."""


@dataclass(slots=True)
class Work:
    """One kernel on a device, or one operator's own time on a CPU.

    Attributes:
        name: As the profiler says it.
        start: Microseconds from any origin.
        duration: Microseconds.
        context: Operators around it on the host; AFTER_BACKWARD where that holds.
    """

    name: str
    start: float
    duration: float
    context: tuple[str, ...] = ()


@dataclass(slots=True)
class Timeline:
    """What a trace holds.

    Attributes:
        work: In order of start.
        span: Microseconds from the first start to the last end.
        busy: Microseconds of it in which anything ran.
        gaps: Microseconds of each pause between two that ran.
        launch: Microseconds that the host spent in launching, None on a CPU.
        launches: How many, None on a CPU.
    """

    work: list[Work]
    span: float
    busy: float
    gaps: list[float] = field(default_factory=list)
    launch: float | None = None
    launches: int | None = None


def record_trace(updates: Callable[[], object], *, device: torch.device) -> list[dict[str, Any]]:
    """Run `updates` under the profiler, after a first time that wakes it, and return the events.

    Args:
        updates: Makes updates, each inside `record_function(UPDATE)`, and waits for the device.
        device: Where they compute.
    """
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities):
        updates()
    with profile(activities=activities) as recorded:
        updates()
    with tempfile.TemporaryDirectory(prefix="atoll-trace-") as folder:
        path = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(path))
        return json.loads(path.read_bytes())["traceEvents"]


def update_range() -> record_function:
    """Return what surrounds one update of one model."""
    return record_function(UPDATE)


def read_timeline(events: Iterable[dict[str, Any]], *, on_device: bool) -> Timeline:
    """Return the timeline of the updates in a trace.

    Args:
        events: `traceEvents` of the file.
        on_device: Whether a GPU computed; otherwise operators of the host are the work.

    Raises:
        AtollError: The trace holds no update, or no kernel where there must be some.
    """
    complete = [event for event in events if event.get("ph") == "X"]
    host = [event for event in complete if event.get("cat") in HOST]
    updates = [event for event in host if event["name"] == UPDATE]
    nodes = _nested(host)
    phases = _phases(updates, host)
    if not updates:
        raise AtollError("the profiler recorded no update.", hint="measure with --no-trace")
    if on_device:
        return _device_timeline(complete, nodes, phases)
    return _host_timeline(updates, nodes, phases)


def by_term(timeline: Timeline, *, targets: int) -> dict[str, Any]:
    """Return time by term, in nanoseconds for each target, and what no rule knows.

    Args:
        timeline: Of some updates.
        targets: Targets of all these updates.
    """
    unit = 1e3 / targets
    terms: dict[str, float] = dict.fromkeys(TERMS, 0.0)
    names: dict[str, dict[str, list[float]]] = {term: {} for term in TERMS}
    unknown: dict[str, list[float]] = {}
    for work in timeline.work:
        term = term_of(work.name, work.context)
        if term is None:
            unknown.setdefault(work.name, []).append(work.duration)
        chosen = term or "other"
        terms[chosen] += work.duration
        names[chosen].setdefault(work.name, []).append(work.duration)
    return {
        "terms_ns_per_target": {term: unit * value for term, value in terms.items()},
        "total_ns_per_target": unit * sum(terms.values()),
        "span_ns_per_target": unit * timeline.span,
        "busy_share": timeline.busy / timeline.span if timeline.span else None,
        "gaps": {
            "ns_per_target": unit * (timeline.span - timeline.busy),
            "count": len(timeline.gaps),
            "largest_us": max(timeline.gaps, default=0.0),
        },
        "host_launch": None
        if timeline.launch is None
        else {"ns_per_target": unit * timeline.launch, "count": timeline.launches},
        "largest_by_term": {term: _largest(found, unit) for term, found in names.items()},
        "unknown": {
            "count": sum(map(len, unknown.values())),
            "ns_per_target": unit * sum(map(sum, unknown.values())),
            "names": _largest(unknown, unit, shown=None),
        },
    }


def _largest(
    found: dict[str, list[float]], unit: float, *, shown: int | None = SHOWN
) -> list[dict[str, Any]]:
    order = sorted(found, key=lambda name: -sum(found[name]))
    return [
        {"name": name, "ns_per_target": unit * sum(found[name]), "count": len(found[name])}
        for name in order[:shown]
    ]


@dataclass(slots=True)
class _Node:
    event: dict[str, Any]
    context: tuple[str, ...]
    own: float


def _nested(host: Sequence[dict[str, Any]]) -> list[_Node]:
    """Return host events with the names around them and their own time."""
    nodes: list[_Node] = []
    open_nodes: dict[Any, list[_Node]] = {}
    for event in sorted(host, key=lambda event: (event["ts"], -event["dur"])):
        stack = open_nodes.setdefault((event["pid"], event["tid"]), [])
        while stack and _end(stack[-1].event) <= event["ts"]:
            stack.pop()
        if stack:
            stack[-1].own -= event["dur"]
        node = _Node(event, tuple(outer.event["name"] for outer in stack), event["dur"])
        nodes.append(node)
        stack.append(node)
    return nodes


def _phases(
    updates: Sequence[dict[str, Any]], host: Sequence[dict[str, Any]]
) -> list[tuple[float, float]]:
    """Return, for each update, the time from the end of its last backward to its own end."""
    ends = [(event["ts"], _end(event)) for event in host if event["name"].startswith(BACKWARD)]
    phases = []
    for update in updates:
        inside = [end for start, end in ends if update["ts"] <= start < _end(update)]
        if inside:
            phases.append((max(inside), _end(update)))
    return phases


def _context(node: _Node, phases: Sequence[tuple[float, float]]) -> tuple[str, ...]:
    moment = node.event["ts"]
    if any(start <= moment < end for start, end in phases):
        return (AFTER_BACKWARD, *node.context)
    return node.context


def _host_timeline(
    updates: Sequence[dict[str, Any]],
    nodes: Sequence[_Node],
    phases: Sequence[tuple[float, float]],
) -> Timeline:
    """Return operators inside the updates; what is outside of operators there is the gap."""
    work = [
        Work(node.event["name"], node.event["ts"], node.own, _context(node, phases))
        for node in nodes
        if node.event["cat"] in ("cpu_op", "user_annotation") and UPDATE in node.context
    ]
    span = sum(update["dur"] for update in updates)
    gaps = [node.own for node in nodes if node.event["name"] == UPDATE]
    return Timeline(work, span, sum(item.duration for item in work), gaps)


def _device_timeline(
    complete: Sequence[dict[str, Any]],
    nodes: Sequence[_Node],
    phases: Sequence[tuple[float, float]],
) -> Timeline:
    launched = {
        node.event["args"]["correlation"]: node
        for node in nodes
        if node.event["cat"] in ("cuda_runtime", "cuda_driver")
        and "correlation" in node.event.get("args", {})
    }
    kernels = sorted(
        (event for event in complete if event.get("cat") in DEVICE), key=lambda event: event["ts"]
    )
    if not kernels:
        raise AtollError(
            "the profiler recorded no kernel of the GPU.",
            hint="measure with --no-trace, or allow this user to profile the GPU",
        )
    work = []
    for event in kernels:
        node = launched.get(event.get("args", {}).get("correlation"))
        context = () if node is None else _context(node, phases)
        work.append(Work(event["name"], event["ts"], event["dur"], context))
    gaps, reached = [], work[0].start
    for item in work:
        if item.start > reached:
            gaps.append(item.start - reached)
        reached = max(reached, item.start + item.duration)
    span = reached - work[0].start
    launches = [
        node.event["dur"] for node in launched.values() if node.event["name"].startswith(LAUNCH)
    ]
    return Timeline(work, span, span - sum(gaps), gaps, sum(launches), len(launches))


def _end(event: dict[str, Any]) -> float:
    return event["ts"] + event["dur"]

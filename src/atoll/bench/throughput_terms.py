"""Time by term of a mode, from a trace apart from the windows, against the floors of its terms."""

from typing import Any

import torch

from atoll.bench.kernels_trace import by_term, read_timeline, record_trace, update_range
from atoll.bench.roofs import Roofs, against_floors, floors
from atoll.bench.throughput_modes import Contender
from atoll.model.cost import training_flops, update_parts

TRACED_UPDATES = 3
"""Updates in the trace; as many before them wake the profiler."""


def trace_terms(contender: Contender, device: torch.device) -> dict[str, Any]:
    """Return time by term of a few updates of every model; see `by_term`."""
    events = record_trace(lambda: contender.run(TRACED_UPDATES, update_range), device=device)
    timeline = read_timeline(events, on_device=device.type == "cuda")
    return by_term(timeline, targets=TRACED_UPDATES * contender.targets)


def compare_terms(
    contender: Contender, found: dict[str, Any], roofs: Roofs, trace: dict[str, Any] | None
) -> dict[str, Any]:
    """Return floors, and where there is a trace what was measured against them."""
    model = contender.config.model
    per_second = found["targets_per_second"]["median"]
    parts = update_parts(
        model,
        local_targets=contender.local_targets,
        micro_targets=contender.micro_targets,
        narrow=contender.execution.amp is not None,
    )
    floor = floors(parts, roofs)
    achieved = per_second * training_flops(model)
    facts: dict[str, Any] = {
        "ns_per_target": 1e9 / per_second,
        "flops_per_target": training_flops(model),
        "flops_per_second": achieved,
        "share_of_product_roof": achieved / roofs.flops_per_second,
        "floor": floor,
        "share_of_floor_rate": per_second / floor["targets_per_second"],
        "trace": trace,
        "against_floor": None,
    }
    if trace is not None:
        pause = trace["gaps"]["ns_per_target"]
        if contender.device.type == "cuda":
            # The profiler slows the host, not kernels: pauses are those of the untraced windows.
            pause = max(0.0, 1e9 / per_second - trace["total_ns_per_target"])
        against = against_floors(trace["terms_ns_per_target"], floor, pause=pause)
        for entry in against["terms"].values():
            entry["measured_us_per_update"] = (
                entry["measured_ns_per_target"] * contender.targets / 1e3
            )
        facts["against_floor"] = against
    return facts

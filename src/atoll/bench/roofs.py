"""What this machine can do at most, measured, and how near each term of an update comes to it.

The roof of products is a large square one in the type that the products of the update use, that
of memory a large copy, each byte counted when it is read and when it is written. The floor of a
kernel is the longer of its two times at these roofs; floors add up, since one kernel runs after
another. The share of the roof is floor over measured time.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from atoll.bench.kernels import TERMS
from atoll.bench.timing import SYSTEM, Stopwatch
from atoll.model.cost import Part
from atoll.train.device import wait_for

GEMM_SIZE = 8192
"""Rows and columns of the square product on a GPU."""

CPU_GEMM_SIZES = {8: 1024, 1 << 30: 4096}
"""The same on a CPU of up to that many threads: the smallest that reached the rate of larger ones
on one thread, and one large enough for many."""

COPY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 28}
"""Bytes that are copied; far more than any cache holds."""

SAMPLES = 8
BATCH = {"cuda": 10, "cpu": 1}
"""Calls in one sample: a GPU needs several, so that the launch of the first does not count."""


@dataclass(frozen=True, slots=True)
class Roofs:
    """Rates that were reached, the best sample of each.

    Attributes:
        flops_per_second: Of the square product.
        bytes_per_second: Of the copy, read and write.
        facts: Sizes, type and every sample; JSON values.
    """

    flops_per_second: float
    bytes_per_second: float
    facts: dict[str, Any]


def measure_roofs(
    device: torch.device,
    dtype: torch.dtype,
    *,
    gemm_size: int | None = None,
    copy_bytes: int | None = None,
    stopwatch: Stopwatch = SYSTEM,
) -> Roofs:
    """Measure both roofs.

    Args:
        device: Where; a CPU uses the threads that torch has now.
        dtype: Of the product.
        gemm_size: Rows and columns. Default: GEMM_SIZE, on a CPU CPU_GEMM_SIZES.
        copy_bytes: Bytes of one buffer. Default: COPY_BYTES.
        stopwatch: How samples are timed.
    """
    size = gemm_size or _gemm_size(device)
    copied = copy_bytes or COPY_BYTES.get(device.type, COPY_BYTES["cpu"])
    calls = BATCH.get(device.type, BATCH["cpu"])
    gemm_seconds = _time(_product(size, dtype, device), calls, device, stopwatch=stopwatch)
    copy_seconds = _time(_copy(copied // 4, device), calls, device, stopwatch=stopwatch)
    flops, moved = 2.0 * size**3, 2.0 * 4 * (copied // 4)
    return Roofs(
        flops / min(gemm_seconds),
        moved / min(copy_seconds),
        {
            "gemm_shape": [size, size, size],
            "gemm_dtype": str(dtype).removeprefix("torch."),
            "flops_per_second": flops / min(gemm_seconds),
            "median_flops_per_second": flops / median(gemm_seconds),
            "copied_bytes": copied // 4 * 4,
            "bytes_per_second": moved / min(copy_seconds),
            "median_bytes_per_second": moved / median(copy_seconds),
            "calls_per_sample": calls,
            "gemm_seconds": gemm_seconds,
            "copy_seconds": copy_seconds,
        },
    )


def floors(parts: Sequence[Part], roofs: Roofs) -> dict[str, Any]:
    """Return the floor of each term in nanoseconds for each target, with what it comes from."""
    terms = {}
    for term in TERMS:
        own = [part for part in parts if part.term == term]
        terms[term] = {
            "flops_per_target": sum(part.flops for part in own),
            "bytes_per_target": sum(part.moved_bytes for part in own),
            "floor_ns_per_target": sum(_floor(part, roofs) for part in own),
        }
    total = sum(_floor(part, roofs) for part in parts)
    kept = sum(_floor(part, roofs) for part in parts if not part.absorbable)
    return {
        "terms": terms,
        "total_ns_per_target": total,
        "targets_per_second": 1e9 / total,
        "absorbed_ns_per_target": kept,
        "absorbed_targets_per_second": 1e9 / kept,
        "parts": [
            {
                "term": part.term,
                "name": part.name,
                "flops_per_target": part.flops,
                "bytes_per_target": part.moved_bytes,
                "floor_ns_per_target": _floor(part, roofs),
                "absorbable": part.absorbable,
            }
            for part in parts
        ],
    }


def against_floors(
    measured: Mapping[str, float], found: Mapping[str, Any], *, pause: float
) -> dict[str, Any]:
    """Return share of the roof and what remains to the floor, by term, the largest gap named.

    Args:
        measured: Nanoseconds for each target by term.
        found: What `floors` returned.
        pause: Nanoseconds for each target in which nothing ran; its floor is 0.
    """
    total = sum(measured.values())
    terms = {}
    for term, spent in measured.items():
        floor = found["terms"][term]["floor_ns_per_target"]
        terms[term] = {
            "measured_ns_per_target": spent,
            "share_of_time": spent / total if total else None,
            **found["terms"][term],
            "share_of_roof": floor / spent if spent and floor else None,
            "remaining_ns_per_target": spent - floor,
        }
    remaining = {term: entry["remaining_ns_per_target"] for term, entry in terms.items()}
    remaining["pauses"] = pause
    largest = max(remaining, key=lambda term: remaining[term])
    return {
        "terms": terms,
        "remaining_ns_per_target": sum(remaining.values()),
        "remaining_by_term_ns_per_target": remaining,
        "largest_remaining": {"term": largest, "ns_per_target": remaining[largest]},
    }


def _gemm_size(device: torch.device) -> int:
    if device.type == "cuda":
        return GEMM_SIZE
    threads = torch.get_num_threads()
    return next(size for limit, size in CPU_GEMM_SIZES.items() if threads <= limit)


def _product(size: int, dtype: torch.dtype, device: torch.device) -> Callable[[], object]:
    generator = torch.Generator().manual_seed(0)
    # Random numbers: a product of zeros draws less power and runs faster than a real one.
    left, right = (torch.randn(size, size, generator=generator).to(device, dtype) for _ in range(2))
    result = torch.empty_like(left)
    return lambda: torch.mm(left, right, out=result)


def _copy(elements: int, device: torch.device) -> Callable[[], object]:
    source = torch.ones(elements, device=device)
    target = torch.zeros_like(source)
    return lambda: target.copy_(source)


def _floor(part: Part, roofs: Roofs) -> float:
    return 1e9 * max(part.flops / roofs.flops_per_second, part.moved_bytes / roofs.bytes_per_second)


def _time(
    work: Callable[[], object], calls: int, device: torch.device, *, stopwatch: Stopwatch
) -> list[float]:
    """Return seconds of one call in each sample, after two samples that do not count."""
    seconds = []
    for _ in range(SAMPLES + 2):
        wait_for(device)
        started = stopwatch.clock()
        for _ in range(calls):
            work()
        wait_for(device)
        seconds.append((stopwatch.clock() - started) / calls)
    return seconds[2:]

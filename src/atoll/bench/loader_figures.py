"""Every figure of a loader trial from its raw samples: pure, so that anybody can compute it again.

A raw trial holds `samples` (seconds of every call of each stage, in order), `calls_after_update`
(how many calls each stage had made when each update ended), `windows`, `activations` and `reads`.
"""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from atoll.errors import AtollError

STAGES = ("batch", "pin", "copy_enqueue", "copy_gpu", "gather")
"""What a trial may have timed; one that the placement does not have is null."""

EXPOSED_SHARE = 0.02
"""Share of the window from which a stage is called exposed: the smallest slowdown that comparisons
here are asked to see."""

DEFINITIONS = {
    "percentiles": "linear between closest ranks: rank (n - 1) q, counted from 0",
    "total": "the exact sum, rounded once",
    "excluded": "distributions, tokens_per_second and exposure hold the updates after "
    "excluded_initial_steps only; reads, activations and training_targets hold all",
    "batch_seconds": "one observation an update: wall seconds of the step thread in all calls of "
    "batch that it made, from the request to the enqueued copy or gather, waits for groups in it",
    "pin_seconds": "one observation a call, allocation and copy into pinned memory",
    "copy_enqueue_seconds": "one observation a call",
    "copy_gpu_seconds": "GPU seconds of every copy_sample_interval-th copy, by events",
    "gather_seconds": "wall seconds to enqueue one gather, one observation for each group that a "
    "batch takes rows from",
    "tokens_per_second": "targets over the duration of the windows",
    "exposure": "seconds that the device had no work because of the loader. Without a GPU they are "
    "the step thread's own; on one, those between two events around every batch on the stream that "
    "trains, the batch's own copy or gather in them. In an update that changed groups, up to the "
    "seconds of the activation are group_wait (prefetched) or group_read (in the foreground); all "
    f"else is batch_assembly. Exposed is the largest, from {EXPOSED_SHARE:.0%} of the windows on",
    "started_seconds": "since the start of training, as are update_end_seconds",
    "storage_bytes": "bytes of a read that were not in memory; 0: warm; null: not counted here",
}


def figures(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return everything derived of a raw trial; equal samples give equal digits.

    Raises:
        AtollError: No window begins after the excluded updates, or one has no end.
    """
    windows = _measured_windows(raw)
    seconds = math.fsum(window["seconds"] for window in windows)
    targets = sum(window["targets"] for window in windows)
    rate = targets / seconds
    return {
        "tokens_per_second": rate,
        "training_targets": sum(window["targets"] for window in raw["windows"]),
        "last_training_window_loss": raw["windows"][-1]["loss_nats_per_token"],
        **{f"{stage}_seconds": _stage_figures(raw, stage) for stage in STAGES},
        "exposure": _exposure(raw, window_seconds=seconds, targets=targets),
    }


def distribution(samples: Sequence[float]) -> dict[str, Any]:
    """Return count, total, mean, median, p95, p99 and maximum; of no samples the first two."""
    if not samples:
        return {"count": 0, "total": 0}
    total = math.fsum(samples)
    return {
        "count": len(samples),
        "total": total,
        "mean": total / len(samples),
        "median": median(samples),
        "p95": percentile(samples, 0.95),
        "p99": percentile(samples, 0.99),
        "maximum": max(samples),
    }


def percentile(samples: Sequence[float], q: float) -> float:
    """Return the value at rank (n - 1) q of the sorted samples, linear between two of them."""
    ordered = sorted(samples)
    whole, rest = divmod((len(ordered) - 1) * q, 1)
    low = ordered[int(whole)]
    return low if rest == 0 else low + (ordered[int(whole) + 1] - low) * rest


def comparison(baseline: Mapping[str, Any], candidate: Mapping[str, Any]) -> dict[str, float]:
    """Return what a candidate's trial changed, from the figures of both."""
    before, after = baseline["batch_seconds"], candidate["batch_seconds"]
    return {
        "baseline_batch_mean_ms": before["mean"] * 1000,
        "candidate_batch_mean_ms": after["mean"] * 1000,
        "batch_mean_reduction_fraction": 1 - after["mean"] / before["mean"],
        "baseline_batch_p99_ms": before["p99"] * 1000,
        "candidate_batch_p99_ms": after["p99"] * 1000,
        "throughput_change_fraction": (
            candidate["tokens_per_second"] / baseline["tokens_per_second"] - 1
        ),
    }


def summary(record: Mapping[str, Any]) -> str:
    """Return a trial's main figures in a few lines for people."""
    lines = [f"{record['tokens_per_second']:,.0f} targets/s"]
    for stage in STAGES:
        found = record[f"{stage}_seconds"]
        if found is not None and found["count"]:
            milliseconds = (1000 * found[name] for name in ("mean", "p99", "maximum"))
            mean, p99, most = (f"{value:.4f}" for value in milliseconds)
            lines.append(f"{stage}: mean {mean} ms, p99 {p99} ms, maximum {most} ms")
    found = record["exposure"]
    if found["stage"] == "none":
        lines.append(f"exposed: none (below {found['threshold_share']:.0%})")
    else:
        lines.append(
            f"exposed: {found['stage']}, {found['seconds_lost']:.3f} s lost of "
            f"{found['window_seconds']:.3f} s, worth {found['worth_tokens_per_second']:,.0f} "
            "targets/s"
        )
    return "\n".join(lines)


def update_of_call(raw: Mapping[str, Any], call: int) -> int:
    """Return the update, from 1, that made a call of `batch`, counted from 1."""
    return bisect_left(raw["calls_after_update"]["batch"], call) + 1


def _measured_windows(raw: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    first, last = raw["excluded_initial_steps"], raw["steps"]
    ends = [0, *(window["step"] for window in raw["windows"])]
    if first not in ends[:-1] or ends[-1] != last:
        raise AtollError(
            f"the windows of the trial end after updates {ends[1:]}; one must end after the "
            f"{first} excluded updates, and the last one after update {last}."
        )
    return [window for window in raw["windows"] if window["step"] > first]


def _stage_figures(raw: Mapping[str, Any], stage: str) -> dict[str, Any] | None:
    samples = raw["samples"].get(stage)
    if samples is None:
        return None
    if stage == "batch":
        return distribution(_by_update(raw, "batch"))
    low, high = _measured_calls(raw, "copy_enqueue" if stage == "copy_gpu" else stage)
    if stage == "copy_gpu":
        interval = raw["copy_sample_interval"]
        low, high = -(-low // interval), -(-high // interval)
    return distribution(samples[low:high])


def _measured_calls(raw: Mapping[str, Any], stage: str) -> tuple[int, int]:
    """Return the numbers, from 0, of the first measured call and of the one after the last."""
    counts = [0, *raw["calls_after_update"][stage]]
    return counts[raw["excluded_initial_steps"]], counts[raw["steps"]]


def _by_update(raw: Mapping[str, Any], name: str) -> list[float]:
    """Return the summed samples of each measured update, one sample for each call of `batch`."""
    counts = [0, *raw["calls_after_update"]["batch"]]
    samples = raw["samples"][name]
    return [
        math.fsum(samples[counts[update - 1] : counts[update]])
        for update in range(raw["excluded_initial_steps"] + 1, raw["steps"] + 1)
    ]


def _exposure(raw: Mapping[str, Any], *, window_seconds: float, targets: int) -> dict[str, Any]:
    on_gpu = raw["samples"].get("device_gap") is not None
    parts = _lost_parts(raw, _by_update(raw, "device_gap" if on_gpu else "batch"))
    lost = {stage: math.fsum(seconds) for stage, seconds in parts.items()}
    total = math.fsum(second for seconds in parts.values() for second in seconds)
    largest = max(lost, key=lambda stage: lost[stage])
    exposed = lost[largest] >= EXPOSED_SHARE * window_seconds
    rate, updates = targets / window_seconds, raw["steps"] - raw["excluded_initial_steps"]
    return {
        "basis": "events on the GPU" if on_gpu else "the step thread",
        "threshold_share": EXPOSED_SHARE,
        "stage": largest if exposed else "none",
        "seconds_lost": lost[largest] if exposed else 0.0,
        "share_of_window": lost[largest] / window_seconds if exposed else 0.0,
        # What training would gain if the stage took no time: the most that a saving can be worth.
        "worth_tokens_per_second": (
            targets / (window_seconds - lost[largest]) - rate if exposed else 0.0
        ),
        "window_seconds": window_seconds,
        "seconds_by_stage": lost,
        "seconds_by_stage_per_update": {name: value / updates for name, value in lost.items()},
        "seconds_of_all_stages": total,
    }


def _lost_parts(raw: Mapping[str, Any], lost: Sequence[float]) -> dict[str, list[float]]:
    """Share the lost seconds of each measured update between the stages."""
    parts: dict[str, list[float]] = {"group_wait": [], "group_read": [], "batch_assembly": []}
    left = dict(enumerate(lost, start=raw["excluded_initial_steps"] + 1))
    for activation in raw["activations"]:
        update = update_of_call(raw, activation["batch"])
        if update in left:
            part = min(left[update], activation["seconds"])
            parts["group_wait" if activation["prefetched"] else "group_read"].append(part)
            left[update] -= part
    parts["batch_assembly"] = list(left.values())
    return parts

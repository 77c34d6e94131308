"""Throughput with `runtime.deterministic` off and on, side by side, and the price.

Determinism has to be chosen before CUDA starts, so that each condition is a process of its own, in
the order off, on, on, off. Two pairs make no interval: both prices are given.
"""

import json
import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from statistics import fmean, median
from typing import Any

from atoll.bench.machine import machine, now, versions
from atoll.errors import AtollError

FORMAT_VERSION = 1

ORDER = ("off", "on", "on", "off")

RunOne = Callable[[Sequence[str]], dict[str, Any]]


def both_ways(
    arguments: Sequence[str],
    *,
    trace: bool,
    command: Sequence[str],
    note: Callable[[str], object],
    run_one: RunOne | None = None,
) -> dict[str, Any]:
    """Measure in four processes and return one JSON document that holds theirs.

    Args:
        arguments: Of `atoll bench throughput`, without --deterministic, --trace and --output.
        trace: Whether the first process of each condition measures terms.
        command: The command line that asked for it.
        note: Takes lines for people.
        run_one: Runs one command line and returns its document. Default: a process.

    Raises:
        AtollError: One of them failed.
    """
    started = now()
    documents: list[dict[str, Any]] = []
    for place, condition in enumerate(ORDER):
        traced = trace and condition not in ORDER[:place]
        note(f"deterministic {condition}, process {place + 1} of {len(ORDER)}")
        words = [*arguments, "--deterministic", condition, "--trace" if traced else "--no-trace"]
        documents.append((run_one or _run_process)(words))
    first = documents[0]
    return {
        "format_version": FORMAT_VERSION,
        "measurement": "throughput, deterministic off and on",
        "command": list(command),
        "started": started,
        "finished": now(),
        "machine": machine(),
        "device": first["device"],
        "versions": versions(),
        "config_identity": {
            condition: documents[ORDER.index(condition)]["config_identity"]
            for condition in ("off", "on")
        },
        "order": list(ORDER),
        "price": {mode: price(documents, mode) for mode in first["modes"]},
        "runs": documents,
    }


def price(documents: Sequence[dict[str, Any]], mode: str) -> dict[str, Any]:
    """Return what determinism costs a mode, in percent of the rate without it.

    Args:
        documents: Of the four processes, in ORDER.
        mode: Which.
    """
    medians = [doc["modes"][mode]["targets_per_second"]["median"] for doc in documents]
    all_rates = {
        condition: [
            doc["modes"][mode]["targets_per_window"] / seconds
            for doc, was in zip(documents, ORDER, strict=True)
            if was == condition
            for seconds in doc["modes"][mode]["seconds"]
        ]
        for condition in ("off", "on")
    }
    pairs = [math.log(medians[1] / medians[0]), math.log(medians[2] / medians[3])]
    return {
        "targets_per_second": {
            condition: {"median": median(found), "min": min(found), "max": max(found)}
            for condition, found in all_rates.items()
        },
        "percent": 100 * (1 - math.exp(fmean(pairs))),
        "percent_by_pair": [100 * (1 - math.exp(pair)) for pair in pairs],
        "interval": None,
        "why_no_interval": "two pairs of processes make no interval",
    }


def _run_process(words: Sequence[str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "atoll", "bench", "throughput", *words]
    # Its remarks go where ours go, so that a person sees them at once.
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0 or not lines:
        raise AtollError(
            f"a process of the measurement ended with exit code {done.returncode}: "
            f"{' '.join(command)}",
            hint="its own message is above",
        )
    return json.loads(lines[-1])

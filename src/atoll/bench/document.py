"""The record of a whole comparison: where, with what, in which order, every sample, verdicts."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from atoll.bench.compare import VOID_RULE
from atoll.bench.contest import VERDICT_RULE, Contest, hold_contest
from atoll.bench.machine import machine, now, versions
from atoll.bench.timing import SYSTEM, Stopwatch

FORMAT_VERSION = 1

SAMPLE_FIELDS = ["block", "position", "condition", "seconds"]


def compare(
    contests: Iterable[Contest],
    *,
    name: str,
    parameters: dict[str, Any],
    command: Sequence[str],
    seed: int,
    num_blocks: int,
    stopwatch: Stopwatch = SYSTEM,
    note: Callable[[str], object] = lambda line: None,
) -> dict[str, Any]:
    """Hold every contest, one after the other, and return one JSON document.

    Args:
        contests: Built one at a time, so that only one occupies memory.
        name: Name of the scenario.
        parameters: Its settings.
        command: The command line that asked for it.
        seed: Decides every order; 0 <= seed.
        num_blocks: Blocks of A against B in each contest; at least 2.
        stopwatch: How windows are timed.
        note: Takes lines for people.
    """
    started = now()
    before = machine()
    held = [
        hold_contest(contest, seed=seed, num_blocks=num_blocks, stopwatch=stopwatch, note=note)
        for contest in contests
    ]
    verdicts = [record["verdict"] for record in held]
    return {
        "format_version": FORMAT_VERSION,
        "scenario": name,
        "parameters": parameters,
        "command": list(command),
        "started": started,
        "finished": now(),
        "machine": before,
        "load_average_1_minute_at_end": machine()["load_average_1_minute"],
        "versions": versions(),
        "order_seed": seed,
        "num_blocks": num_blocks,
        "void_rule": VOID_RULE,
        "verdict_rule": VERDICT_RULE,
        "sample_fields": SAMPLE_FIELDS,
        "comparisons": held,
        "verdict": overall(verdicts),
    }


def overall(verdicts: Sequence[str]) -> str:
    """Return the worst verdict: void, fail, undecided, pass, then measured."""
    for verdict in ("void", "fail", "undecided", "pass"):
        if verdict in verdicts:
            return verdict
    return "measured"

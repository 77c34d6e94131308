"""The record of a whole comparison: where, with what, in which order, every sample, verdicts."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from atoll.bench.compare import VOID_RULE
from atoll.bench.contest import VERDICT_RULE, Contest, hold_contest
from atoll.bench.machine import machine, now, versions
from atoll.bench.timing import SYSTEM, Stopwatch

FORMAT_VERSION = 2

SAMPLE_FIELDS = ["block", "position", "condition", "seconds", "first_half_seconds"]

FIGURES = {
    "ratio": "Geometric mean over sound blocks of A over B, of times or of speeds as `ratio_of` "
    "says, with Student's t interval over blocks at `level`. Windows of one block are not "
    "independent, so only blocks count. An end that is null has no bound.",
    "ratio_with_void_blocks": "The same with every block, so that leaving out can be judged.",
    "block_log_time_ratios": "For each block, mean log seconds of A minus that of B.",
    "warm_up_seconds": "One whole window of each condition that counts nowhere.",
    "checks": "Ratios of times, 1 means no effect, intervals at 99%; they change no verdict.",
    "carry_over": "A's time after B over its time after itself, divided by the same of B; from "
    "windows 1 and 2 of BAAB and ABBA blocks, free of position. What both leave behind alike "
    "cancels.",
    "carry_over_shifts_time_ratio": "The factor by which that moves the ratio of times A over B.",
    "carry_over_inside_windows": "By condition: how much more time the first half of a window "
    "takes against its second after the other condition than after its own. Null: one call.",
    "last_half_of_block_over_first": "Windows 2 and 3 over windows 0 and 1: a drift. It cancels.",
    "outer_windows_over_inner": "Windows 0 and 3 over windows 1 and 2. It cancels where ABBA and "
    "BAAB are equally many, and else moves the ratio by `outer_windows_shift_time_ratio`.",
    "sign_test_p": "Two-sided exact probability that a fair coin splits the blocks as unevenly as "
    "`blocks_with_a_slower`; needs no normal distribution.",
    "correlation_of_neighbouring_blocks": "Of block ratios; well above 0 the interval is too "
    "narrow. Null for fewer than 8 blocks.",
    "doubts": "What the checks say against the ratio, in words.",
}


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
        "figures": FIGURES,
        "comparisons": held,
        "verdict": overall(verdicts),
    }


def overall(verdicts: Sequence[str]) -> str:
    """Return the worst verdict: void, fail, too few, undecided, pass, then measured."""
    for verdict in ("void", "fail", "too few", "undecided", "pass"):
        if verdict in verdicts:
            return verdict
    return "measured"

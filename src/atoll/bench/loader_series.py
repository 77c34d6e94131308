"""Trials of two conditions in counterbalanced order, each in a process of its own.

A series lives in a folder and can be spread over several sittings: what is in its plan stays, and a
trial whose record is there is not made again.

    plan.json           recipes, order, source; written last of all that is frozen
    source/atoll/       the package as it was when the series began; every trial runs from it
    baseline.yaml, candidate.yaml
    trials/03-candidate.json
    report.json
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import atoll
from atoll.bench.loader_figures import comparison
from atoll.bench.machine import now
from atoll.bench.order import counterbalanced
from atoll.config.explain import dump_resolved
from atoll.config.schema import RunConfig
from atoll.errors import AtollError, StateMismatchError
from atoll.files import folder_lock, identity, read_json, sha256_file, write_bytes, write_json
from atoll.train.binding import DECISIVE, source_revision

FORMAT_VERSION = 1

ConditionName = Literal["baseline", "candidate"]

RAW = ("samples", "calls_after_update", "update_end_seconds")
"""Parts of a trial that stay in its own file."""

PROTOCOL = {
    "stopping": "each trial raises the signal in its own process after its last update, through "
    "the handler that a run has; it must end interrupted after exactly that update",
    "order": "the baseline twice (A/A), then blocks of four, ABBA and BAAB by the seed; A is the "
    "baseline; position_in_allocation counts all trials from 1",
    "comparisons": "neighbours of one half block; two trials make no interval",
    "environment": "every trial is a process that imports the frozen source, with empty folders "
    "for the caches of Inductor and Triton",
}

RunOne = Callable[[Sequence[str], Mapping[str, str]], object]


@dataclass(frozen=True, slots=True)
class SeriesRequest:
    """What a series is.

    Attributes:
        steps: Updates of each trial.
        exclude: First updates that figures leave out.
        num_blocks: Blocks of four trials after the two of A/A; at least 1.
        seed: Decides the order; 0 <= seed.
        read_delay_seconds: Added to every group read of both conditions.
    """

    steps: int
    exclude: int
    num_blocks: int
    seed: int
    read_delay_seconds: float = 0.0


def run_series(
    folder: Path,
    configs: Mapping[ConditionName, RunConfig],
    request: SeriesRequest,
    *,
    note: Callable[[str], object] = lambda line: None,
    run_one: RunOne | None = None,
) -> dict[str, Any]:
    """Make the trials that are missing in `folder` and return the report on all.

    Args:
        folder: Of this series alone.
        configs: The recipe of either condition.
        request: What the series is.
        note: Takes lines for people.
        run_one: Runs one command line, without the interpreter, in that environment. Default: a
            process.

    Raises:
        StateMismatchError: The folder holds another series, or its source was changed.
        AtollError: A trial failed, or it ran from other source.
    """
    with folder_lock(folder):
        plan = _planned(folder, configs, request)
        order: list[ConditionName] = plan["order"]
        for position, condition in enumerate(order, start=1):
            record = _record_file(folder, position, condition)
            if record.exists():
                continue
            note(f"trial {position} of {len(order)}: {condition}")
            words = _words(folder, position, condition, request)
            with TemporaryDirectory(prefix="caches-", dir=folder) as caches:
                (run_one or _run_process)(words, _environment(folder, Path(caches)))
            if not record.exists():
                raise AtollError(f"trial {position} ended without its record {record}.")
        trials = [
            read_json(_record_file(folder, position, condition))
            for position, condition in enumerate(order, start=1)
        ]
        _require_one_source(plan, trials)
        report = series_report(plan, trials)
        write_json(folder / "report.json", report)
    return report


def trial_order(num_blocks: int, *, seed: int) -> list[ConditionName]:
    """Return the conditions in order: the baseline twice, then counterbalanced blocks."""
    blocks = counterbalanced(seed, num_blocks, purpose="loader trials")
    letters = "AA" + "".join(blocks)
    return ["baseline" if letter == "A" else "candidate" for letter in letters]


def series_report(plan: Mapping[str, Any], trials: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the document of a series: equal plans and trials give equal digits."""
    pairs = [_pair(first, second) for first, second in list(pairwise(trials))[::2]]
    return {
        "format_version": FORMAT_VERSION,
        "measurement": "loader series",
        "date": plan["date"],
        "source_revision": plan["source_revision"],
        "source_hash": plan["source_hash"],
        "protocol": {
            **PROTOCOL,
            "definitions": trials[0]["definitions"],
            "steps_per_trial": plan["request"]["steps"],
            "excluded_initial_steps": plan["request"]["exclude"],
            "order_seed": plan["request"]["seed"],
            "read_delay_seconds": plan["request"]["read_delay_seconds"],
            "configs": plan["configs"],
        },
        "jobs": [{"job_id": None, "order": plan["order"]}],
        "a_a": pairs[0],
        "comparisons": pairs[1:],
        "trials": [
            {name: value for name, value in trial.items() if name not in RAW} for trial in trials
        ],
    }


def _pair(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Compare two neighbours; of two baselines the later one stands for the candidate."""
    swapped = first["condition"] == "candidate"
    baseline, candidate = (second, first) if swapped else (first, second)
    positions = {
        "baseline_position": baseline["position_in_allocation"],
        "candidate_position": candidate["position_in_allocation"],
    }
    return positions | comparison(baseline, candidate)


def _planned(
    folder: Path, configs: Mapping[ConditionName, RunConfig], request: SeriesRequest
) -> dict[str, Any]:
    """Return the plan that the folder holds, or freeze everything and write one."""
    file, source = folder / "plan.json", folder / "source" / "atoll"
    wanted = {
        "configs": {name: config.model_dump(mode="json") for name, config in configs.items()},
        "request": {name: getattr(request, name) for name in SeriesRequest.__slots__},
        "order": trial_order(request.num_blocks, seed=request.seed),
    }
    if file.exists():
        plan = read_json(file)
        differing = sorted(name for name in wanted if plan[name] != wanted[name])
        if differing:
            raise StateMismatchError(
                f"{folder} holds another series; its {' and '.join(differing)} differ.",
                hint="give the same command again to go on with it, or another folder",
            )
        if identity(_digests(source)) != plan["tree_hash"]:
            raise StateMismatchError(
                f"{source} is not what it was when the series began.",
                hint="begin a new series in another folder",
            )
        return plan
    shutil.rmtree(folder / "source", ignore_errors=True)
    shutil.copytree(
        Path(atoll.__file__).parent, source, ignore=shutil.ignore_patterns("__pycache__")
    )
    for name, config in configs.items():
        write_bytes(folder / f"{name}.yaml", dump_resolved(config).encode())
    digests = _digests(source)
    plan = wanted | {
        "format_version": FORMAT_VERSION,
        "date": now(),
        "source_revision": source_revision(),
        "source_hash": _source_hash(digests),
        "tree_hash": identity(digests),
    }
    write_json(file, plan)
    return plan


def _digests(source: Path) -> dict[str, str]:
    files = sorted(path for path in source.rglob("*") if path.is_file())
    return {
        path.relative_to(source).as_posix(): sha256_file(path)
        for path in files
        if "__pycache__" not in path.parts
    }


def _source_hash(digests: Mapping[str, str]) -> str:
    """Return what `source_hash` says in a process that imports these files.

    Not this process's own: files may have changed since it imported them.
    """
    return identity(
        {
            name: digest
            for name, digest in digests.items()
            if name.endswith(".py") and (name in DECISIVE or name.partition("/")[0] in DECISIVE)
        }
    )


def _record_file(folder: Path, position: int, condition: ConditionName) -> Path:
    return folder / "trials" / f"{position:02d}-{condition}.json"


def _words(
    folder: Path, position: int, condition: ConditionName, request: SeriesRequest
) -> list[str]:
    options = {
        "--config": folder / f"{condition}.yaml",
        "--steps": request.steps,
        "--exclude": request.exclude,
        "--read-delay-seconds": request.read_delay_seconds,
        "--condition": condition,
        "--position": position,
        "--output": _record_file(folder, position, condition),
    }
    words = [word for name, value in options.items() for word in (name, str(value))]
    # -P: a folder called atoll where the command is given must not come before the frozen one.
    return ["-P", "-m", "atoll", "bench", "loader", *words]


def _environment(folder: Path, caches: Path) -> dict[str, str]:
    return {
        "PYTHONPATH": str((folder / "source").resolve()),
        "PYTHONDONTWRITEBYTECODE": "1",
        "TORCHINDUCTOR_CACHE_DIR": str((caches / "inductor").resolve()),
        "TRITON_CACHE_DIR": str((caches / "triton").resolve()),
    }


def _run_process(words: Sequence[str], environment: Mapping[str, str]) -> None:
    command = [sys.executable, *words]
    # Its remarks go where ours go; its document is in its file.
    done = subprocess.run(command, stdout=subprocess.DEVNULL, env=os.environ | environment)
    if done.returncode != 0:
        raise AtollError(
            f"a trial ended with exit code {done.returncode}: {' '.join(command)}",
            hint="its own message is above; the same command goes on with this trial",
        )


def _require_one_source(plan: Mapping[str, Any], trials: Sequence[Mapping[str, Any]]) -> None:
    for trial in trials:
        if trial["source_hash"] != plan["source_hash"]:
            raise AtollError(
                f"trial {trial['position_in_allocation']} ran from other source than was frozen: "
                f"{trial['source_hash']}, expected {plan['source_hash']}."
            )

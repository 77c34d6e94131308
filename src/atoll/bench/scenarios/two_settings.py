"""One recipe under two settings: updates of both, in turn, in one process.

Both sides are built as a run builds them, see equal rows in equal order and make the same number
of updates in each window, so that equal work is compared whatever it costs either.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from atoll.bench.contest import Contest, Target, num_aa_blocks
from atoll.bench.guards import memory_named, no_silent_fallback
from atoll.bench.throughput_data import Data, open_rows
from atoll.bench.throughput_modes import Contender, build_contender, default_mode
from atoll.bench.throughput_windows import warm_up_updates
from atoll.bench.timing import Condition
from atoll.checkpoint.compare import flatten
from atoll.config.load import load_config
from atoll.config.schema import RunConfig
from atoll.data.batch import Loader
from atoll.errors import UsageError
from atoll.strategy.build import check_strategy
from atoll.train.device import may_compile, resolve_device, resolve_execution
from atoll.train.exact import torch_switches

OWN_PROCESS = ("runtime.deterministic", "runtime.cpu_threads")
"""Settings that hold for a whole process, so that two of them cannot take turns in one."""

SAME_WORK = ("training.batch_tokens", "model.context_length", "model.vocab_size")
"""Settings without which a window of both is not the same rows."""

NO_PART = (
    "evaluation.",
    "runtime.output_dir",
    "runtime.trackers",
    "training.checkpoint_",
    "training.log_every",
    "training.sample_",
    "data.prepare_workers",
)
"""Beginnings of settings that an update has nothing to do with."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Two recipes to compare and how.

    Attributes:
        files: Recipe files of both.
        common: `key=value` of both.
        a: `key=value` of A, over `common`.
        b: `key=value` of B, over `common`.
        data: Random rows on the device, or the recipe's token cache.
        updates: In one window.
        at_least: Speed of A over B that is asked for, or None to measure only.
    """

    files: Sequence[Path]
    common: Sequence[str]
    a: Sequence[str]
    b: Sequence[str]
    data: Data = "synthetic"
    updates: int = 20
    at_least: float | None = None


@dataclass(slots=True)
class Side:
    """One of the two, and its loss after each window.

    Attributes:
        contender: What makes the updates.
        updates: In one window.
        losses: Updates made -> mean loss of the last one over all models, in nats per target.
    """

    contender: Contender
    updates: int
    losses: dict[int, float] = field(default_factory=dict)

    @property
    def step(self) -> int:
        """Updates made."""
        return self.contender.states[0].step

    def run(self) -> None:
        """Make the updates of one window."""
        self.contender.run(self.updates)
        self.losses[self.step] = self.contender.loss


def setting_contests(pair: Pair, *, num_blocks: int, seed: int) -> Iterator[Contest]:
    """Yield the contest; both sides are freed afterwards.

    Args:
        pair: What to compare.
        num_blocks: Blocks of A against B, which decide how many rows are needed.
        seed: Of random rows.

    Raises:
        UserError: The two cannot be compared so; says what to do instead.
    """
    a, b = load_pair(pair)
    runtime = a.runtime
    devices = [resolve_device(config.runtime.device) for config in (a, b)]
    compiled = any(may_compile(c.runtime, d) for c, d in zip((a, b), devices, strict=True))
    with (
        torch_switches(
            deterministic=runtime.deterministic,
            cpu_threads=runtime.cpu_threads,
            compiled=compiled,
        ),
        no_silent_fallback(compiled=compiled),
        ExitStack() as stack,
    ):
        needed = _most_updates(pair.updates, num_blocks)
        loaders = [
            open_rows(config, pair.data, device, num_updates=needed, seed=seed)
            for config, device in zip((a, b), devices, strict=True)
        ]
        for loader in loaders:
            stack.enter_context(closing(loader))
        check_rows(*loaders, different=differences(a, b))
        sides = [
            _side(config, loader, device, pair.updates)
            for config, loader, device in zip((a, b), loaders, devices, strict=True)
        ]
        yield _contest(pair, (a, b), sides)


def load_pair(pair: Pair) -> tuple[RunConfig, RunConfig]:
    """Return both recipes.

    Raises:
        ConfigError: One of them is wrong.
        UsageError: They do not differ, or in what cannot or need not be compared so.
    """
    a = load_config(pair.files, [*pair.common, *pair.a]).config
    b = load_config(pair.files, [*pair.common, *pair.b]).config
    for config in (a, b):
        check_strategy(config.strategy)
    different = differences(a, b)
    if not different:
        raise UsageError(
            "A and B are the same recipe.",
            hint="give --a-set KEY=VALUE or --b-set KEY=VALUE a setting that differs",
        )
    for key in different:
        if key in OWN_PROCESS:
            raise UsageError(
                f"{key} differs between A and B, and holds for a whole process.",
                hint="compare two commands, start included: --a 'atoll train ...' --b '...', each "
                f"with its own --set {key}=VALUE; the price of determinism alone is measured by "
                "atoll bench throughput --deterministic both",
            )
        if key in SAME_WORK:
            raise UsageError(
                f"{key} is {different[key][0]} in A and {different[key][1]} in B: a window of both "
                "would not be the same rows.",
                hint="give both the same, or measure each with atoll bench throughput",
            )
    idle = [key for key in different if _no_part(key, pair.data)]
    if len(idle) == len(different):
        raise UsageError(
            f"A and B differ only in {', '.join(idle)}, which has no part in an update on "
            f"{pair.data} rows.",
            hint="settings of data need --data cache; for all else compare two commands, --a and "
            "--b with atoll train",
        )
    return a, b


def differences(a: RunConfig, b: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Return each setting that differs by its dotted name, with A's and B's value."""
    ours, theirs = flatten(a.model_dump(mode="json")), flatten(b.model_dump(mode="json"))
    keys = sorted(ours.keys() | theirs.keys())
    pairs = {key: (ours.get(key), theirs.get(key)) for key in keys}
    return {key: values for key, values in pairs.items() if values[0] != values[1]}


def _no_part(key: str, data: Data) -> bool:
    return key.startswith(NO_PART) or (data == "synthetic" and key.startswith("data."))


def _most_updates(updates: int, num_blocks: int) -> int:
    """Return the updates that A makes: to warm up, in two windows that size, in A/A and in A/B."""
    windows = 2 + 1 + 4 * num_aa_blocks(num_blocks) + 2 * num_blocks
    return warm_up_updates(updates) + windows * updates


def check_rows(a: Loader, b: Loader, *, different: Iterable[str]) -> None:
    """Refuse two loaders that give other rows.

    Raises:
        UsageError: Names the settings of data that differ.
    """
    if a.identity != b.identity:
        keys = ", ".join(key for key in different if key.startswith(("data.", "model.")))
        raise UsageError(
            f"A and B would not see the same rows: {keys} differs.",
            hint="compare how rows are read (data.placement, data.prefetch), not which; for that "
            "train twice and compare the runs",
        )


def _side(config: RunConfig, loader: Loader, device: torch.device, updates: int) -> Side:
    """Build one side and warm it up: what compiles and what is recorded happens here."""
    execution = resolve_execution(config.runtime, device)
    with memory_named(config, device):
        contender = build_contender(config, default_mode(config), loader, device, execution)
        contender.run(warm_up_updates(updates))
    return Side(contender, updates)


def _contest(pair: Pair, configs: tuple[RunConfig, RunConfig], sides: Sequence[Side]) -> Contest:
    a, b = sides
    different = differences(*configs)

    def meet() -> None:
        # Otherwise A would always read rows, and files, that B finds read already. The window that
        # B warms up in comes after this.
        while b.step + b.updates < a.step:
            b.run()

    return Contest(
        name="two settings",
        a=Condition(_name(different, 0), _work(configs[0], a)),
        b=Condition(_name(different, 1), _work(configs[1], b)),
        target=None if pair.at_least is None else Target("speed", pair.at_least),
        facts={
            "differences": {key: list(values) for key, values in different.items()},
            "data": pair.data,
            "updates_per_window": pair.updates,
            "targets_per_window": a.contender.targets * pair.updates,
            "a": _facts(configs[0], a),
            "b": _facts(configs[1], b),
        },
        meet=meet,
        outcome=lambda: compare_losses(a.losses, b.losses),
    )


def compare_losses(ours: dict[int, float], theirs: dict[int, float]) -> dict[str, Any]:
    """Return the losses of both by updates made, and how far apart they came.

    Args:
        ours: Updates made -> loss of A in nats per target.
        theirs: The same of B.
    """
    common = sorted(ours.keys() & theirs.keys())
    gaps = [abs(ours[step] - theirs[step]) / abs(theirs[step]) for step in common]
    return {
        "loss_nats_per_target": [[step, ours[step], theirs[step]] for step in common],
        "loss_fields": ["updates_made", "a", "b"],
        "largest_relative_difference_of_loss": max(gaps) if gaps else None,
    }


def _name(different: dict[str, tuple[Any, Any]], place: int) -> str:
    return ", ".join(f"{key}={values[place]}" for key, values in different.items())


def _work(config: RunConfig, side: Side) -> Callable[[], None]:
    def work() -> None:
        with memory_named(config, side.contender.device):
            side.run()

    return work


def _facts(config: RunConfig, side: Side) -> dict[str, Any]:
    contender = side.contender
    execution = contender.execution
    return {
        "device": str(contender.device),
        "mode": contender.mode,
        "local_models": contender.num_models,
        "amp": None if execution.amp is None else str(execution.amp).removeprefix("torch."),
        "kernels": execution.kernels,
        "compiled": execution.compiled,
        "captured": execution.captured,
        "threads": torch.get_num_threads(),
        "config": config.model_dump(mode="json"),
    }

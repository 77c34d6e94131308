"""What a resumed run may change, and the identity of what it may not."""

from typing import Any

from atoll.checkpoint.compare import describe_differences, flatten
from atoll.config.budget import plan_budget
from atoll.config.schema import RunConfig
from atoll.errors import StateMismatchError
from atoll.files import identity
from atoll.optim.schedule import same_rates
from atoll.strategy.consensus import first_other_weight

FREE = frozenset(
    {
        "data.cache_dir",
        "data.cache_path",
        "data.placement",
        "data.prefetch",
        "data.prepare_workers",
        "runtime.cpu_threads",
        "runtime.device",
        "runtime.output_dir",
        "runtime.trackers",
        "training.checkpoint_epochs",
        "training.checkpoint_keep",
        "training.checkpoint_policy",
        "training.log_every",
        "training.sample_prompt",
        "training.sample_tokens",
    }
)
"""Settings that decide no weight: where it runs, what is written, when it is kept."""

BUDGET = "training.tokens_per_parameters"
PASSES = "data.passes"


def config_identity(config: RunConfig) -> str:
    """Return the SHA-256 of all settings that decide weights; equal for a resumed run."""
    return identity({key: value for key, value in _settings(config).items() if key not in FREE})


def check_changes(was: RunConfig, now: RunConfig, *, step: int) -> None:
    """Refuse a resumed recipe that would train otherwise than the one it goes on from.

    A longer budget is allowed where the schedule gives every update made so far the rate it had,
    and adaptive consensus the share; more passes are, since they add rows behind those that exist.

    Args:
        was: The recipe of the checkpoint.
        now: The recipe to go on with.
        step: Updates made.

    Raises:
        StateMismatchError: Lists every setting that may not change, as `key: was -> is`.
    """
    before, after = _settings(was), _settings(now)
    lines = []
    for line in describe_differences(before, after):
        key = line.partition(":")[0]
        if key in FREE or (key == PASSES and after[key] > before[key]):
            continue
        reason = _budget_problem(was, now, step) if key == BUDGET else ""
        if reason is not None:
            lines.append(line + reason)
    if lines:
        raise StateMismatchError(
            "the recipe differs from that of the run to go on with:\n" + "\n".join(lines),
            hint="go on with the run's own recipe (--resume alone takes it), or start another run "
            "in another runtime.output_dir",
        )


def _budget_problem(was: RunConfig, now: RunConfig, step: int) -> str | None:
    """Return why the budget may not change so, None where it may."""
    old, new = plan_budget(was).total_steps, plan_budget(now).total_steps
    if new < old:
        return f" (a shorter budget: {old} -> {new} updates)"
    first = same_rates(
        step, old_total=old, new_total=new, optimizer=now.optimizer, schedule=now.lr_schedule
    )
    if first is not None:
        cause = f"{now.lr_schedule.name} gives update {first} another rate"
    else:
        first = first_other_weight(
            step,
            old_total=old,
            new_total=new,
            strategy=now.strategy,
            optimizer=now.optimizer,
            schedule=now.lr_schedule,
        )
        if first is None:
            return None
        cause = f"strategy.consensus_start_fraction gives update {first} another share of mixing"
    return f" ({cause} when the run has {new} updates and not {old}, and {step} were made)"


def _settings(config: RunConfig) -> dict[str, Any]:
    return flatten(config.model_dump(mode="json"))

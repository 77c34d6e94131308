"""The learning rate of an update, as a pure function of its number."""

import math

from atoll.config.optimizer import LrScheduleConfig, OptimizerConfig


def learning_rate(
    step: int, *, total_steps: int, optimizer: OptimizerConfig, schedule: LrScheduleConfig
) -> float:
    """Return the rate of update `step`.

    Update s of warm-up uses lr * s / warmup_steps. `cosine` then falls so that the last update
    uses lr * min_lr_ratio. `wsd` holds lr, then uses lr * (1 - sqrt(q)), where q is the share of
    the decay that lies behind the update: 0 for the first of it and never 1, so that no update
    has rate zero.

    Args:
        step: Number of the update; 1 <= step <= total_steps.
        total_steps: Updates of the whole run.
        optimizer: Peak rate.
        schedule: Shape and warm-up.

    Source: Hägele et al., Scaling Laws and Compute-Optimal Training Beyond Fixed Training
    Durations, section 3.2 (1 - sqrt).
    """
    assert 1 <= step <= total_steps, (step, total_steps)
    peak, warmup = optimizer.lr, schedule.warmup_steps
    if step <= warmup:
        return peak * (step / warmup)
    match schedule.name:
        case "cosine":
            progress = (step - warmup) / (total_steps - warmup)
            floor = schedule.min_lr_ratio
            return peak * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))
        case "wsd":
            decay_steps = max(1, round(schedule.decay_fraction * total_steps))
            behind = step - 1 - (total_steps - decay_steps)
            return peak * (1 - math.sqrt(max(0, behind) / decay_steps))


def same_rates(
    steps: int,
    *,
    old_total: int,
    new_total: int,
    optimizer: OptimizerConfig,
    schedule: LrScheduleConfig,
) -> int | None:
    """Return the first of updates 1 ... `steps` whose rate another total changes, or None."""
    for step in range(1, steps + 1):
        rates = [
            learning_rate(step, total_steps=total, optimizer=optimizer, schedule=schedule)
            for total in (old_total, new_total)
        ]
        if rates[0] != rates[1]:
            return step
    return None

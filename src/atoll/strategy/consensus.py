"""How much of an exchange is applied (gamma), as a pure function of the update's number."""

from atoll.config.budget import as_written
from atoll.config.optimizer import LrScheduleConfig, OptimizerConfig
from atoll.config.strategy import StrategyConfig
from atoll.optim.schedule import learning_rate


def mixing_weight(
    step: int,
    *,
    strategy: StrategyConfig,
    total_steps: int,
    optimizer: OptimizerConfig,
    schedule: LrScheduleConfig,
) -> float:
    """Return gamma in gamma * W + (1 - gamma) * I, where W is the topology's matrix.

    With `strategy.consensus_power` p it is (rate / peak rate)^p from the first update after
    `strategy.consensus_start_fraction` of all updates on: the smaller the steps of the local
    models, the less they need to be pulled together. Before, and without p, it is 1.

    Args:
        step: Number of the update; 0 before the first.
        strategy: The power and where it begins.
        total_steps: Updates of the whole run.
        optimizer: Peak rate.
        schedule: How the rate changes.
    """
    power, start = strategy.consensus_power, as_written(strategy.consensus_start_fraction)
    if power is None or step <= start * total_steps:
        return 1.0
    rate = learning_rate(step, total_steps=total_steps, optimizer=optimizer, schedule=schedule)
    return (rate / optimizer.lr) ** power


def first_other_weight(
    steps: int,
    *,
    old_total: int,
    new_total: int,
    strategy: StrategyConfig,
    optimizer: OptimizerConfig,
    schedule: LrScheduleConfig,
) -> int | None:
    """Return the first of updates 1 ... `steps` whose weight another total changes, or None."""
    for step in range(1, steps + 1):
        weights = [
            mixing_weight(
                step,
                strategy=strategy,
                total_steps=total,
                optimizer=optimizer,
                schedule=schedule,
            )
            for total in (old_total, new_total)
        ]
        if weights[0] != weights[1]:
            return step
    return None

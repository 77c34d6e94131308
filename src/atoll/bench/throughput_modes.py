"""What is measured: one model, packed local models, or single models one after the other."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from atoll.bench.throughput_data import OwnRows
from atoll.config.budget import plan_budget
from atoll.config.schema import RunConfig
from atoll.config.strategy import StrategyConfig
from atoll.data.batch import Loader
from atoll.errors import UsageError
from atoll.optim.schedule import learning_rate
from atoll.runner.build import new_state, update_plan
from atoll.train.device import Execution, wait_for
from atoll.train.guard import Scalars
from atoll.train.state import TrainState
from atoll.train.step import Update

Mode = Literal["single", "packed", "sequential"]

Around = Callable[[], Any]
"""Makes a context manager for each update of each model."""


@dataclass(slots=True)
class Contender:
    """One mode, ready to make updates through the same objects as `atoll train`.

    Attributes:
        mode: Which.
        config: The recipe of each of its states.
        device: Where it computes.
        execution: How it computes there.
        states: One, or one for each single model.
        updates: As many.
        local_targets: Targets of one local model in one update.
        micro_targets: Targets of one local model in one backward.
        num_models: Local models, over all states.
        resident_bytes: Device memory that it holds between updates; 0 on a CPU.
        last: Scalars of each state's last update that was read.
    """

    mode: Mode
    config: RunConfig
    device: torch.device
    execution: Execution
    states: list[TrainState]
    updates: list[Update]
    local_targets: int
    micro_targets: int
    num_models: int
    resident_bytes: int = 0
    last: list[Scalars] = field(default_factory=list)

    @property
    def targets(self) -> int:
        """Targets of one update, over all models."""
        return self.local_targets * self.num_models

    def run(self, num_updates: int, around: Around | None = None) -> None:
        """Make updates of every model, read their scalars once and wait for the device.

        Single models run one after the other, each all of its updates: nothing that packed models
        share makes one of them wait for another, so this is the order that suits them best.

        Args:
            num_updates: Of each model.
            around: Surrounds each update of each model.

        Raises:
            NonFiniteError: A loss or a gradient was not finite.
        """
        self.last = []
        for state, update in zip(self.states, self.updates, strict=True):
            for _ in range(num_updates):
                if around is None:
                    update.run(lr=self._rate(state))
                else:
                    with around():
                        update.run(lr=self._rate(state))
            self.last.append(update.read()[-1])
        wait_for(self.device)

    @property
    def loss(self) -> float:
        """Mean loss of the last update over all models, in nats per target."""
        losses = [loss for scalars in self.last for loss in scalars.losses]
        return sum(losses) / len(losses)

    def _rate(self, state: TrainState) -> float:
        """Return the scheduled rate; beyond the run's end that of its last update."""
        total = plan_budget(self.config).total_steps
        return learning_rate(
            min(state.step + 1, total),
            total_steps=total,
            optimizer=self.config.optimizer,
            schedule=self.config.lr_schedule,
        )


def default_mode(config: RunConfig) -> Mode:
    """Return what the recipe itself trains."""
    return "packed" if config.strategy.placement == "packed" else "single"


def mode_config(config: RunConfig, mode: Mode) -> RunConfig:
    """Return the recipe of one state of a mode.

    `single` puts as many rows through one backward as the packed models do together.

    Raises:
        UsageError: The recipe holds no packed local models, and the mode needs them.
    """
    models = config.strategy.models
    if mode == default_mode(config):
        return config
    if mode in ("packed", "sequential") and default_mode(config) != "packed":
        raise UsageError(
            f"mode {mode} needs local models, and strategy.placement is "
            f"{config.strategy.placement} with strategy.models {models}.",
            hint="lay a packed recipe over it: --config packed8-20m-awc",
        )
    training = config.training
    change = (
        {"micro_batch_size": training.micro_batch_size * models}
        if mode == "single"
        else {"batch_tokens": training.batch_tokens // models}
    )
    return config.model_copy(
        update={
            "strategy": StrategyConfig(),
            "training": training.model_copy(update=change),
        }
    )


def build_contender(
    config: RunConfig, mode: Mode, loader: Loader, device: torch.device, execution: Execution
) -> Contender:
    """Build the states and updates of a mode as a run would build them.

    Args:
        config: The recipe as given, not yet that of the mode.
        mode: What to build.
        loader: Rows of whole updates of all models.
        device: Where to.
        execution: How it computes there.
    """
    own = mode_config(config, mode)
    count = config.strategy.models if mode == "sequential" else 1
    plan = update_plan(own, execution)
    local_rows = plan.rows // own.strategy.models
    states, updates = [], []
    for model in range(count):
        rows = (
            OwnRows(loader, model=model, num_models=count, local_rows=local_rows)
            if count > 1
            else loader
        )
        states.append(new_state(own, device, kernels=execution.kernels))
        updates.append(Update(states[-1], rows, plan))
    tokens = own.model.context_length
    return Contender(
        mode=mode,
        config=own,
        device=device,
        execution=execution,
        states=states,
        updates=updates,
        local_targets=local_rows * tokens,
        micro_targets=min(plan.micro_rows, local_rows) * tokens,
        num_models=count * own.strategy.models,
    )

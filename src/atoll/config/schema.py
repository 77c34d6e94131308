"""The whole recipe, and the rules that hold between its sections."""

from typing import Self

from pydantic import model_validator

from atoll.config.base import Section, refuse
from atoll.config.data import DataConfig
from atoll.config.model import ModelConfig
from atoll.config.optimizer import LrScheduleConfig, OptimizerConfig
from atoll.config.rules import broken_rules
from atoll.config.runtime import EvaluationConfig, RuntimeConfig
from atoll.config.strategy import StrategyConfig
from atoll.config.training import TrainingConfig


class RunConfig(Section):
    """One training run."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    lr_schedule: LrScheduleConfig = LrScheduleConfig()
    training: TrainingConfig = TrainingConfig()
    strategy: StrategyConfig = StrategyConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    runtime: RuntimeConfig = RuntimeConfig()

    @model_validator(mode="after")
    def _hold_rules(self) -> Self:
        refuse(broken_rules(self.model, self.training, self.strategy))
        return self

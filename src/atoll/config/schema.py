"""The whole recipe, and the rules that hold between its sections."""

from atoll.config.base import Section
from atoll.config.data import DataConfig
from atoll.config.model import ModelConfig
from atoll.config.optimizer import LrScheduleConfig, OptimizerConfig
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

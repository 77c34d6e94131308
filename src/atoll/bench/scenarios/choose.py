"""The built-in comparisons by name."""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

from atoll.bench.contest import Contest
from atoll.bench.settings import read_settings

Scenario = Literal["prepare", "training", "batch"]


def scenario(name: Scenario, overrides: Sequence[str]) -> tuple[dict[str, Any], Iterator[Contest]]:
    """Return a comparison's settings and its contests, each built when it is asked for.

    Args:
        name: Which one.
        overrides: `name=value` over its defaults.

    Raises:
        ConfigError: A parameter does not exist or does not fit.
    """
    match name:
        case "prepare":
            from atoll.bench.scenarios.prepare import PrepareSettings, prepare_contests

            settings = read_settings(PrepareSettings, overrides)
            return settings.model_dump(mode="json"), prepare_contests(settings)
        case "training":
            from atoll.bench.scenarios.training import TrainingSettings, training_contests

            settings = read_settings(TrainingSettings, overrides)
            return settings.model_dump(mode="json"), training_contests(settings)
        case "batch":
            from atoll.bench.scenarios.batch import BatchSettings, batch_contests

            settings = read_settings(BatchSettings, overrides)
            return settings.model_dump(mode="json"), batch_contests(settings)

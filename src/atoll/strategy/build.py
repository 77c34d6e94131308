"""The one place where a recipe's strategy becomes an object."""

from torch import nn

from atoll.config.strategy import StrategyConfig
from atoll.errors import UnavailableError
from atoll.strategy.base import Strategy
from atoll.strategy.single import Single


def build_strategy(config: StrategyConfig, model: nn.Module) -> Strategy:
    """Return the strategy that `config` describes, for `model` with the weights it starts from.

    Raises:
        UnavailableError: This version does not train that way; names the setting.
    """
    check_strategy(config)
    return Single(model)


def check_strategy(config: StrategyConfig) -> None:
    """Refuse, before anything is built, what `build_strategy` cannot build.

    Raises:
        UnavailableError: This version does not train that way; names the setting.
    """
    match config:
        case StrategyConfig(placement="packed", models=models):
            found = f"strategy.placement is packed with strategy.models {models}"
            raise _unavailable(found, "packed training")
        case StrategyConfig(kind="single"):
            return
        case StrategyConfig(kind=kind):
            raise _unavailable(f"strategy.kind is {kind}", f"{kind} training")


def _unavailable(found: str, what: str) -> UnavailableError:
    return UnavailableError(
        f"{found}: {what} is not available in this version.",
        hint="train one model: strategy.kind=single strategy.placement=ranks strategy.models=1",
    )

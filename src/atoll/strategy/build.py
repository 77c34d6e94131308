"""The one place where a recipe's strategy becomes an object."""

from collections.abc import Callable

from atoll.config.strategy import StrategyConfig
from atoll.errors import UnavailableError
from atoll.model.llama import Llama
from atoll.strategy.base import Strategy
from atoll.strategy.diloco import PackedDiloco
from atoll.strategy.gossip import PackedGossip
from atoll.strategy.single import Single


def build_strategy(
    config: StrategyConfig, model: Llama, *, weight: Callable[[int], float] | None = None
) -> Strategy:
    """Return the strategy that `config` describes, for `model` with the weights it starts from.

    Args:
        config: What passes between local models.
        model: All local models of this process.
        weight: Share of an update's exchange that is applied, by the update's number
            (`mixing_weight`); read where `config.consensus_power` is set, and needed there.

    Raises:
        UnavailableError: This version does not train that way; names the setting.
    """
    check_strategy(config)
    match config.kind:
        case "gossip":
            gamma = None if config.consensus_power is None else weight
            return PackedGossip(model.arena, config, weight=gamma)
        case "diloco":
            return PackedDiloco(model.arena, config)
        case _:
            return Single(model)


def check_strategy(config: StrategyConfig) -> None:
    """Refuse, before anything is built, what `build_strategy` cannot build.

    Raises:
        UnavailableError: This version does not train that way; names the setting.
    """
    match config:
        case StrategyConfig(kind="single"):
            return
        case StrategyConfig(kind="gossip" | "diloco", placement="packed"):
            return
        case StrategyConfig(kind="gossip" | "diloco" as kind):
            raise UnavailableError(
                f"strategy.kind is {kind} with strategy.placement ranks: {kind} between processes "
                "is not available in this version.",
                hint="pack the local models on one device: strategy.placement=packed and "
                "strategy.models=2 or more",
            )
        case StrategyConfig(kind=kind):
            raise UnavailableError(
                f"strategy.kind is {kind}: {kind} training is not available in this version.",
                hint="train one model (strategy.kind=single), or local models on one device "
                "(strategy.placement=packed with strategy.kind gossip or diloco)",
            )

"""Section `strategy`: what passes between local models, and where they live."""

from collections.abc import Iterator
from typing import Literal, Self, get_args

from pydantic import Field, model_validator

from atoll.config.base import BrokenRule, Section, refuse

Topology = Literal["complete", "one_peer_ring", "one_peer_exponential", "one_peer_base2"]
Scheme = Literal["awc", "atc"]


class StrategyConfig(Section):
    """What passes between local models, and where they live."""

    kind: Literal["single", "ddp", "diloco", "gossip"] = "single"
    """What passes between local models."""
    placement: Literal["ranks", "packed"] = "ranks"
    """One local model a training process, or all packed on one device."""
    models: int = Field(default=1, ge=1)
    """Packed local models."""
    topology: Topology | None = None
    """Who mixes with whom (`gossip`): all models with all, or each with at most one peer in an
    update. `one_peer_exponential` averages a power of two of models exactly in log2(`models`)
    updates, `one_peer_base2` any number of them in about twice as many."""
    scheme: Scheme | None = None
    """Mix before the inner update (awc) or after it (atc)."""
    consensus_power: float | None = Field(default=None, gt=0)
    """Adaptive consensus (`gossip`): the share gamma of the exchange that is applied is the rate of
    the update over the peak rate, to this power; each model keeps 1 - gamma of its own weights on
    top. null applies all of it."""
    consensus_start_fraction: float = Field(default=0.0, ge=0, lt=1)
    """Share of all updates before adaptive consensus begins; all of the exchange is applied until
    then."""
    local_steps: int = Field(default=32, ge=1)
    """Updates between two outer steps (`diloco`)."""
    outer_lr: float = Field(default=0.7, gt=0)
    """Rate of the outer step."""
    outer_momentum: float = Field(default=0.9, ge=0, lt=1)
    """Nesterov momentum of the outer step."""

    @model_validator(mode="after")
    def _hold_rules(self) -> Self:
        refuse(_broken_rules(self))
        return self


def _broken_rules(strategy: StrategyConfig) -> Iterator[BrokenRule]:
    for name, choices in (("topology", get_args(Topology)), ("scheme", get_args(Scheme))):
        value = getattr(strategy, name)
        if strategy.kind == "gossip" and value is None:
            yield BrokenRule(
                ("kind", name),
                f"strategy.kind gossip needs strategy.{name}. Set it to {' or '.join(choices)}.",
            )
        if strategy.kind != "gossip" and value is not None:
            yield BrokenRule(
                ("kind", name),
                f"strategy.{name} {value} has no effect with strategy.kind {strategy.kind}. "
                f"Set strategy.{name} to null, or strategy.kind to gossip.",
            )
    for name in ("local_steps", "outer_lr", "outer_momentum"):
        value, default = getattr(strategy, name), StrategyConfig.model_fields[name].default
        if strategy.kind != "diloco" and value != default:
            yield BrokenRule(
                ("kind", name),
                f"strategy.{name} {value} has no effect with strategy.kind {strategy.kind}. "
                f"Leave strategy.{name} out, or set strategy.kind to diloco.",
            )
    yield from _consensus_rules(strategy)
    yield from _placement_rules(strategy)


def _consensus_rules(strategy: StrategyConfig) -> Iterator[BrokenRule]:
    power, start = strategy.consensus_power, strategy.consensus_start_fraction
    if strategy.kind != "gossip" and power is not None:
        yield BrokenRule(
            ("kind", "consensus_power"),
            f"strategy.consensus_power {power} has no effect with strategy.kind {strategy.kind}. "
            "Set strategy.consensus_power to null, or strategy.kind to gossip.",
        )
    if power is None and start > 0:
        yield BrokenRule(
            ("consensus_power", "consensus_start_fraction"),
            f"strategy.consensus_start_fraction {start} has no effect without "
            "strategy.consensus_power. Set that too, or strategy.consensus_start_fraction to 0.",
        )


def _placement_rules(strategy: StrategyConfig) -> Iterator[BrokenRule]:
    if strategy.placement == "packed" and strategy.kind in ("single", "ddp"):
        yield BrokenRule(
            ("placement", "kind"),
            f"strategy.placement packed needs local models that exchange, and strategy.kind is "
            f"{strategy.kind}. Set strategy.kind to gossip or diloco, or strategy.placement to "
            "ranks.",
        )
    if strategy.placement == "packed" and strategy.models < 2:
        yield BrokenRule(
            ("placement", "models"),
            "strategy.placement packed holds 1 local model; it needs at least 2. "
            "Set strategy.models to 2 or more, or strategy.placement to ranks.",
        )
    if strategy.placement == "ranks" and strategy.models > 1:
        yield BrokenRule(
            ("placement", "models"),
            f"strategy.models {strategy.models} are packed on one device, but strategy.placement "
            "is ranks. Set strategy.placement to packed, or strategy.models to 1.",
        )

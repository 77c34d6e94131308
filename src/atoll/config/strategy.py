"""Section `strategy`: what passes between local models, and where they live."""

from typing import Literal

from pydantic import Field

from atoll.config.base import Section


class StrategyConfig(Section):
    kind: Literal["single", "ddp", "diloco", "gossip"] = "single"
    """What passes between local models."""
    placement: Literal["ranks", "packed"] = "ranks"
    """One local model a training process, or all packed on one device."""
    models: int = Field(1, ge=1)
    """Packed local models."""
    topology: Literal["complete", "one_peer_ring", "one_peer_exponential"] | None = None
    """Who mixes with whom (`gossip`)."""
    scheme: Literal["awc", "atc"] | None = None
    """Mix before the inner update (awc) or after it (atc)."""
    local_steps: int = Field(32, ge=1)
    """Updates between two outer steps (`diloco`)."""
    outer_lr: float = Field(0.7, gt=0)
    """Rate of the outer step."""
    outer_momentum: float = Field(0.9, ge=0, lt=1)
    """Nesterov momentum of the outer step."""

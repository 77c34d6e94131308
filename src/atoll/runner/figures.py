"""What metrics.jsonl and result.json say about several local models."""

from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from atoll.config.strategy import StrategyConfig
from atoll.strategy.base import Strategy
from atoll.train.loop import Window


def window_figures(window: Window) -> dict[str, Any]:
    """Return losses and gradient norms of a window.

    `last_loss_nats_per_token` and `grad_norm` are means over the local models in the last update,
    `max_grad_norm` is the largest one of the window. Where there are several models, the `local_`
    lists hold the last update's value of each, in order.
    """
    last = window.scalars[-1]
    found: dict[str, Any] = {
        "last_loss_nats_per_token": fmean(last.losses),
        "grad_norm": fmean(last.grad_norms),
        "max_grad_norm": max(norm for scalars in window.scalars for norm in scalars.grad_norms),
    }
    if len(last.losses) > 1:
        found |= {
            "local_losses_nats_per_token": list(last.losses),
            "min_local_loss_nats_per_token": min(last.losses),
            "max_local_loss_nats_per_token": max(last.losses),
            "local_grad_norms": list(last.grad_norms),
            "min_local_grad_norm": min(last.grad_norms),
            "max_local_grad_norm": max(last.grad_norms),
        }
    return found


def consensus_figures(strategy: Strategy, *, step: int) -> dict[str, float]:
    """Return the strategy's measures as numbers; waits for the device, once.

    Args:
        strategy: At rest.
        step: The last update.
    """
    measures = strategy.measures(step)
    tensors = [value for value in measures.values() if isinstance(value, Tensor)]
    read = iter(torch.stack(tensors).tolist() if tensors else ())
    return {
        name: next(read) if isinstance(value, Tensor) else value for name, value in measures.items()
    }


def strategy_summary(config: StrategyConfig) -> dict[str, Any]:
    """Return the settings that say how local models share, without those of other kinds."""
    names = ["kind", "placement", "models"]
    match config.kind:
        case "gossip":
            names += ["topology", "scheme"]
            if config.consensus_power is not None:
                names += ["consensus_power", "consensus_start_fraction"]
        case "diloco":
            names += ["local_steps", "outer_lr", "outer_momentum"]
        case _:
            pass
    return {name: getattr(config, name) for name in names}

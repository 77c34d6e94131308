"""What metrics.jsonl and result.json say about several local models."""

import math
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from atoll.config.strategy import StrategyConfig
from atoll.errors import NonFiniteError
from atoll.optim.clip import non_finite_names
from atoll.train.guard import HINT
from atoll.train.loop import Window
from atoll.train.state import TrainState


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


def consensus_figures(state: TrainState) -> dict[str, float]:
    """Return the strategy's measures after the last update; waits for the device, once.

    Raises:
        NonFiniteError: A measure is not a finite number, because a weight is none; names it.
    """
    measures = state.strategy.measures(state.step)
    tensors = [value for value in measures.values() if isinstance(value, Tensor)]
    read = iter(torch.stack(tensors).tolist() if tensors else ())
    found: dict[str, float] = {
        name: next(read) if isinstance(value, Tensor) else value for name, value in measures.items()
    }
    if not all(map(math.isfinite, found.values())):
        arena = state.model.arena
        blamed = non_finite_names(arena.data_NP, arena.slices)
        where = "".join(f" parameter {name} of local model {model}" for model, name in blamed[:1])
        raise NonFiniteError(f"after update {state.step}{where} is not finite.", hint=HINT)
    return found


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

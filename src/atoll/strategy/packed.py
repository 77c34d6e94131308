"""What strategies of packed local models share: averages, distances, and saved states.

Everything walks over pieces of columns, so that no copy of all N models is ever made.

Shapes: N local models, P parameters of one model, C columns of a piece.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from atoll.errors import StateMismatchError
from atoll.model.arena import Arena
from atoll.tensors import Snapshot

CPU_COLUMNS = 1 << 14
"""Columns of a piece on a CPU: those of a few models stay in its cache."""
DEVICE_COLUMNS = 1 << 20
"""Columns of a piece elsewhere: 32 MiB for 8 models, large enough to fill a GPU."""


def piece_size(tensor: Tensor) -> int:
    """Return the columns of one piece on the tensor's device."""
    return CPU_COLUMNS if tensor.device.type == "cpu" else DEVICE_COLUMNS


@torch.no_grad()
def average(data_NP: Tensor) -> Tensor:
    """Return the mean over models, float32 [P].

    It is the first model minus the mean of what the others differ by: where all models are equal
    that is a zero of positive sign, and their common weights come back bit for bit, whatever N.
    """
    return torch.cat([_average(piece_NC) for piece_NC in data_NP.split(piece_size(data_NP), dim=1)])


@torch.no_grad()
def consensus_measures(data_NP: Tensor) -> dict[str, Tensor]:
    """Return how far the models are from their mean, as scalars on their device.

    Squares are added up in float64 where the device has it: far apart, models are not infinitely
    far.

    Returns:
        `consensus_distance`: root mean square over models of the Euclidean distance to the mean;
        `consensus_distance_relative`: that, divided by the norm of the mean.
    """
    distances, norms = [], []
    for piece_NC in data_NP.split(piece_size(data_NP), dim=1):
        mean_C = _average(piece_NC)
        distances.append(square_sum(piece_NC - mean_C))
        norms.append(square_sum(mean_C))
    distance = (torch.stack(distances).sum() / len(data_NP)).sqrt()
    return {
        "consensus_distance": distance,
        "consensus_distance_relative": distance / torch.stack(norms).sum().sqrt(),
    }


def square_sum(tensor: Tensor) -> Tensor:
    """Return the sum of squares, in float64 where the device has it."""
    return (tensor if tensor.device.type == "mps" else tensor.double()).square().sum()


def named_weights(arena: Arena, weights_P: Tensor) -> dict[str, Tensor]:
    """Return one model's flat weights by canonical name, [1, *shape] each; shares storage."""
    return {
        name: weights_P[place.offset : place.offset + place.size].view(1, *place.shape)
        for name, place in arena.slices.items()
    }


def check_saved(
    saved: Snapshot, *, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]
) -> None:
    """Refuse a saved state that is not one of a strategy with these tensors and facts.

    Raises:
        StateMismatchError: Lists every difference.
    """
    own = {name: _form(tensor) for name, tensor in tensors.items()} | dict(facts)
    found = {name: _form(tensor) for name, tensor in saved.tensors.items()} | saved.facts
    lines = [
        f"strategy.{name}: {found.get(name, '(missing)')} -> {own.get(name, '(unknown)')}"
        for name in [*own, *(name for name in found if name not in own)]
        if found.get(name) != own.get(name)
    ]
    if lines:
        raise StateMismatchError(
            "the saved strategy is not that of this run:\n" + "\n".join(lines),
            hint="resume with the strategy that made the checkpoint",
        )


def _average(piece_NC: Tensor) -> Tensor:
    # One model after another: a reduction kernel of each device would add in an order of its own.
    first_C = piece_NC[0]
    off_C = torch.zeros_like(first_C)
    for other_C in piece_NC[1:]:
        off_C += first_C - other_C
    return first_C - off_C.mul_(1 / len(piece_NC))


def _form(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"

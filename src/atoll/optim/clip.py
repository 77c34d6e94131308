"""Gradient norms, clipping factors, and the names of gradients that are not numbers.

Shapes: N local models, P parameters of one model, C blocks.
"""

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

BLOCK = 4096
"""Columns summed in one go. torch adds squares of a long FP32 row one after another on a CPU,
which is 0.09% off at 20 M parameters and 0.9% at 90 M; in blocks the error stays near 1e-7."""


class Place(Protocol):
    """Where one tensor of a model lies in a row: columns [offset, offset + size)."""

    @property
    def offset(self) -> int: ...
    @property
    def size(self) -> int: ...


def clip_factors(norm_N: Tensor, *, max_norm: float) -> Tensor:
    """Return what scales each local model's gradients down to `max_norm` where they are longer.

    Args:
        norm_N: Euclidean norms of the gradients.
        max_norm: Largest norm that is wanted.

    Returns:
        float32 [N], at most 1. A norm that is not finite gives 1, so that its gradients stay as
        they are and can be looked at.
    """
    factor_N = (max_norm / norm_N).clamp(max=1.0)
    return torch.where(torch.isfinite(norm_N), factor_N, 1.0)


@torch.no_grad()
def gradient_norms(grad_NP: Tensor) -> Tensor:
    """Return the Euclidean norm of every row, float32 [N], from norms of blocks of columns."""
    whole = grad_NP.shape[1] // BLOCK * BLOCK
    parts = [torch.linalg.vector_norm(grad_NP[:, :whole].unflatten(1, (-1, BLOCK)), dim=2)]
    if whole < grad_NP.shape[1]:
        parts.append(torch.linalg.vector_norm(grad_NP[:, whole:], dim=1, keepdim=True))
    return torch.linalg.vector_norm(torch.cat(parts, dim=1), dim=1)


def non_finite_names(grad_NP: Tensor, slices: Mapping[str, Place]) -> list[tuple[int, str]]:
    """Return (local model, canonical name) of every gradient that holds a NaN or an infinity.

    Args:
        grad_NP: Gradients before clipping.
        slices: Canonical name -> place in a row, in the order they are to be named.
    """
    finite_NP = torch.isfinite(grad_NP)
    names = list(slices)
    finite_NK = torch.stack(
        [
            finite_NP[:, place.offset : place.offset + place.size].all(dim=1)
            for place in slices.values()
        ],
        dim=1,
    )
    return [
        (model, name)
        for model, row in enumerate(finite_NK.tolist())
        for name, finite in zip(names, row, strict=True)
        if not finite
    ]

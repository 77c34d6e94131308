"""Gradient norms, clipping per local model, and the names of gradients that are not numbers.

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


@torch.no_grad()
def clip_gradients(grad_NP: Tensor, *, max_norm: float | None) -> Tensor:
    """Scale each local model's gradients down to `max_norm`, in place, where they are longer.

    Args:
        grad_NP: float32 gradients.
        max_norm: Largest Euclidean norm of a row; None measures only.

    Returns:
        float32 norms [N] before clipping, on the gradients' device; not finite where any
        gradient of that model is not. Such a row is left unscaled, so that it can be looked at.
    """
    norm_N = gradient_norms(grad_NP)
    if max_norm is not None:
        factor_N = (max_norm / norm_N).clamp(max=1.0)
        factor_N = torch.where(torch.isfinite(norm_N), factor_N, 1.0)
        grad_NP.mul_(factor_N[:, None])
    return norm_N


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

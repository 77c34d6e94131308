"""Cross-entropy over a large vocabulary in pieces of rows, so that memory stays bounded.

Shapes: N local models, M targets of each, V vocabulary, D width, c rows of one piece.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from atoll.tensors import IGNORE

PIECE_BYTES = {"cpu": 4 << 20, "cuda": 1 << 30}
"""Largest piece of float32 logits by device type; others use the CPU's.
Source: measured, benchmarks/model-*.json; a piece should fit a CPU's cache, and fill a GPU."""


def weighted_loss(
    x_NMD: Tensor,
    weight_NVD: Tensor,
    targets_NM: Tensor,
    weights_NM: Tensor | None = None,
    *,
    piece_rows: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return each model's weighted sum of cross-entropies in nats and its summed weight.

    Logits exist for `piece_rows` rows at a time. The gradients are formed in the same pass, so
    the backward pass only scales them and the product with the vocabulary is never repeated.

    Args:
        x_NMD: Features after the last norm.
        weight_NVD: Output projection.
        targets_NM: int64 target ids, IGNORE where not counted.
        weights_NM: float32 weight of each target. Default: 1 for each counted target.
        piece_rows: Rows of one piece. Default: as many as PIECE_BYTES holds.

    Returns:
        Two float32 tensors [N]; only the first has a gradient.
    """
    counted_NM = targets_NM != IGNORE
    weights_NM = counted_NM.to(torch.float32) if weights_NM is None else weights_NM * counted_NM
    ids_NM = torch.where(counted_NM, targets_NM, 0)
    sums_N = _WeightedLoss.apply(
        x_NMD,
        weight_NVD,
        ids_NM,
        weights_NM.to(torch.promote_types(x_NMD.dtype, torch.float32)),
        piece_rows or default_piece_rows(x_NMD, weight_NVD),
        _compute_dtype(x_NMD),
        torch.is_grad_enabled() and (x_NMD.requires_grad or weight_NVD.requires_grad),
    )
    return sums_N, weights_NM.sum(-1)


def weighted_loss_plain(
    x_NMD: Tensor, weight_NVD: Tensor, targets_NM: Tensor, weights_NM: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Naive twin of `weighted_loss`: all logits at once, gradients by autograd."""
    logits_NMV = torch.matmul(x_NMD, weight_NVD.mT)
    counted_NM = (targets_NM != IGNORE).to(logits_NMV.dtype)
    weights_NM = counted_NM if weights_NM is None else weights_NM * counted_NM
    losses_NM = functional.cross_entropy(
        logits_NMV.flatten(0, 1), targets_NM.flatten(), ignore_index=IGNORE, reduction="none"
    ).view_as(targets_NM)
    return (losses_NM * weights_NM).sum(-1), weights_NM.sum(-1)


def default_piece_rows(x_NMD: Tensor, weight_NVD: Tensor) -> int:
    """Return how many rows of every model make one piece of logits of at most PIECE_BYTES."""
    models, vocabulary, _ = weight_NVD.shape
    limit = PIECE_BYTES.get(x_NMD.device.type, PIECE_BYTES["cpu"])
    return max(64, limit // (4 * models * vocabulary) // 64 * 64)


def _compute_dtype(x: Tensor) -> torch.dtype:
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


class _WeightedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_NMD: Tensor,
        weight_NVD: Tensor,
        ids_NM: Tensor,
        weights_NM: Tensor,
        piece_rows: int,
        dtype: torch.dtype,
        with_grad: bool,
    ) -> Tensor:
        narrow_NVD = weight_NVD.to(dtype)
        sums_N = weights_NM.new_zeros(weights_NM.shape[0])
        grad_x_NMD = torch.empty_like(x_NMD) if with_grad else None
        grad_NVD = None
        for start in range(0, x_NMD.shape[1], piece_rows):
            piece = slice(start, start + piece_rows)
            x_NcD, weights_Nc1 = x_NMD[:, piece].to(dtype), weights_NM[:, piece, None]
            logits_NcV = torch.bmm(x_NcD, narrow_NVD.mT)
            losses_Nc1, grad_NcV = _piece(logits_NcV, ids_NM[:, piece, None], with_grad=with_grad)
            sums_N = sums_N + (losses_Nc1 * weights_Nc1).sum((1, 2))
            if grad_x_NMD is not None:
                torch.mul(torch.bmm(grad_NcV, narrow_NVD), weights_Nc1, out=grad_x_NMD[:, piece])
                weighted_NcD = (x_NcD * weights_Nc1).to(dtype)
                grad_NVD = _add_product(grad_NVD, grad_NcV.mT, weighted_NcD)
        if with_grad:
            ctx.save_for_backward(grad_x_NMD, grad_NVD)
        return sums_N

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor | None, ...]:
        grad_x_NMD, grad_NVD = ctx.saved_tensors
        scale_N11 = grad_N[:, None, None]
        return grad_x_NMD * scale_N11, grad_NVD * scale_N11, None, None, None, None, None


def _piece(logits_NcV: Tensor, ids_Nc1: Tensor, *, with_grad: bool) -> tuple[Tensor, Tensor]:
    """Return cross-entropies [N, c, 1] and their gradient to the logits, which it overwrites."""
    chosen_Nc1 = logits_NcV.gather(-1, ids_Nc1)
    if not with_grad:
        return torch.logsumexp(logits_NcV, -1, keepdim=True) - chosen_Nc1, logits_NcV
    largest_Nc1 = logits_NcV.amax(-1, keepdim=True)
    p_NcV = torch.softmax(logits_NcV, -1, out=logits_NcV)
    # The largest probability is 1 / sum(exp(logit - largest)), so that one exp per logit is enough.
    losses_Nc1 = largest_Nc1 - p_NcV.amax(-1, keepdim=True).log_() - chosen_Nc1
    return losses_Nc1, p_NcV.scatter_add_(-1, ids_Nc1, -torch.ones_like(chosen_Nc1))


def _add_product(total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    return torch.bmm(left, right) if total is None else total.baddbmm_(left, right)

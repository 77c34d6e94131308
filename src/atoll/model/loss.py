"""Cross-entropy over a large vocabulary in pieces of rows, so that memory stays bounded.

Shapes: N local models, M targets of each, V vocabulary, D width, c rows of one piece.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from atoll.tensors import IGNORE

PIECE_BYTES = {"cpu": 32 << 20, "cuda": 1 << 30}
"""Largest piece of float32 logits by device type; others use the CPU's.
A piece should fit a CPU's cache, and fill a GPU."""


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
    models, vocabulary, _ = weight_NVD.shape
    counted_NM = targets_NM != IGNORE
    weights_NM = counted_NM.to(torch.float32) if weights_NM is None else weights_NM * counted_NM
    ids_NM = torch.where(counted_NM, targets_NM, 0)
    sums_N = _WeightedLoss.apply(
        x_NMD,
        weight_NVD,
        ids_NM,
        weights_NM.to(_wide(x_NMD)),
        piece_rows or default_piece_rows(models, vocabulary, device_type=x_NMD.device.type),
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


def default_piece_rows(num_models: int, vocabulary: int, *, device_type: str) -> int:
    """Return the rows of each model in one piece, of at most PIECE_BYTES but 256 rows at least."""
    limit = PIECE_BYTES.get(device_type, PIECE_BYTES["cpu"])
    return max(256, limit // (4 * num_models * vocabulary))


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
        # A compiler gains nothing over these CPU kernels and takes long over many pieces.
        opaque = torch.compiler.is_compiling() and x_NMD.device.type == "cpu"
        compute = _sums_and_gradients_opaque if opaque else _sums_and_gradients
        sums_N, grad_x_NMD, grad_NVD = compute(
            x_NMD, weight_NVD, ids_NM, weights_NM, piece_rows, dtype, with_grad
        )
        ctx.save_for_backward(grad_x_NMD, grad_NVD)
        return sums_N

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        scale_N11 = grad_outputs[0][:, None, None]
        grad_x_NMD, grad_NVD = ctx.saved_tensors
        if torch.compiler.is_compiling():
            return grad_x_NMD * scale_N11, grad_NVD * scale_N11, None, None, None, None, None
        # In place, since a second V x D tensor costs more than the scaling: measured 6% of an
        # update at 32,000 ids and 256 rows. Autograd refuses a second backward after that.
        grad_x_NMD.mul_(scale_N11)
        return grad_x_NMD, grad_NVD.mul_(scale_N11), None, None, None, None, None


def _sums_and_gradients(
    x_NMD: Tensor,
    weight_NVD: Tensor,
    ids_NM: Tensor,
    weights_NM: Tensor,
    piece_rows: int,
    dtype: torch.dtype,
    with_grad: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the weighted sums [N] and their gradients to the features and the projection.

    Both gradients are empty without `with_grad`.
    """
    narrow_NVD = weight_NVD.to(dtype)
    sums_N = weights_NM.new_zeros(weights_NM.shape[0])
    grad_x_NMD = torch.empty_like(x_NMD) if with_grad else x_NMD.new_empty(0)
    grad_NVD = None
    for start in range(0, x_NMD.shape[1], piece_rows):
        rows = slice(start, start + piece_rows)
        x_NcD, weights_Nc1 = x_NMD[:, rows].to(dtype), weights_NM[:, rows, None]
        losses_Nc1, grad_x_NcD, grad_NVD = _piece(
            x_NcD, narrow_NVD, ids_NM[:, rows, None], weights_Nc1, grad_NVD, with_grad=with_grad
        )
        sums_N = sums_N + (losses_Nc1 * weights_Nc1).sum((1, 2))
        if with_grad:
            torch.mul(grad_x_NcD, weights_Nc1, out=grad_x_NMD[:, rows])
    return sums_N, grad_x_NMD, weight_NVD.new_empty(0) if grad_NVD is None else grad_NVD


_sums_and_gradients_opaque = torch.library.custom_op(
    "atoll::sums_and_gradients", _sums_and_gradients, mutates_args=()
)


@_sums_and_gradients_opaque.register_fake
def _(
    x_NMD: Tensor,
    weight_NVD: Tensor,
    ids_NM: Tensor,
    weights_NM: Tensor,
    piece_rows: int,
    dtype: torch.dtype,
    with_grad: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    sums_N = weights_NM.new_empty(weights_NM.shape[0])
    if not with_grad:
        return sums_N, x_NMD.new_empty(0), weight_NVD.new_empty(0)
    return sums_N, torch.empty_like(x_NMD), weight_NVD.new_empty(weight_NVD.shape)


def _piece(
    x_NcD: Tensor,
    narrow_NVD: Tensor,
    ids_Nc1: Tensor,
    weights_Nc1: Tensor,
    grad_NVD: Tensor | None,
    *,
    with_grad: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return cross-entropies, their unweighted gradient to the features, and `grad_NVD` plus ours.

    The logits live and die in here, so that those of two pieces never exist together.
    """
    logits_NcV = torch.bmm(x_NcD, narrow_NVD.mT)
    if not with_grad:
        wide_NcV = logits_NcV.to(_wide(logits_NcV))
        normalizer_Nc1 = torch.logsumexp(wide_NcV, -1, keepdim=True)
        return normalizer_Nc1 - wide_NcV.gather(-1, ids_Nc1), x_NcD, None
    differentiate = _traced_softmax if torch.compiler.is_compiling() else _softmax_in_place
    losses_Nc1, grad_NcV = differentiate(logits_NcV, ids_Nc1)
    weighted_NcD = (x_NcD * weights_Nc1).to(x_NcD.dtype)
    grad_NVD = _add_product(grad_NVD, grad_NcV.mT, weighted_NcD)
    return losses_Nc1, torch.bmm(grad_NcV, narrow_NVD), grad_NVD


def _softmax_in_place(logits_NcV: Tensor, ids_Nc1: Tensor) -> tuple[Tensor, Tensor]:
    """Return cross-entropies [N, c, 1] and their gradient to the logits, which it overwrites.

    Statistics are at least float32; the gradient has the dtype of the logits.
    """
    wide_NcV = logits_NcV.to(_wide(logits_NcV))
    chosen_Nc1 = wide_NcV.gather(-1, ids_Nc1)
    largest_Nc1 = wide_NcV.amax(-1, keepdim=True)
    p_NcV = wide_NcV
    torch.softmax(wide_NcV, -1, out=p_NcV)
    # The largest probability is 1 / sum(exp(logit - largest)): one exp per logit is enough.
    losses_Nc1 = largest_Nc1 - p_NcV.amax(-1, keepdim=True).log_() - chosen_Nc1
    p_NcV.scatter_(-1, ids_Nc1, p_NcV.gather(-1, ids_Nc1) - 1)
    return losses_Nc1, p_NcV if p_NcV is logits_NcV else logits_NcV.copy_(p_NcV)


def _traced_softmax(logits_NcV: Tensor, ids_Nc1: Tensor) -> tuple[Tensor, Tensor]:
    """Twin of `_softmax_in_place` in a form that a compiler makes two passes of."""
    wide_NcV = logits_NcV.to(_wide(logits_NcV))
    normalizer_Nc1 = torch.logsumexp(wide_NcV, -1, keepdim=True)
    losses_Nc1 = normalizer_Nc1 - wide_NcV.gather(-1, ids_Nc1)
    is_chosen_NcV = ids_Nc1 == torch.arange(wide_NcV.shape[-1], device=ids_Nc1.device)
    grad_NcV = torch.exp(wide_NcV - normalizer_Nc1) - is_chosen_NcV.to(wide_NcV.dtype)
    return losses_Nc1, grad_NcV.to(logits_NcV.dtype)


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _add_product(total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """Return total + left @ right in float32 or wider; the first product makes the total."""
    if left.dtype.itemsize >= 4:
        return torch.bmm(left, right) if total is None else total.baddbmm_(left, right)
    if left.device.type == "cuda":
        product = torch.bmm(left, right, out_dtype=torch.float32)
    else:
        product = torch.bmm(left, right).to(torch.float32)
    return product if total is None else total.add_(product)

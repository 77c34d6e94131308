"""The forward of `Llama` on a GPU in bfloat16, through kernels that read and write each value once.

Same names and numbers as the plain forward under autocast: float32 weights, residual stream, norms
and statistics; bfloat16 products. Gradients of matrices leave their products in float32.

Shapes: N local models, B rows, T tokens, M = B * T, R = N * M rows of all models, D width,
V vocabulary, I and O inputs and outputs of a matrix, c rows of one piece.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from atoll.model.attention import attention
from atoll.tensors import IGNORE

if TYPE_CHECKING:
    from atoll.model.llama import Llama

LOGITS_SHARE = 8
"""The logits of one piece take at most 1 / LOGITS_SHARE of the device's memory."""
SMALLEST_MEMORY = 8 << 30
"""Bytes of a device that does not tell."""


def features(
    model: "Llama",
    inputs_NBT: Tensor,
    positions_NBT: Tensor | None,
    embed: Callable[[Tensor, Tensor], Tensor],
) -> tuple[Tensor, Tensor]:
    """Return the normed residual stream, bfloat16 [N, M, D], and all narrow matrices [N, P'].

    Args:
        model: On a CUDA device.
        inputs_NBT: int64 token ids.
        positions_NBT: Positions within the document; None for 0 ... T-1.
        embed: Looks token ids [N, M] up in an embedding [N, V, D].
    """
    from atoll.model.kernels.add_norm import add_norm
    from atoll.model.kernels.rotary import split_heads
    from atoll.model.kernels.swiglu import swiglu

    models, rows, tokens = inputs_NBT.shape
    if positions_NBT is not None:
        positions_NBT = positions_NBT.reshape(models * rows, tokens)
    cos, sin = model.angles(positions_NBT, tokens)
    width, eps = model.config.width, model.config.norm_eps
    narrow_NP = model.arena.data_NP[:, : model.arena.decay_size].to(torch.bfloat16)

    def product(x: Tensor, name: str, weight_NOI: Tensor) -> Tensor:
        x_NMI = x.view(models, rows * tokens, -1)
        return _Product.apply(x_NMI, weight_NOI, model.arena.cut(narrow_NP, name))

    x_RD = embed(inputs_NBT.reshape(models, -1), model.embedding).view(-1, width)
    delta_RD = None
    for layer, block in enumerate(model.blocks):
        x_RD, normed = add_norm(x_RD, delta_RD, block.attention_norm, eps)
        qkv = product(normed, f"layers.{layer}.qkv", block.qkv)
        heads = block.query_heads + 2 * block.key_heads
        qkv_BTHC = qkv.view(models * rows, tokens, heads, 2 * cos.shape[-1])
        q, k, v = split_heads(qkv_BTHC, cos, sin, block.query_heads, block.key_heads)
        joined = attention(q, k, v).transpose(1, 2).reshape(models * rows * tokens, -1)
        delta = product(joined, f"layers.{layer}.attention_out", block.attention_out)
        x_RD, normed = add_norm(x_RD, delta.view(-1, width), block.mlp_norm, eps)
        gate_up = product(normed, f"layers.{layer}.gate_up", block.gate_up)
        delta = product(swiglu(gate_up), f"layers.{layer}.mlp_out", block.mlp_out)
        delta_RD = delta.view(-1, width)
    _, normed = add_norm(x_RD, delta_RD, model.norm, eps)
    return normed.view(models, -1, width), narrow_NP


def weighted_loss(
    x_NMD: Tensor,
    weight_NVD: Tensor,
    narrow_NVD: Tensor,
    targets_NM: Tensor,
    weights_NM: Tensor | None = None,
    *,
    piece_rows: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Fast twin of `atoll.model.loss.weighted_loss`.

    Args:
        x_NMD: bfloat16 features.
        weight_NVD: float32 output projection, which gets the gradient.
        narrow_NVD: The same in bfloat16.
        targets_NM: int64 target ids, IGNORE where not counted.
        weights_NM: float32 weight of each target. Default: 1 for each counted target.
        piece_rows: Rows of each model whose logits exist at a time. Default: by memory.
    """
    counted_NM = targets_NM != IGNORE
    weights_NM = counted_NM.to(torch.float32) if weights_NM is None else weights_NM * counted_NM
    sums_N = _WeightedLoss.apply(
        x_NMD,
        weight_NVD,
        narrow_NVD,
        torch.where(counted_NM, targets_NM, 0),
        weights_NM,
        piece_rows or _piece_rows(narrow_NVD),
        torch.is_grad_enabled() and (x_NMD.requires_grad or weight_NVD.requires_grad),
    )
    return sums_N, weights_NM.sum(-1)


class _Product(torch.autograd.Function):
    """x @ W^T in bfloat16 whose weight gradient is float32 from the product on."""

    @staticmethod
    def forward(ctx: Any, x_NMI: Tensor, weight_NOI: Tensor, narrow_NOI: Tensor) -> Tensor:
        ctx.save_for_backward(x_NMI, narrow_NOI)
        return _bmm(x_NMI, narrow_NOI.mT)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x_NMI, narrow_NOI = ctx.saved_tensors
        (grad_NMO,) = grads
        return _bmm(grad_NMO, narrow_NOI), _wide_bmm(grad_NMO.mT, x_NMI), None


class _WeightedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_NMD: Tensor,
        weight_NVD: Tensor,
        narrow_NVD: Tensor,
        ids_NM: Tensor,
        weights_NM: Tensor,
        piece_rows: int,
        with_grad: bool,
    ) -> Tensor:
        from atoll.model.kernels.cross_entropy import cross_entropy

        models, vocabulary, _ = narrow_NVD.shape
        grad_x_NMD = torch.empty_like(x_NMD) if with_grad else None
        grad_NVD = None
        losses = []
        for start in range(0, x_NMD.shape[1], piece_rows):
            rows = slice(start, start + piece_rows)
            logits_NcV = _bmm(x_NMD[:, rows], narrow_NVD.mT)
            ids_R, weights_R = ids_NM[:, rows].reshape(-1), weights_NM[:, rows].reshape(-1)
            losses_R = cross_entropy(
                logits_NcV.view(-1, vocabulary), ids_R, weights_R, with_grad=with_grad
            )
            losses.append((losses_R * weights_R).view(models, -1).sum(-1))
            if grad_x_NMD is not None:  # the logits are their gradients by now
                grad_x_NMD[:, rows] = _bmm(logits_NcV, narrow_NVD)
                product = _wide_bmm(logits_NcV.mT, x_NMD[:, rows])
                grad_NVD = product if grad_NVD is None else grad_NVD.add_(product)
        if with_grad:
            ctx.save_for_backward(grad_x_NMD, grad_NVD)
        return torch.stack(losses).sum(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # In place: autograd refuses a second backward after that.
        scale_N11 = grads[0][:, None, None]
        grad_x_NMD, grad_NVD = ctx.saved_tensors
        grad_x_NMD.mul_(scale_N11)
        return grad_x_NMD, grad_NVD.mul_(scale_N11), None, None, None, None, None


def _piece_rows(narrow_NVD: Tensor) -> int:
    """Return the rows of each model whose logits fit their share of the device's memory."""
    models, vocabulary, _ = narrow_NVD.shape
    total_bytes = SMALLEST_MEMORY
    if narrow_NVD.is_cuda:
        total_bytes = torch.cuda.get_device_properties(narrow_NVD.device).total_memory
    return max(256, total_bytes // LOGITS_SHARE // (2 * models * vocabulary))


def _bmm(left: Tensor, right: Tensor) -> Tensor:
    if left.shape[0] == 1:
        return torch.mm(left[0], right[0]).unsqueeze(0)
    return torch.bmm(left, right)


def _wide_bmm(left: Tensor, right: Tensor) -> Tensor:
    """Return the product in float32, as it leaves the matrix unit."""
    if not left.is_cuda:  # under triton's interpreter; CPU kernels do not widen
        return torch.bmm(left.float(), right.float())
    if left.shape[0] == 1:
        return torch.mm(left[0], right[0], out_dtype=torch.float32).unsqueeze(0)
    return torch.bmm(left, right, out_dtype=torch.float32)

"""Elementwise parts with hand-written backward passes, each beside its plain twin.

Eager autograd keeps and walks one tensor per elementary operation; these keep the inputs only and
write each gradient once. Under torch.compile the plain twins run, since the compiler fuses them.

Shapes: N local models, M tokens, D width, F FFN width, V vocabulary; B rows, T tokens of a row,
H query heads, K key/value heads, C channels of one head, R = C / 2 rotated pairs.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from atoll.model import rope


def rms_norm(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    """Return x / rms(x) * scale over the last axis.

    Args:
        x: [M, D] or [N, M, D].
        scale: [1, D] or [N, 1, D].
        eps: Added to the mean square.
    """
    if torch.compiler.is_compiling() or x.dtype != scale.dtype:
        return rms_norm_plain(x, scale, eps)
    return _RmsNorm.apply(x, scale, eps)


def rms_norm_plain(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    """Naive twin of `rms_norm`; statistics in the dtype of the scale."""
    wide = x.to(scale.dtype)
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * scale


def swiglu(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up of [..., 2F], whose first half is the gate."""
    if torch.compiler.is_compiling():
        return swiglu_plain(gate_up)
    return _SwiGlu.apply(gate_up)


def swiglu_plain(gate_up: Tensor) -> Tensor:
    """Naive twin of `swiglu`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


def split_heads(
    qkv_BTHC: Tensor, cos: Tensor, sin: Tensor, query_heads: int, key_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Split the joint projection and rotate queries and keys.

    Args:
        qkv_BTHC: [B, T, H + 2K, C].
        cos: [T, R] or [B, T, R].
        sin: Like `cos`.
        query_heads: H.
        key_heads: K.

    Returns:
        Queries [B, H, T, C], keys and values [B, K, T, C].
    """
    if torch.compiler.is_compiling():
        return split_heads_plain(qkv_BTHC, cos, sin, query_heads, key_heads)
    return _SplitHeads.apply(qkv_BTHC, cos, sin, query_heads, key_heads)


def split_heads_plain(
    qkv_BTHC: Tensor, cos: Tensor, sin: Tensor, query_heads: int, key_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Naive twin of `split_heads`."""
    q, k, v = qkv_BTHC.split((query_heads, key_heads, key_heads), dim=2)
    q, k = rope.rotate(q, cos, sin), rope.rotate(k, cos, sin)
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def embed_packed(ids_NM: Tensor, embedding_NVD: Tensor) -> Tensor:
    """Look up each model's ids in its own embedding: [N, M, D]."""
    return _EmbedPacked.apply(ids_NM, embedding_NVD)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, eps: float) -> Tensor:
        rstd = x.pow(2).mean(-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, scale, rstd)
        return (x * rstd).mul_(scale)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, None]:
        (grad,) = grad_outputs
        x, scale, rstd = ctx.saved_tensors
        unit = x * rstd
        product = grad * unit
        grad_scale = product.sum(-2, keepdim=True)
        mean = torch.matmul(product, scale.mT)
        mean.div_(-x.shape[-1])
        grad_x = torch.mul(grad, scale, out=product).addcmul_(unit, mean).mul_(rstd)
        return grad_x, grad_scale, None


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        (grad,) = grad_outputs
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        result = torch.empty_like(gate_up)
        grad_gate, grad_up = result.chunk(2, dim=-1)
        torch.mul(functional.silu(gate), grad, out=grad_up)
        torch.ops.aten.silu_backward(grad * up, gate, grad_input=grad_gate)
        return result


class _SplitHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, qkv_BTHC: Tensor, cos: Tensor, sin: Tensor, query_heads: int, key_heads: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        sizes = (query_heads, key_heads)
        turned = torch.empty_like(qkv_BTHC[:, :, : sum(sizes)])
        _rotate_into(turned, qkv_BTHC[:, :, : sum(sizes)], cos, sin)
        q, k = turned.split(sizes, dim=2)
        v = qkv_BTHC[:, :, sum(sizes) :]
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None, None, None]:
        grad_q, grad_k, grad_v = grad_outputs
        cos, sin = ctx.saved_tensors
        rows, heads, tokens, channels = grad_q.shape
        sizes = (heads, grad_k.shape[1], grad_v.shape[1])
        result = grad_q.new_empty(rows, tokens, sum(sizes), channels)
        q, k, v = result.split(sizes, dim=2)
        _rotate_into(q, grad_q.transpose(1, 2), cos, -sin)
        _rotate_into(k, grad_k.transpose(1, 2), cos, -sin)
        v.copy_(grad_v.transpose(1, 2))
        return result, None, None, None, None


def _rotate_into(result: Tensor, x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Write `rope.rotate(x, cos, sin)` into `result`, which may be a part of a larger tensor."""
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    low, high = x.chunk(2, dim=-1)
    result_low, result_high = result.chunk(2, dim=-1)
    # Two roundings of each product, as transformers does: addcmul would fuse one of them away, and
    # this is the only place where the logits on a CPU would not equal its own bit for bit.
    if result.dtype == cos.dtype:
        torch.mul(low, cos, out=result_low).sub_(high * sin)
        torch.mul(high, cos, out=result_high).add_(low * sin)
    else:
        result_low.copy_((low * cos).sub_(high * sin))
        result_high.copy_((high * cos).add_(low * sin))


class _EmbedPacked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids_NM: Tensor, embedding_NVD: Tensor) -> Tensor:
        models_N1 = torch.arange(ids_NM.shape[0], device=ids_NM.device).unsqueeze(1)
        ctx.save_for_backward(ids_NM + models_N1 * embedding_NVD.shape[1])
        ctx.shape = embedding_NVD.shape
        return embedding_NVD[models_N1, ids_NM]

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[None, Tensor]:
        (grad_NMD,) = grad_outputs
        (rows_NM,) = ctx.saved_tensors
        models, vocabulary, width = ctx.shape
        grad = torch.ops.aten.embedding_dense_backward(
            grad_NMD.reshape(-1, width), rows_NM.reshape(-1), models * vocabulary, -1, False
        )
        return None, grad.view(models, vocabulary, width)

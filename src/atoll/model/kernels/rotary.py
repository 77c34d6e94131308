"""Rotation of queries and keys out of, and back into, the joint projection.

Twin: `atoll.model.fused.split_heads_plain`.

Shapes: B rows (all models'), T tokens, H query heads, K key/value heads, C channels of one head,
R = C / 2 rotated pairs.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE_PAIRS = 1024


def split_heads(
    qkv_BTHC: Tensor, cos_TR: Tensor, sin_TR: Tensor, query_heads: int, key_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return rotated queries [B, H, T, C] and keys [B, K, T, C], and values [B, K, T, C].

    Args:
        qkv_BTHC: bfloat16 [B, T, H + 2K, C], contiguous; the values stay where they are in it.
        cos_TR: float32 [T, R], or [B, T, R] for positions of each row.
        sin_TR: Like `cos_TR`.
        query_heads: H.
        key_heads: K.
    """
    return _SplitHeads.apply(qkv_BTHC, cos_TR, sin_TR, query_heads, key_heads)


class _SplitHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, qkv_BTHC: Tensor, cos_TR: Tensor, sin_TR: Tensor, query_heads: int, key_heads: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos_TR, sin_TR)
        rotated = query_heads + key_heads
        turned = torch.empty_like(qkv_BTHC[:, :, :rotated])
        _rotate(turned, qkv_BTHC[:, :, :rotated], cos_TR, sin_TR, backwards=False)
        q, k = turned.split((query_heads, key_heads), dim=2)
        v = qkv_BTHC[:, :, rotated:]
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        cos_TR, sin_TR = ctx.saved_tensors
        q, k, v = (grad.transpose(1, 2) for grad in grads)
        sizes = (q.shape[2], k.shape[2], v.shape[2])
        result = q.new_empty(*q.shape[:2], sum(sizes), q.shape[3])
        to_q, to_k, to_v = result.split(sizes, dim=2)
        _rotate(to_q, q, cos_TR, sin_TR, backwards=True)
        _rotate(to_k, k, cos_TR, sin_TR, backwards=True)
        to_v.copy_(v)
        return result, None, None, None, None


def _rotate(
    result_BTHC: Tensor, x_BTHC: Tensor, cos_TR: Tensor, sin_TR: Tensor, *, backwards: bool
) -> None:
    if x_BTHC.stride(3) != 1:
        x_BTHC = x_BTHC.contiguous()
    rows, tokens, heads, channels = x_BTHC.shape
    pairs = channels // 2
    block_heads, block_pairs = triton.next_power_of_2(heads), triton.next_power_of_2(pairs)
    tile = max(1, TILE_PAIRS // (block_heads * block_pairs))
    atoll_rotary[(triton.cdiv(rows * tokens, tile),)](
        result_BTHC,
        *result_BTHC.stride()[:3],
        x_BTHC,
        *x_BTHC.stride()[:3],
        cos_TR,
        sin_TR,
        rows * tokens,
        tokens,
        tokens if cos_TR.dim() == 2 else rows * tokens,
        HEADS=heads,
        PAIRS=pairs,
        BLOCK_HEADS=block_heads,
        BLOCK_PAIRS=block_pairs,
        TILE=tile,
        BACKWARDS=backwards,
        num_warps=4,
    )


@triton.jit
def atoll_rotary(
    result,
    result_row_stride,
    result_token_stride,
    result_head_stride,
    x,
    x_row_stride,
    x_token_stride,
    x_head_stride,
    cos_SR,
    sin_SR,
    num_places,
    num_tokens,
    num_angles,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    TILE: tl.constexpr,
    BACKWARDS: tl.constexpr,
):
    places = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    heads = tl.arange(0, BLOCK_HEADS)
    pairs = tl.arange(0, BLOCK_PAIRS)
    known = (places < num_places)[:, None] & (pairs < PAIRS)[None, :]
    angles = (places % num_angles)[:, None] * PAIRS + pairs[None, :]
    cos = tl.load(cos_SR + angles, mask=known, other=0.0)[:, None, :]
    sin = tl.load(sin_SR + angles, mask=known, other=0.0)[:, None, :]
    if BACKWARDS:
        sin = -sin
    inside = known[:, None, :] & (heads < HEADS)[None, :, None]
    row, token = places // num_tokens, places % num_tokens
    x_at = (row * x_row_stride + token * x_token_stride)[:, None, None]
    x_at += heads[None, :, None] * x_head_stride + pairs[None, None, :]
    low = tl.load(x + x_at, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(x + x_at + PAIRS, mask=inside, other=0.0).to(tl.float32)
    to_at = (row * result_row_stride + token * result_token_stride)[:, None, None]
    to_at += heads[None, :, None] * result_head_stride + pairs[None, None, :]
    element = result.dtype.element_ty
    tl.store(result + to_at, (low * cos - high * sin).to(element), mask=inside)
    tl.store(result + to_at + PAIRS, (high * cos + low * sin).to(element), mask=inside)

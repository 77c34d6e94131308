"""Rotation of queries and keys out of, and back into, the joint projection.

Twin: `atoll.model.fused.split_heads_plain`.

Shapes: B rows (all models'), T tokens, H query heads, K key/value heads, C channels of one head,
R = C / 2 rotated pairs.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE_PAIRS = 512
WARPS = 1


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
        q, k = turned.split((query_heads, key_heads), dim=2)
        v = qkv_BTHC[:, :, rotated:]
        parts = qkv_BTHC.split((query_heads, key_heads, key_heads), dim=2)
        _rotate(turned, parts, cos_TR, sin_TR, backwards=False)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        cos_TR, sin_TR = ctx.saved_tensors
        parts = [grad.transpose(1, 2) for grad in grads]
        heads = sum(part.shape[2] for part in parts)
        rows, tokens, _, channels = parts[0].shape
        result = parts[0].new_empty(rows, tokens, heads, channels)
        _rotate(result, parts, cos_TR, sin_TR, backwards=True)
        return result, None, None, None, None


def _rotate(
    result_BTHC: Tensor,
    parts: Sequence[Tensor],
    cos_TR: Tensor,
    sin_TR: Tensor,
    *,
    backwards: bool,
) -> None:
    """Write queries and keys turned, then values as they are, as far as the result has heads."""
    q, k, v = (part if part.stride(3) == 1 else part.contiguous() for part in parts)
    rows, tokens, heads, channels = result_BTHC.shape
    pairs = channels // 2
    block_heads, block_pairs = triton.next_power_of_2(heads), triton.next_power_of_2(pairs)
    tile = max(1, TILE_PAIRS // (block_heads * block_pairs))
    atoll_rotary[(triton.cdiv(rows * tokens, tile),)](
        result_BTHC,
        *(place for part in (q, k, v) for place in (part, *part.stride()[:3])),
        cos_TR,
        sin_TR,
        rows * tokens,
        tokens,
        tokens if cos_TR.dim() == 2 else rows * tokens,
        HEADS=heads,
        QUERY_HEADS=q.shape[2],
        KEY_HEADS=k.shape[2],
        PAIRS=pairs,
        BLOCK_HEADS=block_heads,
        BLOCK_PAIRS=block_pairs,
        TILE=tile,
        BACKWARDS=backwards,
        num_warps=WARPS,
    )


@triton.jit
def atoll_rotary(
    result_BTHC,
    q,
    q_row,
    q_token,
    q_head,
    k,
    k_row,
    k_token,
    k_head,
    v,
    v_row,
    v_token,
    v_head,
    cos_SR,
    sin_SR,
    num_places,
    num_tokens,
    num_angles,
    HEADS: tl.constexpr,
    QUERY_HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    TILE: tl.constexpr,
    BACKWARDS: tl.constexpr,
):
    places = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    heads = tl.arange(0, BLOCK_HEADS)[None, :, None]
    pairs = tl.arange(0, BLOCK_PAIRS)
    known = (places < num_places)[:, None] & (pairs < PAIRS)[None, :]
    angles = (places % num_angles)[:, None] * PAIRS + pairs[None, :]
    turned = heads < QUERY_HEADS + KEY_HEADS
    cos = tl.load(cos_SR + angles, mask=known, other=0.0)[:, None, :]
    sin = tl.load(sin_SR + angles, mask=known, other=0.0)[:, None, :]
    cos = tl.where(turned, cos, 1.0)
    sin = tl.where(turned, sin, 0.0)
    if BACKWARDS:
        sin = -sin
    known = known[:, None, :]
    row, token = (places // num_tokens)[:, None, None], (places % num_tokens)[:, None, None]
    pairs = pairs[None, None, :]
    # Of three masked loads of one element two touch no memory.
    at = q + row * q_row + token * q_token + heads * q_head + pairs
    inside = known & (heads < QUERY_HEADS)
    low = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(at + PAIRS, mask=inside, other=0.0).to(tl.float32)
    at = k + row * k_row + token * k_token + (heads - QUERY_HEADS) * k_head + pairs
    inside = known & (heads >= QUERY_HEADS) & turned
    low += tl.load(at, mask=inside, other=0.0).to(tl.float32)
    high += tl.load(at + PAIRS, mask=inside, other=0.0).to(tl.float32)
    inside = known & (heads < HEADS)
    if HEADS > QUERY_HEADS + KEY_HEADS:
        at = v + row * v_row + token * v_token + (heads - QUERY_HEADS - KEY_HEADS) * v_head + pairs
        low += tl.load(at, mask=inside & (heads >= QUERY_HEADS + KEY_HEADS), other=0.0).to(
            tl.float32
        )
        high += tl.load(at + PAIRS, mask=inside & (heads >= QUERY_HEADS + KEY_HEADS), other=0.0).to(
            tl.float32
        )
    at = result_BTHC + (places * (HEADS * 2 * PAIRS))[:, None, None] + heads * (2 * PAIRS) + pairs
    element = result_BTHC.dtype.element_ty
    tl.store(at, (low * cos - high * sin).to(element), mask=inside)
    tl.store(at + PAIRS, (high * cos + low * sin).to(element), mask=inside)

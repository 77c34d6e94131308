"""Causal attention on CUDA whose gradients are the same bits every time.

torch leaves cuDNN aside in deterministic mode, because its backward pass adds in any order. The
forward pass does not, and it is the faster one, so it is kept, with the deterministic backward
pass of flash attention behind it; both write the same row sums.

Shapes: B rows (all models'), H heads, T tokens, C channels.
"""

from typing import Any

import torch
from torch import Tensor

from atoll.config.model import ModelConfig
from atoll.model import rope


def takes_exactly(config: ModelConfig) -> bool:
    """Return whether both halves take the shape; torch's own choice is exact for all others."""
    channels = rope.head_width(config)
    return config.kv_heads in (None, config.heads) and channels % 8 == 0 and channels <= 128


def exact_attention(q_BHTC: Tensor, k_BHTC: Tensor, v_BHTC: Tensor) -> Tensor:
    """Return softmax(q k / sqrt(C)) v, causal, [B, H, T, C]; twin of `attention`.

    Args:
        q_BHTC: bfloat16 queries, laid out as [B, T, ...]; C is at most 128.
        k_BHTC: Keys, as many heads.
        v_BHTC: Values.
    """
    return _ExactAttention.apply(q_BHTC, k_BHTC, v_BHTC)


class _ExactAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_BHTC: Tensor, k_BHTC: Tensor, v_BHTC: Tensor) -> Tensor:
        out_BHTC, lse_BHT1, _, _, _, _, seed, offset, _ = (
            torch.ops.aten._scaled_dot_product_cudnn_attention(
                q_BHTC, k_BHTC, v_BHTC, None, True, 0.0, True, False
            )
        )
        ctx.save_for_backward(q_BHTC, k_BHTC, v_BHTC, out_BHTC, lse_BHT1, seed, offset)
        return out_BHTC

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        q_BHTC, k_BHTC, v_BHTC, out_BHTC, lse_BHT1, seed, offset = ctx.saved_tensors
        rows, heads, tokens, _ = q_BHTC.shape
        return torch.ops.aten._scaled_dot_product_flash_attention_backward(
            grads[0],
            q_BHTC,
            k_BHTC,
            v_BHTC,
            out_BHTC,
            lse_BHT1.reshape(rows, heads, tokens),
            None,  # rows of one length need no list of where they begin
            None,
            tokens,
            tokens,
            0.0,
            True,
            seed,
            offset,
        )

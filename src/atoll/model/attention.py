"""Causal attention over folded rows, and the mask that keeps it inside documents.

Shapes: B rows (all models'), H query heads, K key/value heads, T queries, S keys, C channels.
"""

import torch
from torch import Tensor
from torch.nn import functional


def attention(
    q_BHTC: Tensor, k_BKSC: Tensor, v_BKSC: Tensor, *, mask_BTT: Tensor | None = None
) -> Tensor:
    """Return softmax(q k / sqrt(C)) v, [B, H, T, C].

    Args:
        q_BHTC: Queries; H is a multiple of K, and H / K neighbours share one key head.
        k_BKSC: Keys.
        v_BKSC: Values.
        mask_BTT: bool [B, 1, T, S], True where a query may look. Default: causal, and S is T.
    """
    shared = q_BHTC.shape[1] // k_BKSC.shape[1]
    if mask_BTT is not None and shared > 1:
        # No fused CUDA kernel takes a mask and shared heads; torch would fall back to the slow one.
        k_BKSC = k_BKSC.repeat_interleave(shared, dim=1)
        v_BKSC = v_BKSC.repeat_interleave(shared, dim=1)
        shared = 1
    return functional.scaled_dot_product_attention(
        q_BHTC,
        k_BKSC,
        v_BKSC,
        attn_mask=mask_BTT,
        is_causal=mask_BTT is None,
        enable_gqa=shared > 1,
    )


def document_mask(documents_BT: Tensor) -> Tensor:
    """Return bool [B, 1, T, T]: True where the key is not later and in the same document."""
    tokens = documents_BT.shape[-1]
    causal_TT = torch.ones(tokens, tokens, dtype=torch.bool, device=documents_BT.device).tril()
    same_BTT = documents_BT.unsqueeze(-1) == documents_BT.unsqueeze(-2)
    return (same_BTT & causal_TT).unsqueeze(1)

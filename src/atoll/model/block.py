"""One transformer block of N local models, and the products and norms that it is made of.

Shapes: N local models, B rows, T tokens, M = B * T, D width, V vocabulary, H query heads,
K key/value heads, C channels of one head, I and O inputs and outputs of a matrix.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from atoll.config.model import ModelConfig
from atoll.model import fused
from atoll.model.attention import attention


class Block(nn.Module):
    """One transformer block: attention, then SwiGLU, each on the normed residual stream."""

    def __init__(self, config: ModelConfig, parameter: Callable[[str], nn.Parameter]) -> None:
        super().__init__()
        self.query_heads = config.heads
        self.key_heads = config.kv_heads or config.heads
        self.norm_eps = config.norm_eps
        self.attention_norm = parameter("attention_norm")
        self.qkv = parameter("qkv")
        self.attention_out = parameter("attention_out")
        self.mlp_norm = parameter("mlp_norm")
        self.gate_up = parameter("gate_up")
        self.mlp_out = parameter("mlp_out")

    def forward(
        self, x: Tensor, tokens: int, cos: Tensor, sin: Tensor, mask: Tensor | None
    ) -> Tensor:
        q_BHTC, k_BKTC, v_BKTC = self.heads(x, tokens, cos, sin)
        return self.finish(x, attention(q_BHTC, k_BKTC, v_BKTC, mask_BTT=mask))

    def heads(
        self, x: Tensor, tokens: int, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return rotated queries and keys, and values: [B, heads, T, C] with N folded into B."""
        qkv = linear(norm(x, self.attention_norm, self.norm_eps), self.qkv)
        qkv_BTHC = qkv.view(-1, tokens, self.query_heads + 2 * self.key_heads, 2 * cos.shape[-1])
        return fused.split_heads(qkv_BTHC, cos, sin, self.query_heads, self.key_heads)

    def finish(self, x: Tensor, heads_BHTC: Tensor) -> Tensor:
        """Add the attention's output and the SwiGLU block to the residual stream."""
        joined = heads_BHTC.transpose(1, 2).reshape(*x.shape[:-1], -1)
        x = x + linear(joined, self.attention_out)
        gate_up = linear(norm(x, self.mlp_norm, self.norm_eps), self.gate_up)
        return x + linear(fused.swiglu(gate_up), self.mlp_out)


def linear(x: Tensor, weight_NOI: Tensor) -> Tensor:
    """Multiply [M, I] by one model's matrix, or [N, M, I] by those of N models."""
    if weight_NOI.shape[0] == 1:
        return functional.linear(x, weight_NOI.squeeze(0))
    return torch.bmm(x, weight_NOI.transpose(1, 2))


def norm(x: Tensor, scale_ND: Tensor, eps: float) -> Tensor:
    """RMSNorm of [M, D] by one model's scales, or of [N, M, D] by those of N models."""
    return fused.rms_norm(x, scale_ND if scale_ND.shape[0] == 1 else scale_ND.unsqueeze(1), eps)


def embed(ids_NM: Tensor, embedding_NVD: Tensor) -> Tensor:
    """Look token ids up: [M, D] for one model, [N, M, D] for several."""
    if embedding_NVD.shape[0] == 1:
        return functional.embedding(ids_NM.squeeze(0), embedding_NVD.squeeze(0))
    return fused.embed_packed(ids_NM, embedding_NVD)

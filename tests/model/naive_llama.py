"""Llama written the plain way, for one model in any float type; and transformers' as an oracle.

Shapes: B rows, T tokens, D width, H heads, K key/value heads, C channels, V vocabulary.
"""

import torch
from torch.nn import functional

from atoll.config.model import ModelConfig
from atoll.model.huggingface import foreign_tensors
from atoll.model.llama import Llama
from atoll.model.rope import head_width
from atoll.model.translate import write_config

SMALL = ModelConfig(
    vocab_size=131, layers=2, width=48, heads=6, kv_heads=2, ffn_width=80, context_length=32
)
"""Grouped heads, tied, and no size that is a power of two."""


def weights_of(model: Llama, index: int = 0, dtype=torch.float64) -> dict[str, torch.Tensor]:
    """Return leaf copies of one model's weights by canonical name."""
    return {
        name: view[index].detach().to(dtype, copy=True).requires_grad_()
        for name, view in model.arena.named().items()
    }


def naive_logits(config, weights, inputs_BT, positions_BT=None, documents_BT=None):
    """Return [B, T, V]."""
    rows, tokens = inputs_BT.shape
    heads, keys, channels = config.heads, config.kv_heads or config.heads, head_width(config)
    if positions_BT is None:
        positions_BT = torch.arange(tokens).expand(rows, tokens)
    may_see = torch.ones(tokens, tokens).tril().bool().expand(rows, 1, tokens, tokens)
    if documents_BT is not None:
        same = documents_BT[:, :, None] == documents_BT[:, None, :]
        may_see = may_see & same[:, None]
    x = weights["embedding"][inputs_BT]
    exponents = torch.arange(0, channels, 2, dtype=torch.float64) / channels
    angles = positions_BT[..., None].double() * config.rope_theta**-exponents
    turn = torch.polar(torch.ones_like(angles), angles)[:, :, None].to(
        torch.complex128 if x.dtype == torch.float64 else torch.complex64
    )

    def norm(x, scale):
        return x / (x.pow(2).mean(-1, keepdim=True) + config.norm_eps).sqrt() * scale

    def rotate(x_BTHC):
        half = channels // 2
        z = torch.complex(x_BTHC[..., :half], x_BTHC[..., half:]) * turn
        return torch.cat((z.real, z.imag), -1)

    for layer in range(config.layers):
        own = {n.removeprefix(f"layers.{layer}."): w for n, w in weights.items()}
        qkv = norm(x, own["attention_norm"]) @ own["qkv"].T
        q, k, v = (
            part.reshape(rows, tokens, -1, channels)
            for part in qkv.split((heads * channels, keys * channels, keys * channels), -1)
        )
        q, k = rotate(q), rotate(k).repeat_interleave(heads // keys, 2)
        v = v.repeat_interleave(heads // keys, 2)
        scores = torch.einsum("bthc,bshc->bhts", q, k) / channels**0.5
        share = scores.masked_fill(~may_see, -torch.inf).softmax(-1)
        mixed = torch.einsum("bhts,bshc->bthc", share, v).reshape(rows, tokens, -1)
        x = x + mixed @ own["attention_out"].T
        gate, up = (norm(x, own["mlp_norm"]) @ own["gate_up"].T).chunk(2, -1)
        x = x + (gate * torch.sigmoid(gate) * up) @ own["mlp_out"].T
    return norm(x, weights["norm"]) @ weights.get("head", weights["embedding"]).T


def naive_loss(config, weights, inputs_BT, targets_BT, weights_BT=None, **where):
    """Return the weighted sum of cross-entropies."""
    logits = naive_logits(config, weights, inputs_BT, **where)
    losses = functional.cross_entropy(
        logits.flatten(0, 1), targets_BT.flatten(), ignore_index=-100, reduction="none"
    )
    return (losses if weights_BT is None else losses * weights_BT.flatten()).sum()


def transformers_twin(model: Llama, *, attention: str = "sdpa", dtype=torch.float32):
    """Return transformers' LlamaForCausalLM with the weights of a single model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    facts = write_config(model.config, dtype="float32")
    config = LlamaConfig(**facts, bos_token_id=None, eos_token_id=None)
    config._attn_implementation = attention
    twin = LlamaForCausalLM(config).to(dtype)
    missing, unexpected = twin.load_state_dict(foreign_tensors(model, dtype=dtype), strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    twin.tie_weights()
    return twin.eval()


def random_tokens(config: ModelConfig, *shape: int, seed: int = 0) -> torch.Tensor:
    """Return int64 ids of the given shape."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, config.vocab_size, shape, generator=generator)


def add_noise(model: Llama) -> None:
    """Make the models differ, norm scales included."""
    generator = torch.Generator().manual_seed(7)
    noise = torch.randn(model.arena.data_NP.shape, generator=generator)
    model.arena.data_NP.add_(noise, alpha=0.02)

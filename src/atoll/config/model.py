"""Section `model`: the shape of a Llama-architecture model."""

from pydantic import Field

from atoll.config.base import Section


class ModelConfig(Section):
    vocab_size: int = Field(32_000, ge=2, le=1 << 24)
    """Rows of the embedding; at least the tokenizer's size."""
    layers: int = Field(8, ge=1)
    """Transformer blocks."""
    width: int = Field(320, ge=2)
    """Size of the residual stream; a multiple of `heads`, with an even quotient."""
    heads: int = Field(5, ge=1)
    """Query heads."""
    kv_heads: int | None = Field(None, ge=1)
    """Key and value heads; divides `heads`. Default: as many as `heads`."""
    ffn_width: int = Field(896, ge=1)
    """Hidden size of the SwiGLU block."""
    context_length: int = Field(1024, ge=1)
    """Inputs of one training sequence."""
    rope_theta: float = Field(10_000.0, gt=0)
    """Base of the rotary position angles."""
    norm_eps: float = Field(1e-5, gt=0)
    """Added to the mean square inside RMSNorm."""
    init_std: float = Field(0.02, gt=0)
    """Standard deviation of the initial normal weights."""
    tied_embeddings: bool = True
    """Whether the output projection is the embedding."""

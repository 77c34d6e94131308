"""Section `model`: the shape of a Llama-architecture model."""

from typing import Literal

from pydantic import Field

from atoll.config.base import Section


class LinearRopeScaling(Section):
    """Positions divided by a factor."""

    kind: Literal["linear"]
    factor: float = Field(gt=0)
    """Divisor of every rotary frequency."""


class Llama3RopeScaling(Section):
    """Long wavelengths stretched, short ones kept, a ramp between (Llama 3.1)."""

    kind: Literal["llama3"]
    factor: float = Field(gt=0)
    """Divisor of the frequencies whose wavelength is long."""
    low_freq_factor: float = Field(gt=0)
    """Wavelengths above `original_context_length` over this are divided in full."""
    high_freq_factor: float = Field(gt=0)
    """Wavelengths below `original_context_length` over this are kept; above `low_freq_factor`."""
    original_context_length: int = Field(ge=1)
    """Context that the model was pretrained with, in tokens."""


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
    head_width: int | None = Field(None, ge=2)
    """Size of one head; even. Default: `width` divided by `heads`."""
    ffn_width: int = Field(896, ge=1)
    """Hidden size of the SwiGLU block."""
    context_length: int = Field(1024, ge=1)
    """Inputs of one training sequence."""
    rope_theta: float = Field(10_000.0, gt=0)
    """Base of the rotary position angles."""
    rope_scaling: LinearRopeScaling | Llama3RopeScaling | None = Field(None, discriminator="kind")
    """How a pretrained model's angles were stretched to a longer context; null leaves them."""
    norm_eps: float = Field(1e-5, gt=0)
    """Added to the mean square inside RMSNorm."""
    init_std: float = Field(0.02, gt=0)
    """Standard deviation of the initial normal weights."""
    tied_embeddings: bool = True
    """Whether the output projection is the embedding."""

"""Section `model`: the shape of a Llama-architecture model."""

from collections.abc import Iterator
from typing import Literal, Self

from pydantic import Field, model_validator

from atoll.config.base import BrokenRule, Section, refuse


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
    """The shape of a Llama-architecture model."""

    vocab_size: int = Field(default=32_000, ge=2, le=1 << 24)
    """Rows of the embedding; at least the tokenizer's size."""
    layers: int = Field(default=8, ge=1)
    """Transformer blocks."""
    width: int = Field(default=320, ge=2)
    """Size of the residual stream; a multiple of `heads`, with an even quotient."""
    heads: int = Field(default=5, ge=1)
    """Query heads."""
    kv_heads: int | None = Field(default=None, ge=1)
    """Key and value heads; divides `heads`. Default: as many as `heads`."""
    head_width: int | None = Field(default=None, ge=2)
    """Size of one head; even. Default: `width` divided by `heads`."""
    ffn_width: int = Field(default=896, ge=1)
    """Hidden size of the SwiGLU block."""
    context_length: int = Field(default=1024, ge=1)
    """Inputs of one training sequence."""
    rope_theta: float = Field(default=10_000.0, gt=0)
    """Base of the rotary position angles."""
    rope_scaling: LinearRopeScaling | Llama3RopeScaling | None = Field(
        default=None, discriminator="kind"
    )
    """How a pretrained model's angles were stretched to a longer context; null leaves them."""
    norm_eps: float = Field(default=1e-5, gt=0)
    """Added to the mean square inside RMSNorm."""
    init_std: float = Field(default=0.02, gt=0)
    """Standard deviation of the initial normal weights."""
    tied_embeddings: bool = True
    """Whether the output projection is the embedding."""
    residual: Literal["float32", "bfloat16"] = "float32"
    """Type of the residual stream under bf16 autocast; bfloat16 rounds every sum and moves fewer \
bytes."""

    @model_validator(mode="after")
    def _hold_rules(self) -> Self:
        refuse(_broken_rules(self))
        return self


def parameter_count(config: ModelConfig) -> int:
    """Return the unique trainable parameters of one model; a tied embedding counts once."""
    head_width = config.head_width or config.width // config.heads
    query = config.width * config.heads * head_width
    key = config.width * (config.kv_heads or config.heads) * head_width
    # Query and output, key and value; gate, up and down; two norm scales.
    block = 2 * query + 2 * key + 3 * config.width * config.ffn_width + 2 * config.width
    embeddings = config.vocab_size * config.width * (1 if config.tied_embeddings else 2)
    return embeddings + config.layers * block + config.width


def _broken_rules(model: ModelConfig) -> Iterator[BrokenRule]:
    width, heads = model.width, model.heads
    if model.head_width is None and (width % heads or width // heads % 2):
        unit = 2 * heads
        below, above = width // unit * unit, -(-width // unit) * unit
        near = " or ".join(str(fit) for fit in (below, above) if fit)
        yield BrokenRule(
            ("width", "heads", "head_width"),
            f"model.width {width} does not split into {heads} model.heads of one even size. "
            f"Set model.width to {near}, or give model.head_width.",
        )
    if model.head_width is not None and model.head_width % 2:
        yield BrokenRule(
            ("head_width",),
            f"model.head_width {model.head_width} is odd; rotary positions turn pairs. "
            f"Set it to {model.head_width - 1} or {model.head_width + 1}.",
        )
    if model.kv_heads is not None and heads % model.kv_heads:
        fits = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        yield BrokenRule(
            ("heads", "kv_heads"),
            f"model.kv_heads {model.kv_heads} does not divide model.heads {heads}. "
            f"Set it to one of {fits}.",
        )

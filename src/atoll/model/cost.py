"""What a model costs in floating-point operations and bytes, before anything runs.

Shapes: N local models, V vocabulary, D width, F FFN width, H query heads, K key/value heads,
C channels of one head, M = rows * tokens of one microbatch of one model.
"""

from dataclasses import dataclass

from atoll.config.model import ModelConfig, parameter_count
from atoll.model import rope
from atoll.model.loss import default_piece_rows


def forward_flops(config: ModelConfig, *, context_length: int | None = None) -> float:
    """Return the operations of one target's forward, a multiply and an add counted as two.

    Matrix products and causal attention count; element-wise work does not.

    Args:
        config: The shape.
        context_length: Tokens of a row; a query sees half of them on average. Default: the
            model's own.
    """
    tokens = context_length or config.context_length
    heads, channels = config.heads, rope.head_width(config)
    keys = config.kv_heads or heads
    per_layer = (
        2 * config.width * (heads + 2 * keys) * channels
        + 2 * heads * channels * config.width
        + 6 * config.width * config.ffn_width
        + 2 * tokens * heads * channels
    )
    return float(config.layers * per_layer + 2 * config.width * config.vocab_size)


def training_flops(config: ModelConfig, *, context_length: int | None = None) -> float:
    """Return the operations of one target's forward and backward: three times the forward."""
    return 3 * forward_flops(config, context_length=context_length)


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one training process on its device, by what they are for.

    Attributes:
        weights: All N models, float32.
        gradients: As many.
        moments: Two per weight, float32.
        activations: What the forward of one microbatch keeps for its backward.
        loss: One piece of logits and the gradients that the loss forms.
    """

    weights: int
    gradients: int
    moments: int
    activations: int
    loss: int

    @property
    def total(self) -> int:
        """Sum of all parts; the allocator and the device's runtime come on top."""
        return self.weights + self.gradients + self.moments + self.activations + self.loss


def training_memory(
    config: ModelConfig,
    *,
    micro_batch_size: int,
    num_models: int = 1,
    narrow: bool = False,
    device_type: str = "cpu",
) -> Memory:
    """Estimate the peak of one update.

    Args:
        config: The shape.
        micro_batch_size: Rows of one backward of one model.
        num_models: N; all of them run at once.
        narrow: Whether matrix products run in bfloat16 under autocast.
        device_type: "cpu", "cuda", ...; decides the size of a piece of logits.
    """
    parameters = 4 * num_models * parameter_count(config)
    rows = num_models * micro_batch_size * config.context_length
    piece = num_models * default_piece_rows(num_models, config.vocab_size, device_type=device_type)
    piece = min(rows, piece)
    logit_bytes = 6 if narrow else 4  # bfloat16, and float32 for the statistics
    head = 4 * num_models * config.vocab_size * config.width
    return Memory(
        weights=parameters,
        gradients=parameters,
        moments=2 * parameters,
        activations=rows * activation_bytes(config, narrow=narrow),
        loss=piece * config.vocab_size * logit_bytes
        + 4 * rows * config.width
        + head
        + (head // 2 if narrow else 0),
    )


def activation_bytes(config: ModelConfig, *, narrow: bool) -> int:
    """Return the bytes that the eager forward of one token keeps for the backward.

    Per layer: the residual stream before either block, both normed copies, the joint projection,
    rotated queries and keys, attention's output and row sums, gate and up, and their product.
    """
    wide, element = 4, 2 if narrow else 4
    heads, channels = config.heads, rope.head_width(config)
    keys = config.kv_heads or heads
    per_layer = (
        2 * config.width * wide
        + 2 * config.width * element
        + (heads + 2 * keys) * channels * element
        + (heads + keys) * channels * element
        + heads * channels * element
        + heads * wide
        + 3 * config.ffn_width * element
    )
    return config.layers * per_layer + 2 * config.width * wide

"""What a model costs in floating-point operations and bytes, before anything runs.

Shapes: N local models, V vocabulary, D width, F FFN width, H query heads, K key/value heads,
C channels of one head, M = rows * tokens of one microbatch of one model.
"""

from dataclasses import dataclass
from typing import Literal

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
    element = 2 if narrow else 4
    wide = _residual_size(config, element)
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


Term = Literal["gemm", "attention", "loss", "elementwise", "optimizer_mixing"]

NORM_READ, UPDATE_READ, UPDATE_WRITE = 4, 16, 12
"""Bytes a parameter: the gradient for its norm; weight, gradient and both moments for the update;
weight and both moments written. Mixing in the same pass adds none."""


@dataclass(frozen=True, slots=True)
class Part:
    """What one kernel of an update must do at least, for each target.

    Attributes:
        term: What it counts as.
        name: Which kernel; all layers together.
        flops: Operations, a multiply and an add counted as two; 0 for element-wise work.
        moved_bytes: Bytes read and written.
        absorbable: Whether a matrix product next to it could do it on values that it holds anyway,
            at no bytes of its own.
    """

    term: Term
    name: str
    flops: float
    moved_bytes: float
    absorbable: bool = False


def update_parts(
    config: ModelConfig, *, local_targets: int, micro_targets: int, narrow: bool
) -> list[Part]:
    """Return the least that one update asks of a device, kernel by kernel, for each target.

    A kernel reads each input and writes each output once, and what lies next to each other is
    fused: adding to the residual stream and its norm, one pass over the logits that leaves their
    gradient in place, one pass for clipping, update and mixing. Not in it: zeroing gradients,
    narrowing weights, row statistics and token ids, which a program can avoid or which are tiny.

    Args:
        config: The shape of one model.
        local_targets: Targets of one model in one update; its weights are updated once for them.
        micro_targets: Targets of one model in one backward; M. Divides `local_targets`.
        narrow: Whether matrix products run in bfloat16 under autocast.
    """
    element = 2 if narrow else 4
    return [
        *_products(config, local_targets, micro_targets, element),
        *_attention_parts(config, element),
        *_loss_parts(config, element),
        *_elementwise_parts(config, element),
        Part(
            "optimizer_mixing",
            "norm, clip, AdamW, mixing",
            0.0,
            (NORM_READ + UPDATE_READ + UPDATE_WRITE) * parameter_count(config) / local_targets,
        ),
    ]


def _products(
    config: ModelConfig, local_targets: int, micro_targets: int, element: int
) -> list[Part]:
    """Count three products for each matrix: forward, gradient of the input, of the weight.

    Each has 2 I O operations a target. Of I inputs and O outputs a target, the first reads I and
    writes O, the second the reverse, the third reads both; the first two also read the matrix, the
    third writes its float32 gradient, and reads it as well from the second microbatch on.
    """
    heads, channels = config.heads, rope.head_width(config)
    keys = config.kv_heads or heads
    shapes = {
        "qkv": (config.layers, config.width, (heads + 2 * keys) * channels),
        "attention_out": (config.layers, heads * channels, config.width),
        "gate_up": (config.layers, config.width, 2 * config.ffn_width),
        "mlp_out": (config.layers, config.ffn_width, config.width),
        "head": (1, config.width, config.vocab_size),
    }
    microbatches = local_targets / micro_targets
    parts = []
    for name, (count, inputs, outputs) in shapes.items():
        size = inputs * outputs
        moved = element * (inputs + outputs)
        matrix = element * size / micro_targets
        gradient = 4 * size * (2 * microbatches - 1) / local_targets
        for what, weight_bytes in (
            ("forward", matrix),
            ("input gradient", matrix),
            ("weight gradient", gradient),
        ):
            parts.append(
                Part("gemm", f"{name} {what}", 2.0 * count * size, count * (moved + weight_bytes))
            )
    return parts


def _attention_parts(config: ModelConfig, element: int) -> list[Part]:
    """Count causal attention: two products of T/2 keys a query forward, five backward.

    One of the five repeats the scores, which are never stored. Forward reads queries, keys and
    values and writes the output and a float32 row sum for each head; backward reads these and the
    output's gradient and writes three gradients, with one more number for each row and head.
    """
    heads, channels = config.heads, rope.head_width(config)
    query, key = heads * channels, (config.kv_heads or heads) * channels
    product = float(config.context_length * query)
    forward = element * (2 * query + 2 * key) + 4 * heads
    backward = element * (4 * query + 4 * key) + 12 * heads
    return [
        Part("attention", "forward", 2 * product * config.layers, config.layers * forward),
        Part("attention", "backward", 5 * product * config.layers, config.layers * backward),
    ]


def _loss_parts(config: ModelConfig, element: int) -> list[Part]:
    """Count one pass over the logits, which reads them and writes their gradient over them."""
    return [Part("loss", "one pass", 0.0, 2.0 * element * config.vocab_size, absorbable=True)]


def _elementwise_parts(config: ModelConfig, element: int) -> list[Part]:
    """Count fused passes over the residual stream, and over what the products hand on.

    A norm forward reads the stream and a block's output and writes the stream and its normed copy;
    backward it reads the copy's gradient, the stream and the stream's gradient and writes the
    latter, once more in the products' type where that is narrower. There is one norm more than
    blocks' outputs: the first one adds nothing, and behind the last one the stream ends.
    Embedding rows are read and written; backward a row is added to the gradient's, float32.
    """
    wide = _residual_size(config, element)
    copy = element if element < wide else 0
    width, ffn, blocks = config.width, config.ffn_width, 2 * config.layers
    heads, channels = config.heads, rope.head_width(config)
    turned = 2 * element * (heads + (config.kv_heads or heads)) * channels
    norm_forward = blocks * (2 * wide + 2 * element) + wide + element
    norm_backward = blocks * (3 * wide + element + copy) + 2 * wide + element
    parts = {
        "add and norm forward": (norm_forward * width, False),
        "add and norm backward": (norm_backward * width, False),
        "rotary forward": (config.layers * turned, True),
        "rotary backward": (config.layers * turned, True),
        "SwiGLU forward": (config.layers * 3 * element * ffn, True),
        "SwiGLU backward": (config.layers * 5 * element * ffn, True),
        "embedding": ((3 * wide + 2 * 4) * width, False),
    }
    return [
        Part("elementwise", name, 0.0, float(moved), absorbable)
        for name, (moved, absorbable) in parts.items()
    ]


def _residual_size(config: ModelConfig, element: int) -> int:
    """Return the bytes of one number of the residual stream."""
    return element if config.residual == "bfloat16" else 4

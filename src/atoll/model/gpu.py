"""Training and scoring of `Llama` on a GPU in bfloat16, through kernels that pass over data once.

Same names and numbers as the plain forward under autocast: float32 weights, norms and statistics,
and residual stream unless the recipe narrows it; bfloat16 products. Gradients of matrices leave
their products in float32, straight into the arena.

Shapes: N local models, B rows, T tokens, M = B * T, R = N * M rows of all models, D width,
V vocabulary, I and O inputs and outputs of a matrix, c rows of one piece.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from atoll.model.attention import attention
from atoll.model.exact_attention import exact_attention, takes_exactly
from atoll.tensors import IGNORE

if TYPE_CHECKING:
    from atoll.model.llama import Llama

LOGITS_SHARE = 8
"""The logits of one piece take at most 1 / LOGITS_SHARE of the device's memory."""
SMALLEST_MEMORY = 8 << 30
"""Bytes of a device that does not tell."""


def loss(
    model: "Llama",
    inputs_NBT: Tensor,
    targets_NBT: Tensor,
    weights_NBT: Tensor | None = None,
    positions_NBT: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return what `Llama.forward` does; nothing of it has a gradient."""
    with torch.no_grad():
        x_NMD, narrow_NP = _features(model, inputs_NBT, positions_NBT, add=False)
        head_NVD = model.arena.cut(narrow_NP, _head(model))
        ids_NM, weights_NM = _counted(model, targets_NBT, weights_NBT)
        sums_N = _losses(x_NMD, head_NVD, ids_NM, weights_NM, weights_NM)
    return sums_N, weights_NM.sum(-1)


def gradients(
    model: "Llama",
    inputs_NBT: Tensor,
    targets_NBT: Tensor,
    weights_NBT: Tensor | None = None,
    positions_NBT: Tensor | None = None,
    *,
    divisor_N: Tensor,
    add: bool,
) -> Tensor:
    """Leave the gradients of every model's loss sum / divisor in the arena; return the sums [N].

    Args:
        model: On a CUDA device, trainable.
        inputs_NBT: int64 token ids.
        targets_NBT: int64 ids of the next tokens, IGNORE where not counted.
        weights_NBT: float32 weight of each target. Default: 1 for each counted target.
        positions_NBT: Positions within the document. Default: 0 ... T-1 in every row.
        divisor_N: float32 divisors.
        add: Whether the gradients are added to those that are there, or replace them.
    """
    arena = model.arena
    if not add:  # matrices are written whole; what is added to has to start from zero
        arena.grad_NP[:, arena.decay_size :].zero_()
        if model.head is not None:
            arena.grad_view("embedding").zero_()
    x_NMD, narrow_NP = _features(model, inputs_NBT, positions_NBT, add=add)
    ids_NM, weights_NM = _counted(model, targets_NBT, weights_NBT)
    grad_x_NMD = torch.empty_like(x_NMD)
    with torch.no_grad():
        sums_N = _losses(
            x_NMD,
            arena.cut(narrow_NP, _head(model)),
            ids_NM,
            weights_NM,
            weights_NM / divisor_N[:, None],
            grad_x_NMD=grad_x_NMD,
            grad_NVD=arena.grad_view(_head(model)),
            add=add,
        )
    torch.autograd.backward(x_NMD, grad_x_NMD)
    return sums_N


def _features(
    model: "Llama", inputs_NBT: Tensor, positions_NBT: Tensor | None, *, add: bool
) -> tuple[Tensor, Tensor]:
    """Return the normed residual stream, bfloat16 [N, M, D], and all weights narrow, [N, P]."""
    from atoll.model.kernels.add_norm import add_norm
    from atoll.model.kernels.rotary import split_heads
    from atoll.model.kernels.swiglu import swiglu

    models, rows, tokens = inputs_NBT.shape
    if positions_NBT is not None:
        positions_NBT = positions_NBT.reshape(models * rows, tokens)
    cos, sin = model.angles(positions_NBT, tokens)
    arena, width, eps = model.arena, model.config.width, model.config.norm_eps
    narrow_NP = arena.data_NP.to(torch.bfloat16)

    def product(x: Tensor, name: str) -> Tensor:
        sink = arena.grad_view(name) if arena.grad_NP.numel() else None
        return _Product.apply(
            x.view(models, rows * tokens, -1), arena.cut(narrow_NP, name), sink, add
        )

    exact = torch.are_deterministic_algorithms_enabled() and inputs_NBT.is_cuda
    attend = exact_attention if exact and takes_exactly(model.config) else attention
    x_RD = _Embed.apply(
        inputs_NBT.reshape(models, -1),
        model.embedding,
        arena.cut(narrow_NP, "embedding") if model.config.residual == "bfloat16" else None,
    ).view(-1, width)
    delta_RD = None
    for layer, block in enumerate(model.blocks):
        x_RD, normed = add_norm(x_RD, delta_RD, block.attention_norm, eps)
        qkv = product(normed, f"layers.{layer}.qkv")
        heads = block.query_heads + 2 * block.key_heads
        qkv_BTHC = qkv.view(models * rows, tokens, heads, 2 * cos.shape[-1])
        q, k, v = split_heads(qkv_BTHC, cos, sin, block.query_heads, block.key_heads)
        joined = attend(q, k, v).transpose(1, 2).reshape(models * rows * tokens, -1)
        delta = product(joined, f"layers.{layer}.attention_out")
        x_RD, normed = add_norm(x_RD, delta.view(-1, width), block.mlp_norm, eps)
        gate_up = product(normed, f"layers.{layer}.gate_up")
        delta_RD = product(swiglu(gate_up), f"layers.{layer}.mlp_out").view(-1, width)
    _, normed = add_norm(x_RD, delta_RD, model.norm, eps)
    return normed.view(models, -1, width), narrow_NP


def _counted(
    model: "Llama", targets_NBT: Tensor, weights_NBT: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return ids inside the vocabulary and float32 weights, 0 where not counted: [N, M] each."""
    models = model.arena.num_models
    targets_NM = targets_NBT.reshape(models, -1)
    counted_NM = targets_NM != IGNORE
    ids_NM = torch.where(counted_NM, targets_NM, 0)
    if weights_NBT is None:
        return ids_NM, counted_NM.to(torch.float32)
    return ids_NM, weights_NBT.reshape(models, -1) * counted_NM


def _losses(
    x_NMD: Tensor,
    head_NVD: Tensor,
    ids_NM: Tensor,
    weights_NM: Tensor,
    scaled_NM: Tensor,
    *,
    grad_x_NMD: Tensor | None = None,
    grad_NVD: Tensor | None = None,
    add: bool = False,
) -> Tensor:
    """Return the weighted loss sums [N]; write the gradients of those weighted by `scaled_NM`.

    Args:
        x_NMD: bfloat16 features.
        head_NVD: bfloat16 output projection.
        ids_NM: Targets.
        weights_NM: What the returned sums are weighted by.
        scaled_NM: What the gradients are weighted by.
        grad_x_NMD: Takes the gradient to the features; None for no gradients.
        grad_NVD: Takes, or is added, the gradient to the projection.
        add: Whether that one is added to.
    """
    from atoll.model.kernels.cross_entropy import cross_entropy

    models, vocabulary, _ = head_NVD.shape
    piece_rows = _piece_rows(head_NVD)
    sums_N = weights_NM.new_zeros(models)
    for start in range(0, x_NMD.shape[1], piece_rows):
        rows = slice(start, start + piece_rows)
        logits_NcV = torch.bmm(x_NMD[:, rows], head_NVD.mT)
        losses_R = cross_entropy(
            logits_NcV.view(-1, vocabulary),
            ids_NM[:, rows].reshape(-1),
            scaled_NM[:, rows].reshape(-1),
            with_grad=grad_x_NMD is not None,
        )
        sums_N += (losses_R.view(models, -1) * weights_NM[:, rows]).sum(-1)
        if grad_x_NMD is not None and grad_NVD is not None:  # the logits are gradients by now
            if piece_rows >= x_NMD.shape[1]:
                torch.bmm(logits_NcV, head_NVD, out=grad_x_NMD)
            else:
                grad_x_NMD[:, rows] = torch.bmm(logits_NcV, head_NVD)
            _add_product(grad_NVD, logits_NcV.mT, x_NMD[:, rows], add=add or start > 0)
    return sums_N


def _piece_rows(head_NVD: Tensor) -> int:
    """Return the rows of each model whose logits fit their share of the device's memory."""
    models, vocabulary, _ = head_NVD.shape
    total_bytes = SMALLEST_MEMORY
    if head_NVD.is_cuda:
        total_bytes = torch.cuda.get_device_properties(head_NVD.device).total_memory
    return max(256, total_bytes // LOGITS_SHARE // (2 * models * vocabulary))


def _head(model: "Llama") -> str:
    return "embedding" if model.head is None else "head"


class _Product(torch.autograd.Function):
    """x @ W^T of N models in bfloat16; the gradient of W goes into a float32 tensor at once."""

    @staticmethod
    def forward(
        ctx: Any, x_NMI: Tensor, narrow_NOI: Tensor, sink_NOI: Tensor | None, add: bool
    ) -> Tensor:
        ctx.save_for_backward(x_NMI, narrow_NOI)
        ctx.sink_NOI, ctx.add = sink_NOI, add
        return torch.bmm(x_NMI, narrow_NOI.mT)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        x_NMI, narrow_NOI = ctx.saved_tensors
        (grad_NMO,) = grads
        _add_product(ctx.sink_NOI, grad_NMO.mT, x_NMI, add=ctx.add)
        return torch.bmm(grad_NMO, narrow_NOI), None, None, None


def _add_product(sink: Tensor, left: Tensor, right: Tensor, *, add: bool) -> None:
    """Write left @ right into a float32 tensor, or add it, as it leaves the matrix unit."""
    if not left.is_cuda:  # under triton's interpreter; CPU kernels do not widen
        product = torch.bmm(left.float(), right.float())
        sink.copy_(sink + product if add else product)
    elif add:
        torch.baddbmm(sink, left, right, out_dtype=torch.float32, out=sink)
    else:
        torch.bmm(left, right, out_dtype=torch.float32, out=sink)


class _Embed(torch.autograd.Function):
    """Rows of each model's embedding, or of its narrow copy; gradients go into the arena."""

    @staticmethod
    def forward(
        ctx: Any, ids_NM: Tensor, embedding_NVD: Tensor, narrow_NVD: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(ids_NM)
        ctx.sink_NVD = embedding_NVD.grad
        rows_NVD = embedding_NVD if narrow_NVD is None else narrow_NVD
        if len(rows_NVD) == 1:
            return functional.embedding(ids_NM, rows_NVD[0])
        first_N1 = torch.arange(len(rows_NVD), device=ids_NM.device).unsqueeze(1)
        return rows_NVD[first_N1, ids_NM]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        from atoll.model.kernels.embedding import add_rows

        (grad_NMD,) = grads
        (ids_NM,) = ctx.saved_tensors
        add_rows(ctx.sink_NVD, ids_NM, grad_NMD.contiguous())
        return None, None, None

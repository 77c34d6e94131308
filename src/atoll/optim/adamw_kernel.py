"""Clipping, AdamW and mixing in one pass over weights, gradients and moments (Triton).

Twin: `atoll.optim.adamw.mix` and `reference_step`.

Shapes: N local models, P parameters of one model, C columns of one tile.
"""

import triton
import triton.language as tl
from torch import Tensor

TILE_ELEMENTS = 2048


def adamw(
    data_NP: Tensor,
    grad_NP: Tensor,
    exp_avg_NP: Tensor,
    exp_avg_sq_NP: Tensor,
    scalars_3: Tensor,
    *,
    decay_size: int,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    factor_N: Tensor | None,
    shares_NN: Tensor | None,
    before: bool,
    skip: Tensor | None,
) -> None:
    """Update weights and moments in place.

    Args:
        data_NP: float32, contiguous, as the next three.
        grad_NP: Gradients, which stay as they are.
        exp_avg_NP: First moments.
        exp_avg_sq_NP: Second moments.
        scalars_3: float32 on the device: rate, rate / (1 - beta1^step), 1 / sqrt(1 - beta2^step).
        decay_size: Columns [0, decay_size) take weight decay.
        betas: Of both moments.
        eps: Added to the root of the second moment.
        weight_decay: Share of a weight, per unit of rate.
        factor_N: What each model's gradients are multiplied by; None for 1.
        shares_NN: How the models mix; None where they do not.
        before: Mix before the update rather than after it.
        skip: Scalar; where it is not 0 nothing changes.
    """
    models, size = data_NP.shape
    block_models = triton.next_power_of_2(models)
    block = max(32, TILE_ELEMENTS // block_models)
    atoll_adamw[(triton.cdiv(size, block),)](
        data_NP,
        grad_NP,
        exp_avg_NP,
        exp_avg_sq_NP,
        scalars_3,
        factor_N,
        shares_NN,
        skip,
        size,
        decay_size,
        betas[0],
        betas[1],
        1 - betas[0],
        1 - betas[1],
        eps,
        weight_decay,
        MODELS=models,
        BLOCK_MODELS=block_models,
        BLOCK=block,
        CLIP=factor_N is not None,
        MIX_BEFORE=shares_NN is not None and before,
        MIX_AFTER=shares_NN is not None and not before,
        SKIP=skip is not None,
        num_warps=4,
    )


@triton.jit
def atoll_adamw(
    data_NP,
    grad_NP,
    exp_avg_NP,
    exp_avg_sq_NP,
    scalars_3,
    factor_N,
    shares_NN,
    skip,
    size,
    decay_size,
    beta1,
    beta2,
    rest1,
    rest2,
    eps,
    weight_decay,
    MODELS: tl.constexpr,
    BLOCK_MODELS: tl.constexpr,
    BLOCK: tl.constexpr,
    CLIP: tl.constexpr,
    MIX_BEFORE: tl.constexpr,
    MIX_AFTER: tl.constexpr,
    SKIP: tl.constexpr,
):
    if SKIP:  # known when the kernel is compiled, unlike what it guards
        if tl.load(skip) != 0.0:
            return
    size = tl.cast(size, tl.int64)  # N * P may exceed 2^31
    columns = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    models = tl.arange(0, BLOCK_MODELS)
    inside = (models < MODELS)[:, None] & (columns < size)[None, :]
    at = models[:, None] * size + columns[None, :]
    if MIX_BEFORE:
        data = _mixed(data_NP, shares_NN, columns, models, size, MODELS, BLOCK_MODELS, BLOCK)
        tl.debug_barrier()  # no thread writes before every thread has read the other models
    else:
        data = tl.load(data_NP + at, mask=inside, other=0.0)
    grad = tl.load(grad_NP + at, mask=inside, other=0.0)
    if CLIP:
        grad *= tl.load(factor_N + models, mask=models < MODELS, other=0.0)[:, None]
    exp_avg = beta1 * tl.load(exp_avg_NP + at, mask=inside, other=0.0) + rest1 * grad
    square = beta2 * tl.load(exp_avg_sq_NP + at, mask=inside, other=0.0) + rest2 * grad * grad
    tl.store(exp_avg_NP + at, exp_avg, mask=inside)
    tl.store(exp_avg_sq_NP + at, square, mask=inside)
    rate, step_size, root = tl.load(scalars_3), tl.load(scalars_3 + 1), tl.load(scalars_3 + 2)
    decay = tl.where(columns < decay_size, rate * weight_decay, 0.0)
    data -= data * decay[None, :]
    data -= step_size * exp_avg / (tl.sqrt(square) * root + eps)
    tl.store(data_NP + at, data, mask=inside)
    if MIX_AFTER:
        tl.debug_barrier()  # every thread sees what the others have written
        data = _mixed(data_NP, shares_NN, columns, models, size, MODELS, BLOCK_MODELS, BLOCK)
        tl.debug_barrier()
        tl.store(data_NP + at, data, mask=inside)


@triton.jit
def _mixed(
    data_NP,
    shares_NN,
    columns,
    models,
    size,
    MODELS: tl.constexpr,
    BLOCK_MODELS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    result = tl.zeros([BLOCK_MODELS, BLOCK], dtype=tl.float32)
    for other in range(MODELS):
        share_N = tl.load(shares_NN + models * MODELS + other, mask=models < MODELS, other=0.0)
        row_C = tl.load(data_NP + other * size + columns, mask=columns < size, other=0.0)
        result += share_N[:, None] * row_C[None, :]
    return result

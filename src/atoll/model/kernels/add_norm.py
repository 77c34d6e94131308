"""Residual addition and RMSNorm in one pass, and their backward in one pass.

Twin: `x + delta` followed by `atoll.model.fused.rms_norm_plain`.

Shapes: N local models, M rows of each, R = N * M rows, D width.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE_ELEMENTS = 4096
BACKWARD_WARPS = 2
PROGRAMS = 4096
"""Programs of the backward pass; each sums the scale's gradient over its rows."""


def add_norm(
    x_RD: Tensor, delta_RD: Tensor | None, scale_ND: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return x + delta in the type of x, and the RMSNorm of that in bfloat16.

    Args:
        x_RD: Residual stream, float32 or bfloat16, contiguous.
        delta_RD: bfloat16 addend, contiguous; None for none.
        scale_ND: float32 scales; rows r of model r // M take row r // M.
        eps: Added to the mean square.
    """
    return _AddNorm.apply(x_RD, delta_RD, scale_ND, eps)


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_RD: Tensor, delta_RD: Tensor | None, scale_ND: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        rows, width = x_RD.shape
        sum_RD = x_RD if delta_RD is None else torch.empty_like(x_RD)
        normed_RD = torch.empty_like(x_RD, dtype=torch.bfloat16)
        rstd_R = scale_ND.new_empty(rows)
        block, tile = _tile(width)
        atoll_add_norm[(triton.cdiv(rows, tile),)](
            x_RD,
            delta_RD,
            scale_ND,
            scale_ND.stride(0),
            sum_RD,
            normed_RD,
            rstd_R,
            rows,
            rows // scale_ND.shape[0],
            eps,
            WIDTH=width,
            BLOCK=block,
            TILE=tile,
            ADD=delta_RD is not None,
            num_warps=4,
        )
        ctx.save_for_backward(sum_RD, rstd_R, scale_ND)
        ctx.has_delta = delta_RD is not None
        ctx.set_materialize_grads(False)
        return sum_RD, normed_RD

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_sum_RD, grad_normed_RD = grads
        sum_RD, rstd_R, scale_ND = ctx.saved_tensors
        assert grad_normed_RD is not None
        models, width = scale_ND.shape
        rows = sum_RD.shape[0]
        grad_x_RD = torch.empty_like(sum_RD)
        # A gradient in bfloat16 is that of the addend too.
        apart = ctx.has_delta and sum_RD.dtype != torch.bfloat16
        grad_delta_RD = torch.empty_like(grad_normed_RD) if apart else None
        block, tile = _tile(width)
        programs = max(1, min(PROGRAMS // models, triton.cdiv(rows // models, tile)))
        partial_NGD = scale_ND.new_empty(models, programs, width)
        atoll_add_norm_backward[(programs, models)](
            grad_normed_RD.contiguous(),
            grad_sum_RD,
            sum_RD,
            rstd_R,
            scale_ND,
            scale_ND.stride(0),
            grad_x_RD,
            grad_delta_RD,
            partial_NGD,
            rows // models,
            TRIPS=triton.cdiv(rows // models, programs * tile),
            WIDTH=width,
            BLOCK=block,
            TILE=tile,
            ADD=apart,
            RESIDUAL=grad_sum_RD is not None,
            num_warps=BACKWARD_WARPS,
        )
        if ctx.has_delta and not apart:
            grad_delta_RD = grad_x_RD
        return grad_x_RD, grad_delta_RD, partial_NGD.sum(1), None


def _tile(width: int) -> tuple[int, int]:
    block = triton.next_power_of_2(width)
    return block, max(1, TILE_ELEMENTS // block)


@triton.jit
def atoll_add_norm(
    x_RD,
    delta_RD,
    scale_ND,
    scale_stride,
    sum_RD,
    normed_RD,
    rstd_R,
    num_rows,
    model_rows,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    ADD: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    columns = tl.arange(0, BLOCK)
    inside = (rows < num_rows)[:, None] & (columns < WIDTH)[None, :]
    at = rows[:, None] * WIDTH + columns[None, :]
    x = tl.load(x_RD + at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(delta_RD + at, mask=inside, other=0.0).to(tl.float32)
        kept = x.to(sum_RD.dtype.element_ty)
        tl.store(sum_RD + at, kept, mask=inside)
        x = kept.to(tl.float32)  # the norm is that of what is kept, as the backward pass reads it
    rstd = tl.rsqrt(tl.sum(x * x, axis=1) / WIDTH + eps)
    models = rows // model_rows
    scale = tl.load(
        scale_ND + models[:, None] * scale_stride + columns[None, :], mask=inside, other=0.0
    )
    normed = x * rstd[:, None] * scale
    tl.store(normed_RD + at, normed.to(normed_RD.dtype.element_ty), mask=inside)
    tl.store(rstd_R + rows, rstd, mask=rows < num_rows)


@triton.jit
def atoll_add_norm_backward(
    grad_normed_RD,
    grad_sum_RD,
    sum_RD,
    rstd_R,
    scale_ND,
    scale_stride,
    grad_x_RD,
    grad_delta_RD,
    partial_NGD,
    model_rows,
    TRIPS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    ADD: tl.constexpr,
    RESIDUAL: tl.constexpr,
):
    program, programs, model = tl.program_id(0), tl.num_programs(0), tl.program_id(1)
    columns = tl.arange(0, BLOCK)
    in_width = columns < WIDTH
    scale = tl.load(scale_ND + model * scale_stride + columns, mask=in_width, other=0.0)
    grad_scale = tl.zeros([BLOCK], dtype=tl.float32)
    for trip in range(TRIPS):
        local = (trip * programs + program) * TILE + tl.arange(0, TILE)
        rows = model.to(tl.int64) * model_rows + local
        inside = (local < model_rows)[:, None] & in_width[None, :]
        at = rows[:, None] * WIDTH + columns[None, :]
        rstd = tl.load(rstd_R + rows, mask=local < model_rows, other=0.0)[:, None]
        unit = tl.load(sum_RD + at, mask=inside, other=0.0).to(tl.float32) * rstd
        grad = tl.load(grad_normed_RD + at, mask=inside, other=0.0).to(tl.float32)
        grad_scale += tl.sum(grad * unit, axis=0)
        grad *= scale[None, :]
        mean = tl.sum(grad * unit, axis=1)[:, None] / WIDTH
        grad_x = (grad - unit * mean) * rstd
        if RESIDUAL:
            grad_x += tl.load(grad_sum_RD + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(grad_x_RD + at, grad_x.to(grad_x_RD.dtype.element_ty), mask=inside)
        if ADD:
            tl.store(grad_delta_RD + at, grad_x.to(grad_delta_RD.dtype.element_ty), mask=inside)
    tl.store(
        partial_NGD + (model * programs + program) * WIDTH + columns, grad_scale, mask=in_width
    )

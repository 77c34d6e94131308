"""SwiGLU forward and backward in one pass each; twin: `atoll.model.fused.swiglu_plain`.

Shapes: R rows, F FFN width.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


def swiglu(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up of a contiguous bfloat16 [..., 2F], whose first half is the gate."""
    return _SwiGlu.apply(gate_up)


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        width = gate_up.shape[-1] // 2
        result = gate_up.new_empty(*gate_up.shape[:-1], width)
        atoll_swiglu[_grid(result)](gate_up, result, result.numel(), WIDTH=width, BLOCK=BLOCK)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        grad = grads[0].contiguous()
        result = torch.empty_like(gate_up)
        atoll_swiglu_backward[_grid(grad)](
            gate_up, grad, result, grad.numel(), WIDTH=grad.shape[-1], BLOCK=BLOCK
        )
        return result


def _grid(tensor: Tensor) -> tuple[int]:
    return (triton.cdiv(tensor.numel(), BLOCK),)


@triton.jit
def atoll_swiglu(gate_up_R2F, result_RF, size, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    # Row r of the result starts at r * F, that of gate and up at r * 2F.
    gate_at = at + at // WIDTH * WIDTH
    gate = tl.load(gate_up_R2F + gate_at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_R2F + gate_at + WIDTH, mask=inside, other=0.0).to(tl.float32)
    result = gate * tl.sigmoid(gate) * up
    tl.store(result_RF + at, result.to(result_RF.dtype.element_ty), mask=inside)


@triton.jit
def atoll_swiglu_backward(
    gate_up_R2F, grad_RF, result_R2F, size, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    gate_at = at + at // WIDTH * WIDTH
    gate = tl.load(gate_up_R2F + gate_at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_R2F + gate_at + WIDTH, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(grad_RF + at, mask=inside, other=0.0).to(tl.float32)
    share = tl.sigmoid(gate)
    grad_gate = grad * up * share * (1.0 + gate * (1.0 - share))
    grad_up = grad * gate * share
    element = result_R2F.dtype.element_ty
    tl.store(result_R2F + gate_at, grad_gate.to(element), mask=inside)
    tl.store(result_R2F + gate_at + WIDTH, grad_up.to(element), mask=inside)

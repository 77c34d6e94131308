"""Kernels for norms, SwiGLU and rotation against their plain twins in float64, element by element.

They run on a GPU where there is one, else under triton's interpreter; blocks are made small so that
shapes that a test can afford take several of them.

Shapes: N local models, M rows of each, R = N * M, D width, F FFN width; B rows, T tokens, H query
heads, K key/value heads, C channels of one head.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rounding import EPS32, assert_near, doubles, draw

from atoll.model import fused, rope

pytest.importorskip("triton", reason="the kernels are written in triton, which is not installed")

from atoll.model.kernels import add_norm, rotary, swiglu

FEW = settings(deadline=None, max_examples=10)
NARROW = torch.bfloat16
NORM_EPS = 1e-5


def scales(models: int, width: int, device: torch.device) -> torch.Tensor:
    """Return scales [N, D] that lie in an arena: rows are not one after another."""
    return draw(models, width + 5, seed=3, device=device)[:, 2 : 2 + width].requires_grad_()


@FEW
@given(
    models=st.integers(1, 5),
    rows=st.integers(1, 13),
    width=st.integers(1, 21),
    programs=st.integers(1, 8),
    added=st.booleans(),
    residual=st.booleans(),
)
def test_norm_after_an_addition_is_its_twin_in_float64(
    kernel_device, models, rows, width, programs, added, residual
):
    x = draw(models * rows, width, seed=0, device=kernel_device).requires_grad_()
    delta = draw(models * rows, width, seed=1, device=kernel_device, dtype=NARROW)
    scale = scales(models, width, kernel_device)
    inputs = [x, scale, *([delta.requires_grad_()] if added else [])]
    grads = [draw(*x.shape, seed=4, device=kernel_device, dtype=NARROW)]
    if residual:
        grads.append(draw(*x.shape, seed=5, device=kernel_device))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(add_norm, "TILE_ELEMENTS", 64)
        patch.setattr(add_norm, "PROGRAMS", programs)
        total, normed = add_norm.add_norm(x, delta if added else None, scale, NORM_EPS)
        found = torch.autograd.grad([normed, total][: len(grads)], inputs, grads)

    wide = doubles(*inputs)
    exact_total = wide[0] + wide[2] if added else wide[0] + 0
    each = wide[1].repeat_interleave(rows, dim=0)
    exact_normed = fused.rms_norm_plain(exact_total, each, NORM_EPS)
    wide_grads = [grad.double() for grad in grads]
    exact = torch.autograd.grad([exact_normed, exact_total][: len(grads)], wide, wide_grads)

    # One addition is rounded to the nearest wherever it is made.
    assert torch.equal(total, x + delta.float() if added else x)
    # A sum of up to 21 squares, a root and two products; none of the terms cancel.
    assert_near(normed, exact_normed, roundings=24, sizes=exact_normed)
    rstd = (exact_total.pow(2).mean(-1, keepdim=True) + NORM_EPS).rsqrt()
    unit, pulled = (exact_total * rstd).abs(), (wide_grads[0] * each).abs()
    sizes = rstd * (pulled + unit * (pulled * unit).mean(-1, keepdim=True))
    if residual:
        sizes = sizes + wide_grads[1].abs()
    sums = (wide_grads[0].abs() * unit).view(models, rows, width).sum(1)
    assert_near(found[0], exact[0], roundings=24, sizes=sizes)
    assert_near(found[1], exact[1], roundings=24 + rows, sizes=sums)
    if added:
        assert_near(found[2], exact[2], roundings=24, sizes=sizes)


def test_a_narrow_stream_keeps_rounded_sums_and_has_one_gradient_for_both_addends(kernel_device):
    x = draw(7, 21, seed=0, device=kernel_device, dtype=NARROW).requires_grad_()
    delta = draw(7, 21, seed=1, device=kernel_device, dtype=NARROW).requires_grad_()
    scale = scales(1, 21, kernel_device)
    grads = [draw(7, 21, seed=seed, device=kernel_device, dtype=NARROW) for seed in (2, 3)]
    total, normed = add_norm.add_norm(x, delta, scale, NORM_EPS)
    found = torch.autograd.grad([normed, total], (x, delta, scale), grads)
    assert (total.dtype, normed.dtype, found[2].dtype) == (NARROW, NARROW, torch.float32)
    assert torch.equal(found[0], found[1])
    exact_sum = x.double() + delta.double()
    assert_near(total, exact_sum, roundings=1, sizes=exact_sum)
    kept, wide_scale = total.detach().double().requires_grad_(), scale.detach().double()
    exact_normed = fused.rms_norm_plain(kept, wide_scale.requires_grad_(), NORM_EPS)
    # Forward and backward both are those of the sum as it was kept.
    assert_near(normed, exact_normed, roundings=24, sizes=exact_normed)
    wide = [grad.double() for grad in grads]
    exact = torch.autograd.grad([exact_normed, kept * 1], (kept, wide_scale), wide)
    rstd = (kept.pow(2).mean(-1, keepdim=True) + NORM_EPS).rsqrt()
    unit, pulled = (kept * rstd).abs(), (wide[0] * wide_scale).abs()
    sizes = rstd * (pulled + unit * (pulled * unit).mean(-1, keepdim=True)) + wide[1].abs()
    assert_near(found[0], exact[0], roundings=24, sizes=sizes)
    assert_near(found[2], exact[1], roundings=31, sizes=(wide[0].abs() * unit).sum(0))


def test_norm_of_zeros_is_zero_and_its_gradient_finite(kernel_device):
    x = torch.zeros(3, 6, device=kernel_device).requires_grad_()
    scale = torch.ones(1, 6, device=kernel_device).requires_grad_()
    _, normed = add_norm.add_norm(x, None, scale, NORM_EPS)
    assert not normed.any()
    grads = torch.autograd.grad(normed, (x, scale), torch.ones_like(normed))
    # Far from rounding: the slope at zero is scale / sqrt(eps).
    torch.testing.assert_close(grads[0], torch.full_like(x, NORM_EPS**-0.5), rtol=1e-5, atol=0)
    assert not grads[1].any()


@FEW
@given(rows=st.integers(1, 9), width=st.integers(1, 23), dims=st.integers(2, 3))
def test_swiglu_is_its_twin_in_float64(kernel_device, rows, width, dims):
    shape = (2, rows, 2 * width)[3 - dims :]
    gate_up = draw(*shape, seed=rows, device=kernel_device).mul(3).to(NARROW).requires_grad_()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(swiglu, "BLOCK", 32)
        result = swiglu.swiglu(gate_up)
        # As the product's backward gives it: not contiguous.
        grad = draw(*result.shape[:-2], width, result.shape[-2], seed=1, device=kernel_device)
        grad = grad.to(NARROW).mT
        (found,) = torch.autograd.grad(result, gate_up, grad)
    (wide,) = doubles(gate_up)
    exact_result = fused.swiglu_plain(wide)
    (exact,) = torch.autograd.grad(exact_result, wide, grad.double())
    # A fast exp is wrong by as many units as its argument, 12 at most, is large.
    assert_near(result, exact_result, roundings=20, sizes=exact_result)
    gate, up = wide.detach().chunk(2, dim=-1)
    share, g = torch.sigmoid(gate), grad.double().abs()
    gate_sizes = g * up.abs() * share * (1 + gate.abs() * (1 - share))
    sizes = torch.cat((gate_sizes, g * gate.abs() * share), dim=-1)
    assert_near(found, exact, roundings=20, sizes=sizes)


@pytest.mark.filterwarnings("ignore:overflow encountered")  # exp(1e4) of numpy, and 1 / inf is 0
def test_swiglu_of_huge_gates_saturates(kernel_device):
    gates = torch.tensor([-1e4, -100.0, 0.0, 100.0, 1e4], device=kernel_device)
    gate_up = torch.cat((gates, torch.full_like(gates, 2.0))).to(NARROW)[None].requires_grad_()
    result = swiglu.swiglu(gate_up)
    (grad,) = torch.autograd.grad(result, gate_up, torch.ones_like(result))
    kept = gate_up.detach()[0, :5].clamp(min=0)  # exp(-100) is below half a unit of anything here
    torch.testing.assert_close(result[0], 2 * kept, rtol=0, atol=1e-40)
    slopes = torch.tensor([0.0, 0.0, 1.0, 2.0, 2.0], device=kernel_device).to(NARROW)
    torch.testing.assert_close(grad[0, :5], slopes, rtol=0, atol=1e-40)
    torch.testing.assert_close(grad[0, 5:], kept, rtol=0, atol=1e-40)


@FEW
@given(
    rows=st.integers(1, 3),
    tokens=st.integers(1, 9),
    key_heads=st.integers(1, 3),
    shared=st.integers(1, 3),
    pairs=st.integers(1, 7),
    own_positions=st.booleans(),
    layout=st.sampled_from(["heads first", "tokens first", "channels first"]),
)
def test_rotation_is_its_twin_in_float64(
    kernel_device, rows, tokens, key_heads, shared, pairs, own_positions, layout
):
    query_heads = key_heads * shared
    shape = rows, tokens, query_heads + 2 * key_heads, 2 * pairs
    qkv = draw(*shape, seed=0, device=kernel_device, dtype=NARROW).requires_grad_()
    positions = torch.arange(tokens)
    if own_positions:
        positions = torch.arange(rows * tokens).view(rows, tokens).flip(1)
    tables = rope.tables(positions, 1.0 / torch.arange(1, pairs + 1))
    cos, sin = (table.to(kernel_device) for table in tables)
    heads = query_heads, key_heads
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rotary, "TILE_PAIRS", 128)
        parts = rotary.split_heads(qkv, cos, sin, *heads)
        grads = [_laid_out(part, layout, seed=i) for i, part in enumerate(parts)]
        (found,) = torch.autograd.grad(parts, qkv, grads)

    (wide,) = doubles(qkv)
    exact_parts = fused.split_heads_plain(wide, cos.double(), sin.double(), *heads)
    wide_grads = [grad.double() for grad in grads]
    (exact,) = torch.autograd.grad(exact_parts, wide, wide_grads)
    # Two products and their sum; both terms are at most the sizes of a pair's channels.
    before = _split(wide.detach(), heads)
    for part, exact_part, sizes in zip(parts, exact_parts, before, strict=True):
        assert_near(part, exact_part, roundings=3, sizes=_pair_sizes(sizes))
    assert torch.equal(parts[2], _split(qkv.detach(), heads)[2])
    sizes = torch.cat([_pair_sizes(grad).transpose(1, 2) for grad in wide_grads], dim=2)
    assert_near(found, exact, roundings=3, sizes=sizes)
    assert torch.equal(found[:, :, sum(heads) :], grads[2].transpose(1, 2))


def test_rotating_back_after_rotating_gives_what_was_there(kernel_device):
    qkv = draw(2, 5, 4, 6, seed=0, device=kernel_device, dtype=NARROW).requires_grad_()
    cos, sin = rope.tables(torch.arange(5), torch.tensor([1.0, 0.3, 0.01]))
    parts = rotary.split_heads(qkv, cos.to(kernel_device), sin.to(kernel_device), 2, 1)
    (back,) = torch.autograd.grad(parts, qkv, [part.detach() for part in parts])
    # Rounded to bfloat16 twice, each up to a unit of either channel of a pair.
    pairs = _pair_sizes(qkv.detach().double())
    assert ((back.double() - qkv.double()).abs() <= 2 * 2**-7 * pairs + 8 * EPS32).all()


def _laid_out(like: torch.Tensor, layout: str, *, seed: int) -> torch.Tensor:
    """Return a random gradient [B, H, T, C] as one of the ways that attention may leave it."""
    order = {
        "heads first": (0, 1, 2, 3),
        "tokens first": (0, 2, 1, 3),
        "channels first": (0, 3, 1, 2),
    }[layout]
    grad = draw(*(like.shape[i] for i in order), seed=seed, device=like.device, dtype=NARROW)
    return grad.permute(*(order.index(i) for i in range(4)))


def _split(qkv_BTHC: torch.Tensor, heads: tuple[int, int]) -> list[torch.Tensor]:
    query_heads, key_heads = heads
    parts = qkv_BTHC.split((query_heads, key_heads, key_heads), dim=2)
    return [part.transpose(1, 2) for part in parts]


def _pair_sizes(x: torch.Tensor) -> torch.Tensor:
    low, high = x.abs().chunk(2, dim=-1)
    return torch.cat((low + high, low + high), dim=-1)

"""The cross-entropy kernel against its plain twin in float64.

It runs on a GPU where there is one, else under triton's interpreter.

Shapes: R rows, V vocabulary.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rounding import assert_near, draw
from torch.nn import functional

pytest.importorskip("triton", reason="the kernels are written in triton, which is not installed")

from atoll.model.kernels import cross_entropy as kernel

NARROW = torch.bfloat16


def assert_is_its_twin(logits_RV, ids_R, weights_R) -> None:
    """Compare losses and gradient, and losses without a gradient."""
    wide_RV = logits_RV.double().requires_grad_()
    exact_R = functional.cross_entropy(wide_RV, ids_R, reduction="none")
    (exact_RV,) = torch.autograd.grad((exact_R * weights_R.double()).sum(), wide_RV)
    kept_RV = logits_RV.clone()
    scored_R = kernel.cross_entropy(logits_RV, ids_R, weights_R, with_grad=False)
    assert torch.equal(logits_RV, kept_RV)
    losses_R = kernel.cross_entropy(logits_RV, ids_R, weights_R, with_grad=True)
    assert torch.equal(losses_R, scored_R)
    # The largest logit, a logarithm below log V and the target's logit are added; the sum in the
    # logarithm has V terms, in partial sums.
    sizes_R = 1 + math.log(wide_RV.shape[1]) + 2 * wide_RV.detach().abs().amax(-1)
    assert_near(losses_R, exact_R.detach(), roundings=16, sizes=sizes_R)
    # A fast exp is wrong by as many units as its argument is large; from 16 on exp is below 2^-23.
    sizes_RV = weights_R.double().abs()[:, None].expand_as(exact_RV)
    assert_near(logits_RV, exact_RV, roundings=32, sizes=sizes_RV)
    assert not logits_RV[weights_R == 0].any()


@settings(deadline=None, max_examples=15)
@given(
    rows=st.integers(1, 6),
    vocabulary=st.integers(1, 45),
    block=st.sampled_from([8, 16, 64]),
    size=st.sampled_from([0.1, 2.0, 8.0]),
    seed=st.integers(0, 1000),
)
def test_losses_and_gradients_are_their_twins_in_float64(
    kernel_device, rows, vocabulary, block, size, seed
):
    generator = torch.Generator().manual_seed(seed)
    logits = draw(rows, vocabulary, seed=seed, device=kernel_device).mul(size).to(NARROW)
    ids = torch.randint(0, vocabulary, (rows,), generator=generator).to(kernel_device)
    weights = torch.rand(rows, generator=generator) * 3
    weights[torch.rand(rows, generator=generator) < 0.3] = 0.0  # targets that are not counted
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "BLOCK", block)
        assert_is_its_twin(logits, ids, weights.to(kernel_device))


def test_a_vocabulary_longer_than_the_real_block_is_read_whole(kernel_device):
    vocabulary = 2 * kernel.BLOCK + 3
    logits = draw(3, vocabulary, seed=0, device=kernel_device, dtype=NARROW)
    ids = torch.tensor([0, kernel.BLOCK, vocabulary - 1], device=kernel_device)
    assert_is_its_twin(logits, ids, torch.ones(3, device=kernel_device))


def test_targets_and_weights_may_be_strided(kernel_device):
    logits = draw(3, 19, seed=0, device=kernel_device, dtype=NARROW)
    ids = torch.arange(12, device=kernel_device).view(3, 4)[:, 3:].reshape(-1)
    weights = draw(3, 4, seed=1, device=kernel_device)[:, 3:].reshape(-1)
    assert not ids.is_contiguous()
    assert_is_its_twin(logits, ids, weights)


@pytest.mark.parametrize("chosen", [0, 1, 18])
def test_huge_logits_neither_overflow_nor_lose_the_target(kernel_device, chosen, monkeypatch):
    monkeypatch.setattr(kernel, "BLOCK", 8)
    logits = torch.full((2, 19), -1e4, device=kernel_device)
    logits[0, 1], logits[1, 1], logits[1, 18] = 1e4, 1e4, 1e4
    ids = torch.full((2,), chosen, device=kernel_device)
    assert_is_its_twin(logits.to(NARROW), ids, torch.ones(2, device=kernel_device))


@pytest.mark.parametrize("value", [-1e4, 0.0, 1e4])
def test_equal_logits_give_the_logarithm_of_the_vocabulary(kernel_device, value, monkeypatch):
    monkeypatch.setattr(kernel, "BLOCK", 8)
    logits = torch.full((1, 19), value, device=kernel_device).to(NARROW)
    ids = torch.tensor([18], device=kernel_device)
    losses = kernel.cross_entropy(logits, ids, torch.ones(1, device=kernel_device), with_grad=False)
    # The logarithm is added to the logit, whose float32 neighbours are 2^-10 apart near 1e4.
    assert losses.item() == pytest.approx(math.log(19), abs=2**-9 if value else 1e-6)


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", [0, 9, 18])
def test_a_logit_that_is_no_number_gives_a_loss_that_is_none(
    kernel_device, bad, place, monkeypatch
):
    monkeypatch.setattr(kernel, "BLOCK", 8)
    logits = draw(3, 19, seed=0, device=kernel_device, dtype=NARROW)
    logits[1, place] = bad
    ids, weights = torch.full((3,), 4, device=kernel_device), torch.ones(3, device=kernel_device)
    losses = kernel.cross_entropy(logits, ids, weights, with_grad=True)
    assert torch.isfinite(losses).tolist() == [True, False, True]
    assert torch.isfinite(logits).all(-1).tolist() == [True, False, True]

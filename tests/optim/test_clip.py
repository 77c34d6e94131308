"""Norms and clipping against float64, and the names of bad gradients."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.model.arena import Slice
from atoll.optim.clip import BLOCK, clip_factors, gradient_norms, non_finite_names

EPS32 = torch.finfo(torch.float32).eps


@settings(deadline=None, max_examples=30)
@given(
    num_models=st.integers(1, 3),
    size=st.sampled_from([1, 7, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5]),
    max_norm=st.sampled_from([0.5, 1.0, 1e6]),
    seed=st.integers(0, 100),
)
def test_each_row_is_scaled_to_the_limit_on_its_own(num_models, size, max_norm, seed):
    grad = torch.randn(num_models, size, generator=torch.Generator().manual_seed(seed))
    exact = torch.linalg.vector_norm(grad.double(), dim=1)
    wanted = grad.double() * (max_norm / exact).clamp(max=1.0)[:, None]
    norms = gradient_norms(grad)
    grad.mul_(clip_factors(norms, max_norm=max_norm)[:, None])
    # Sums of 4096 squares in FP32: relative error about sqrt(4096) * eps / 2 at the worst.
    torch.testing.assert_close(norms.double(), exact, rtol=32 * EPS32, atol=0)
    torch.testing.assert_close(grad.double(), wanted, rtol=34 * EPS32, atol=0)


def test_norm_of_a_long_row_keeps_single_precision():
    grad = torch.randn(1, 8_000_000, generator=torch.Generator().manual_seed(0))
    exact = torch.linalg.vector_norm(grad.double(), dim=1)
    torch.testing.assert_close(gradient_norms(grad).double(), exact, rtol=8 * EPS32, atol=0)


def test_zero_gradients_are_not_scaled():
    grad = torch.zeros(1, 4)
    norms = gradient_norms(grad)
    assert norms.item() == 0.0
    assert clip_factors(norms, max_norm=1.0).item() == 1.0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_bad_gradient_is_named_after_clipping(bad):
    slices = {"embed": Slice(0, (4, 2)), "layers.0.mlp": Slice(8, (3,)), "norm": Slice(11, (2,))}
    grad = torch.ones(2, 13)
    grad[1, 9] = bad
    norms = gradient_norms(grad)
    grad.mul_(clip_factors(norms, max_norm=1.0)[:, None])
    assert torch.isfinite(norms).tolist() == [True, False]
    assert non_finite_names(grad, slices) == [(1, "layers.0.mlp")]

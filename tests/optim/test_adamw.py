"""AdamW against a float64 twin and against torch's own."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.config.optimizer import OptimizerConfig
from atoll.errors import StateMismatchError
from atoll.optim.adamw import AdamW, reference_step
from atoll.tensors import Snapshot

CONFIG = OptimizerConfig(lr=0.01, beta1=0.9, beta2=0.98, weight_decay=0.1)
EPS32 = torch.finfo(torch.float32).eps


def run_both(num_models: int, size: int, decay_size: int, steps: int, seed: int):
    """Run the kernel in float32 and the twin in float64 on the same gradients."""
    generator = torch.Generator().manual_seed(seed)
    data = torch.randn(num_models, size, generator=generator)
    grad = torch.zeros_like(data)
    optimizer = AdamW(data, grad, decay_size=decay_size, config=CONFIG)
    exact = data.double(), torch.zeros_like(data).double(), torch.zeros_like(data).double()
    for step in range(1, steps + 1):
        grad.copy_(torch.randn(num_models, size, generator=generator) * 10.0 ** (step % 5 - 3))
        lr = 0.01 / step
        exact = reference_step(
            exact[0],
            grad.double(),
            *exact[1:],
            decay_size=decay_size,
            config=CONFIG,
            lr=lr,
            step=step,
        )
        optimizer.step(lr=lr, step=step)
    return (data, optimizer.exp_avg_NP, optimizer.exp_avg_sq_NP), exact


@settings(deadline=None, max_examples=30)
@given(
    num_models=st.integers(1, 3),
    size=st.integers(1, 70),
    share=st.floats(0, 1),
    steps=st.integers(1, 8),
    seed=st.integers(0, 1000),
)
def test_kernel_matches_the_paper_in_float64(num_models, size, share, steps, seed):
    found, exact = run_both(num_models, size, int(share * size), steps, seed)
    # Each update rounds a weight (|w| < 8) and a moment (|m| <= 10 * |g|) a handful of times.
    tolerance = steps * 8 * EPS32
    for name, a, b in zip(("weights", "exp_avg", "exp_avg_sq"), found, exact, strict=True):
        scale = b.abs().max().clamp(min=1.0)
        assert (a.double() - b).abs().max() <= tolerance * scale, name


def test_weights_equal_torch_fused_adamw_bit_for_bit():
    torch.manual_seed(0)
    data, grad = torch.randn(1, 1000), torch.randn(1, 1000)
    matrix, scale = (torch.nn.Parameter(data[0, a:b].clone()) for a, b in ((0, 900), (900, 1000)))
    ours = AdamW(data, grad, decay_size=900, config=CONFIG)
    theirs = torch.optim.AdamW(
        [{"params": [matrix]}, {"params": [scale], "weight_decay": 0.0}],
        lr=0.01,
        betas=(CONFIG.beta1, CONFIG.beta2),
        eps=CONFIG.eps,
        weight_decay=CONFIG.weight_decay,
        fused=True,
    )
    for step in range(1, 6):
        grad.normal_()
        matrix.grad, scale.grad = grad[0, :900].clone(), grad[0, 900:].clone()
        ours.step(lr=0.01, step=step)
        theirs.step()
    assert torch.equal(data[0], torch.cat([matrix, scale]).detach())


def test_norm_scales_do_not_decay():
    data, grad = torch.ones(2, 10), torch.zeros(2, 10)
    AdamW(data, grad, decay_size=6, config=CONFIG).step(lr=0.5, step=1)
    assert torch.all(data[:, 6:] == 1.0)
    # With no gradient only the decay moves a weight: 1 - lr * weight_decay.
    torch.testing.assert_close(data[:, :6], torch.full((2, 6), 0.95), rtol=2 * EPS32, atol=0)


def test_skipped_update_changes_nothing():
    data, grad = torch.randn(1, 20), torch.full((1, 20), float("nan"))
    optimizer = AdamW(data, grad, decay_size=10, config=CONFIG)
    before = data.clone()
    optimizer.step(lr=0.1, step=1, skip=torch.ones(()))
    assert torch.equal(data, before)
    assert not optimizer.exp_avg_NP.any()
    assert not optimizer.exp_avg_sq_NP.any()


def test_restored_moments_continue_bit_for_bit():
    torch.manual_seed(0)
    data, grad = torch.randn(2, 33), torch.randn(2, 33)
    optimizer = AdamW(data, grad, decay_size=20, config=CONFIG)
    optimizer.step(lr=0.1, step=1)
    saved, weights = optimizer.snapshot(), data.clone()
    optimizer.step(lr=0.1, step=2)
    other_data = weights.clone()
    other = AdamW(other_data, grad, decay_size=20, config=CONFIG)
    other.restore(saved)
    other.step(lr=0.1, step=2)
    assert torch.equal(other_data, data)


def test_snapshot_is_a_copy():
    data, grad = torch.randn(1, 5), torch.randn(1, 5)
    optimizer = AdamW(data, grad, decay_size=5, config=CONFIG)
    saved = optimizer.snapshot()
    optimizer.step(lr=0.1, step=1)
    assert not saved.tensors["exp_avg"].any()


def test_moments_of_another_shape_are_refused_unchanged():
    optimizer = AdamW(torch.ones(1, 5), torch.ones(1, 5), decay_size=5, config=CONFIG)
    with pytest.raises(StateMismatchError, match=r"exp_avg \[1, 6\]"):
        optimizer.restore(Snapshot({"exp_avg": torch.ones(1, 6), "exp_avg_sq": torch.ones(1, 6)}))
    assert not optimizer.exp_avg_NP.any()


@pytest.mark.gpu
def test_cuda_update_is_within_rounding_of_the_paper():
    torch.manual_seed(0)
    data = torch.randn(2, 100_003, device="cuda")
    grad = torch.randn_like(data)
    exact = reference_step(
        data.double(),
        grad.double(),
        torch.zeros_like(data).double(),
        torch.zeros_like(data).double(),
        decay_size=90_000,
        config=CONFIG,
        lr=0.01,
        step=1,
    )
    AdamW(data, grad, decay_size=90_000, config=CONFIG).step(lr=0.01, step=1)
    torch.testing.assert_close(data.double(), exact[0], rtol=8 * EPS32, atol=8 * EPS32)

"""AdamW's kernel, clipping and mixing included, against the float64 twin.

It runs on a GPU where there is one, else under triton's interpreter.

Shapes: N local models, P parameters of one model.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from atoll.config.optimizer import OptimizerConfig
from atoll.optim.adamw import AdamW, Mixing, reference_step

pytest.importorskip("triton", reason="the kernel is written in triton, which is not installed")

from atoll.optim import adamw_kernel

CONFIG = OptimizerConfig(lr=0.01, beta1=0.9, beta2=0.98, weight_decay=0.1)
EPS32 = torch.finfo(torch.float32).eps


def draw(*shape: int, seed: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device)


def random_shares(models: int, *, seed: int, device: torch.device) -> Tensor:
    """Draw a doubly stochastic matrix: a mean of three permutations, the identity among them."""
    generator = torch.Generator().manual_seed(seed)
    eye = torch.eye(models)
    others = [eye[torch.randperm(models, generator=generator)] for _ in range(2)]
    share = torch.rand((), generator=generator)
    return (share * eye + (1 - share) * (others[0] + others[1]) / 2).to(device)


def optimizer_of(data: Tensor, grad: Tensor, *, decay_size: int) -> AdamW:
    return AdamW(data, grad, decay_size=decay_size, config=CONFIG, kernels=True)


def assert_near(found: Tensor, exact: Tensor, *, roundings: int, name: str) -> None:
    allowed = roundings * EPS32 * exact.abs().max().clamp(min=1.0)
    assert (found.double() - exact).abs().max() <= allowed, name


@pytest.fixture(autouse=True, scope="module")
def _small_tiles():
    """Let a tile end at 32 columns, so that a few dozen parameters take several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adamw_kernel, "TILE_ELEMENTS", 32)
        yield


@settings(deadline=None, max_examples=12)
@given(
    models=st.integers(1, 5),
    size=st.integers(1, 70),
    share=st.floats(0, 1),
    mixed=st.sampled_from(["never", "before", "after"]),
    clipped=st.booleans(),
    skip=st.booleans(),
    first=st.sampled_from([1, 2, 1000, 10**6]),
    seed=st.integers(0, 1000),
)
def test_update_is_its_twin_in_float64(
    kernel_device, models, size, share, mixed, clipped, skip, first, seed
):
    data, grad = draw(models, size, seed=seed, device=kernel_device), torch.zeros(models, size)
    grad = grad.to(kernel_device)
    decay_size, steps = int(share * size), 3
    optimizer = optimizer_of(data, grad, decay_size=decay_size)
    exact = data.double(), torch.zeros_like(data).double(), torch.zeros_like(data).double()
    for step in range(steps):
        size_of_gradients = 10.0 ** (step - 2)
        grad.copy_(draw(models, size, seed=seed + step, device=kernel_device) * size_of_gradients)
        given_gradients = grad.clone()
        factor = torch.linspace(0.1, 1, models, device=kernel_device) if clipped else None
        shares = random_shares(models, seed=seed + step, device=kernel_device)
        mixing = None if mixed == "never" else Mixing(shares, before=mixed == "before")
        common = {"lr": 0.01, "step": first + step, "factor_N": factor, "mixing": mixing}
        exact = reference_step(
            exact[0], grad.double(), *exact[1:], decay_size=decay_size, config=CONFIG, **common
        )
        flag = torch.zeros((), device=kernel_device) if skip else None
        optimizer.step(**common, skip=flag)
        assert torch.equal(grad, given_gradients)
    # Three scalars, each rounded once, 8 roundings in the update itself, and up to three in a sum
    # of shares; weights stay below 8, and what they are divided by is exact to its own rounding.
    found = data, optimizer.exp_avg_NP, optimizer.exp_avg_sq_NP
    for name, a, b in zip(("weights", "exp_avg", "exp_avg_sq"), found, exact, strict=True):
        assert_near(a, b, roundings=steps * 14, name=name)


@pytest.mark.parametrize("decay_size", [0, 1, 31, 32, 33, 69, 70])
def test_weight_decay_ends_at_its_column_also_inside_a_tile(kernel_device, decay_size):
    data = torch.ones(2, 70, device=kernel_device)
    optimizer = optimizer_of(data, torch.zeros_like(data), decay_size=decay_size)
    optimizer.step(lr=0.5, step=1)
    # 1 - 1 * (0.5 * 0.1), whose three operations round once each.
    assert ((data[:, :decay_size].double() - 0.95).abs() <= 3 * EPS32).all()
    assert (data[:, decay_size:] == 1).all()


@settings(deadline=None, max_examples=8)
@given(models=st.integers(1, 5), size=st.integers(1, 70), seed=st.integers(0, 1000))
def test_at_rate_zero_mixing_before_and_after_are_equal_bit_for_bit(
    kernel_device, models, size, seed
):
    results = []
    for before in (True, False):
        data = draw(models, size, seed=seed, device=kernel_device)
        grad = draw(models, size, seed=seed + 1, device=kernel_device)
        optimizer = optimizer_of(data, grad, decay_size=size // 2)
        for step in (1, 2):
            shares = random_shares(models, seed=seed + step, device=kernel_device)
            optimizer.step(lr=0.0, step=step, mixing=Mixing(shares, before=before))
        results.append((data, *optimizer.moments().values()))
    for awc, atc in zip(*results, strict=True):
        assert torch.equal(awc, atc)


def test_at_any_other_rate_mixing_before_and_after_differ(kernel_device):
    results = []
    for before in (True, False):
        data, grad = (draw(3, 20, seed=i, device=kernel_device) for i in range(2))
        mixing = Mixing(random_shares(3, seed=0, device=kernel_device), before=before)
        optimizer_of(data, grad, decay_size=20).step(lr=0.01, step=1, mixing=mixing)
        results.append(data)
    assert (results[0] - results[1]).abs().max() > 1e-3


@pytest.mark.parametrize("before", [True, False])
def test_skipped_update_moves_no_bit_of_weights_and_moments(kernel_device, before):
    data = draw(3, 71, seed=0, device=kernel_device)
    data[0, :2] = torch.tensor([-0.0, 1e-45])
    grad = draw(3, 71, seed=1, device=kernel_device)
    optimizer = optimizer_of(data, grad, decay_size=10)
    mixing = Mixing(torch.full((3, 3), 1 / 3, device=kernel_device), before=before)
    skip = torch.zeros((), device=kernel_device)
    optimizer.step(lr=0.1, step=1, mixing=mixing, skip=skip)
    data[0, :2] = torch.tensor([-0.0, 1e-45])
    live = (data, *optimizer.moments().values())
    kept = [tensor.clone() for tensor in live]
    grad.fill_(float("nan"))
    factor = torch.ones(3, device=kernel_device)
    optimizer.step(lr=0.1, step=2, factor_N=factor, mixing=mixing, skip=skip.fill_(1.0))
    for tensor, before_it in zip(live, kept, strict=True):
        assert torch.equal(tensor.view(torch.int32), before_it.view(torch.int32))


@pytest.mark.parametrize("step", [1, 10, 10**4, 10**7])
def test_first_moments_are_corrected_for_at_any_step(kernel_device, step):
    data, grad = torch.zeros(1, 40, device=kernel_device), torch.ones(1, 40, device=kernel_device)
    optimizer = optimizer_of(data, grad, decay_size=0)
    optimizer.exp_avg_NP.fill_(1 - CONFIG.beta1 ** (step - 1))
    optimizer.exp_avg_sq_NP.fill_(1 - CONFIG.beta2 ** (step - 1))
    optimizer.step(lr=0.01, step=step)
    # Gradients of 1 all along: corrected moments are 1 whatever the step, and the rate is the step.
    exact = torch.full_like(data, -0.01 / (1 + CONFIG.eps)).double()
    assert ((data.double() - exact).abs() <= 16 * EPS32 * exact.abs()).all()

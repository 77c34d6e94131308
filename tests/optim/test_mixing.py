"""Clipping and mixing inside AdamW's update against the float64 twin.

Shapes: N local models, P parameters of one model.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.config.optimizer import OptimizerConfig
from atoll.optim.adamw import MIXED_COLUMNS, AdamW, Mixing, mix, reference_step

CONFIG = OptimizerConfig(lr=0.01, beta1=0.9, beta2=0.98, weight_decay=0.1)
EPS32 = torch.finfo(torch.float32).eps


def random_shares(models: int, generator: torch.Generator) -> torch.Tensor:
    """Draw a doubly stochastic matrix: a mean of three permutations, the identity among them."""
    eye = torch.eye(models)
    others = [eye[torch.randperm(models, generator=generator)] for _ in range(2)]
    share = torch.rand((), generator=generator)
    return share * eye + (1 - share) * (others[0] + others[1]) / 2


@settings(deadline=None, max_examples=40)
@given(
    models=st.integers(1, 5),
    size=st.integers(1, 70),
    share=st.floats(0, 1),
    before=st.booleans(),
    clipped=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_update_with_clipping_and_mixing_is_its_twin_in_float64(
    models, size, share, before, clipped, seed
):
    generator = torch.Generator().manual_seed(seed)
    data, grad = torch.randn(models, size, generator=generator), torch.zeros(models, size)
    decay_size, steps = int(share * size), 6
    optimizer = AdamW(data, grad, decay_size=decay_size, config=CONFIG)
    exact = data.double(), torch.zeros_like(data).double(), torch.zeros_like(data).double()
    for step in range(1, steps + 1):
        grad.copy_(torch.randn(models, size, generator=generator) * 10.0 ** (step % 5 - 3))
        factor = torch.rand(models, generator=generator) if clipped else None
        mixing = Mixing(random_shares(models, generator), before=before)
        exact = reference_step(
            exact[0],
            grad.double(),
            *exact[1:],
            decay_size=decay_size,
            config=CONFIG,
            lr=0.01,
            step=step,
            factor_N=factor,
            mixing=mixing,
        )
        optimizer.step(lr=0.01, step=step, factor_N=factor, mixing=mixing)
    # As without mixing (tests/optim/test_adamw.py) 8 roundings an update; mixing sums at most three
    # products of a number below 8, and the moments are told the clipped gradient, one rounding.
    tolerance = steps * 12 * EPS32
    found = data, optimizer.exp_avg_NP, optimizer.exp_avg_sq_NP
    for name, a, b in zip(("weights", "exp_avg", "exp_avg_sq"), found, exact, strict=True):
        assert (a.double() - b).abs().max() <= tolerance * b.abs().max().clamp(min=1.0), name


@settings(deadline=None, max_examples=40)
@given(models=st.integers(1, 6), size=st.integers(1, 70), seed=st.integers(0, 1000))
def test_at_rate_zero_mixing_before_and_after_are_equal_bit_for_bit(models, size, seed):
    results = []
    for before in (True, False):
        generator = torch.Generator().manual_seed(seed)
        data = torch.randn(models, size, generator=generator)
        grad = torch.randn(models, size, generator=generator)
        shares = random_shares(models, generator)
        optimizer = AdamW(data, grad, decay_size=size // 2, config=CONFIG)
        for step in (1, 2, 3):
            optimizer.step(lr=0.0, step=step, mixing=Mixing(shares, before=before))
        results.append((data, *optimizer.moments().values()))
    for awc, atc in zip(*results, strict=True):
        assert torch.equal(awc, atc)


def test_at_any_other_rate_mixing_before_and_after_differ():
    results = []
    for before in (True, False):
        generator = torch.Generator().manual_seed(0)
        data, grad = (torch.randn(3, 20, generator=generator) for _ in range(2))
        mixing = Mixing(random_shares(3, generator), before=before)
        AdamW(data, grad, decay_size=20, config=CONFIG).step(lr=0.01, step=1, mixing=mixing)
        results.append(data)
    assert (results[0] - results[1]).abs().max() > 1e-3


@pytest.mark.parametrize("before", [True, False])
def test_skipped_update_moves_no_bit_of_weights_and_moments(before):
    data = torch.randn(3, MIXED_COLUMNS + 5, generator=torch.Generator().manual_seed(0))
    data[0, :2] = torch.tensor([-0.0, 1e-45])
    grad = torch.randn(data.shape, generator=torch.Generator().manual_seed(1))
    optimizer = AdamW(data, grad, decay_size=10, config=CONFIG)
    mixing = Mixing(torch.full((3, 3), 1 / 3), before=before)
    optimizer.step(lr=0.1, step=1, mixing=mixing, skip=torch.zeros(()))
    data[0, :2] = torch.tensor([-0.0, 1e-45])
    live = (data, *optimizer.moments().values())
    kept = [tensor.clone() for tensor in live]
    grad.fill_(float("nan"))
    optimizer.step(lr=0.1, step=2, factor_N=torch.ones(3), mixing=mixing, skip=torch.ones(()))
    for tensor, before_it in zip(live, kept, strict=True):
        assert torch.equal(tensor.view(torch.int32), before_it.view(torch.int32))


def test_mixing_joins_pieces_of_columns_without_a_seam():
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(4, 2 * MIXED_COLUMNS + 3, generator=generator)
    shares = random_shares(4, generator)
    wanted = shares.double() @ data.double()
    mix(data, shares)
    # A sum of at most four products of numbers below 6.
    torch.testing.assert_close(data.double(), wanted, rtol=0, atol=4 * 6 * EPS32)

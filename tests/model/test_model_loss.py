"""The chunked loss equals the naive one, whatever its pieces, weights and types."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.model.loss import (
    PIECE_BYTES,
    default_piece_rows,
    weighted_loss,
    weighted_loss_plain,
)
from atoll.tensors import IGNORE


def problem(models, targets, vocabulary, width, seed, *, spread=1.0, dtype=torch.float32):
    """Return features, projection, target ids (a fifth ignored) and weights."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    ids_NM = torch.randint(0, vocabulary, (models, targets), generator=generator)
    dropped_NM = torch.rand(models, targets, generator=generator) < 0.2
    return (
        (draw(models, targets, width) * spread).requires_grad_(),
        draw(models, vocabulary, width).requires_grad_(),
        ids_NM.masked_fill(dropped_NM, IGNORE),
        torch.rand(models, targets, generator=generator),
    )


def run(loss, x, weight, ids, weights, **options):
    """Return sums, weights and both gradients of a loss of differently scaled models."""
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    sums_N, weights_N = loss(x, weight, ids, weights, **options)
    (sums_N * torch.arange(1, len(sums_N) + 1)).sum().backward()
    return sums_N.detach(), weights_N, x.grad, weight.grad


@settings(deadline=None, max_examples=40)
@given(
    models=st.integers(1, 3),
    targets=st.integers(1, 20),
    vocabulary=st.integers(2, 40),
    width=st.integers(1, 9),
    piece_rows=st.integers(1, 25),
    seed=st.integers(0, 99),
    weighted=st.booleans(),
)
def test_any_pieces_equal_the_naive_loss(
    models, targets, vocabulary, width, piece_rows, seed, weighted
):
    x, weight, ids, weights = problem(models, targets, vocabulary, width, seed, dtype=torch.float64)
    given_weights = weights.double() if weighted else None
    ours = run(weighted_loss, x, weight, ids, given_weights, piece_rows=piece_rows)
    exact = run(weighted_loss_plain, x, weight, ids, given_weights)
    for our, their in zip(ours, exact, strict=True):
        # Float64 rounding of sums of at most 40 terms of order 10.
        torch.testing.assert_close(our.double(), their.double(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("spread", [1.0, 30.0])
def test_float32_stays_near_float64_even_for_certain_predictions(spread):
    x, weight, ids, weights = problem(2, 300, 500, 32, seed=3, spread=spread)
    ours = run(weighted_loss, x, weight, ids, weights, piece_rows=64)
    exact = run(weighted_loss_plain, x.double(), weight.double(), ids, weights.double())
    # A logit is a sum of 32 rounded products; what it is off by, a probability is off by.
    rounding = (x @ weight.mT).abs().max().item() * 2**-24 * 32**0.5
    for our, their in zip(ours, exact, strict=True):
        assert (our - their).abs().max() < rounding * their.abs().max()


@pytest.mark.parametrize("piece_rows", [1, 7, 64, 299, 300, 4096])
def test_the_piece_size_changes_rounding_only(piece_rows):
    x, weight, ids, weights = problem(1, 300, 500, 32, seed=3)
    ours = run(weighted_loss, x, weight, ids, weights, piece_rows=piece_rows)
    whole = run(weighted_loss, x, weight, ids, weights, piece_rows=300)
    for our, their in zip(ours, whole, strict=True):
        # Sums of 300 float32 terms in another order: 300 * 2^-24 at most.
        assert (our - their).abs().max() < 300 * 2**-24 * their.abs().max()


def test_bfloat16_products_keep_float32_statistics():
    x, weight, ids, weights = problem(2, 200, 300, 32, seed=4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        sums_N, weights_N, grad_x, grad_weight = run(
            weighted_loss, x, weight, ids, weights, piece_rows=64
        )
    rounded = [tensor.detach().bfloat16().double() for tensor in (x, weight)]
    exact = run(weighted_loss_plain, *rounded, ids, weights.double())
    assert sums_N.dtype == weights_N.dtype == grad_x.dtype == grad_weight.dtype == torch.float32
    # Logits and their gradients are rounded to 8 bits (2^-9 relative) once each.
    assert (sums_N - exact[0]).abs().max() < 2**-9 * exact[0].abs().max()
    assert (grad_x - exact[2]).norm() < 2**-7 * exact[2].norm()
    assert (grad_weight - exact[3]).norm() < 2**-7 * exact[3].norm()


def test_without_gradients_only_the_sums_are_computed():
    x, weight, ids, weights = problem(2, 30, 50, 8, seed=5)
    with torch.no_grad():
        sums_N, _ = weighted_loss(x, weight, ids, weights, piece_rows=16)
    assert not sums_N.requires_grad
    torch.testing.assert_close(
        sums_N, run(weighted_loss_plain, x, weight, ids, weights)[0], rtol=1e-6, atol=0
    )


def test_ignored_targets_weigh_nothing_even_with_a_weight():
    x, weight, ids, weights = problem(1, 30, 50, 8, seed=6)
    assert (ids == IGNORE).any()
    _, weights_N, grad_x, _ = run(weighted_loss, x, weight, ids, weights)
    assert weights_N.item() == pytest.approx(weights[ids != IGNORE].sum().item(), rel=1e-6)
    assert not grad_x[ids == IGNORE].any()
    assert grad_x[ids != IGNORE].any(-1).all()


def test_a_second_backward_is_refused_instead_of_scaling_twice():
    x, weight, ids, weights = problem(1, 10, 20, 4, seed=7)
    sums_N, _ = weighted_loss(x, weight, ids, weights)
    sums_N.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        sums_N.sum().backward()


def test_pieces_are_bounded_in_bytes():
    assert default_piece_rows(1, 32_000, device_type="cuda") * 32_000 * 4 <= PIECE_BYTES["cuda"]
    assert default_piece_rows(8, 32_000, device_type="cuda") * 256_000 * 4 <= PIECE_BYTES["cuda"]
    assert default_piece_rows(1, 4096, device_type="cpu") * 4096 * 4 <= PIECE_BYTES["cpu"]
    assert default_piece_rows(1, 128_000, device_type="mps") == 256


def test_logits_of_all_rows_never_exist_at_once():
    rows, vocabulary = 4096, 2000
    x, weight, ids, _ = problem(1, rows, vocabulary, 4, seed=8)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), named=None):
            nonlocal largest
            result = function(*arguments, **(named or {}))
            if isinstance(result, torch.Tensor):
                largest = max(largest, result.numel())
            return result

    with Watch():
        weighted_loss(x, weight, ids, piece_rows=256)[0].sum().backward()
    assert largest == 256 * vocabulary

"""Forward and backward of a whole model through kernels, against the plain model in float32.

They run on a GPU where there is one, else under triton's interpreter.

Shapes: N local models, B rows, T tokens, P parameters of one model.
"""

from dataclasses import dataclass

import pytest
import torch
from naive_llama import random_tokens
from rounding import draw
from torch import Tensor

from atoll.config.model import ModelConfig
from atoll.model import gpu
from atoll.model.llama import Llama
from atoll.tensors import IGNORE

pytest.importorskip("triton", reason="the kernels are written in triton, which is not installed")

CONFIG = ModelConfig(
    vocab_size=53,
    layers=2,
    width=24,
    heads=4,
    kv_heads=2,
    head_width=8,
    ffn_width=40,
    context_length=16,
    init_std=0.1,
)
"""Grouped heads; only a head has a width that is a power of two, for a GPU's fused attention."""
ROWS, TOKENS = 2, 5


@dataclass
class Case:
    """A model, one microbatch of it, and what its kernels made of that."""

    model: Llama
    columns: tuple[Tensor, Tensor, Tensor, Tensor]
    divisor_N: Tensor
    sums_N: Tensor
    grad_NP: Tensor

    def gradients(self, rows: slice = slice(None), *, add: bool = False) -> Tensor:
        """Run the kernels over some of the rows."""
        columns = (column[:, rows] for column in self.columns)
        return gpu.gradients(self.model, *columns, divisor_N=self.divisor_N, add=add)

    def plain(self, *, narrow: bool) -> tuple[Tensor, Tensor]:
        """Return sums and gradients of the plain model, with or without autocast."""
        model = self.model
        model.zero_grad()
        kind = model.arena.data_NP.device.type
        with torch.autocast(kind, dtype=torch.bfloat16, enabled=narrow):
            sums_N, _ = model(*self.columns)
        (sums_N / self.divisor_N).sum().backward()
        return sums_N.detach(), model.arena.grad_NP.clone()


def make_model(
    device: torch.device, models: int, *, tied: bool = True, residual: str = "float32", **settings
) -> Llama:
    """Return models that differ, norm scales included."""
    config = CONFIG.model_copy(update={"tied_embeddings": tied, "residual": residual})
    model = Llama(config, num_models=models, device=device, **settings)
    model.arena.data_NP.add_(draw(*model.arena.data_NP.shape, seed=7, device=device), alpha=0.02)
    return model


def make_columns(device: torch.device, models: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return inputs, targets of which some are not counted, weights, and positions of each row."""
    tokens = random_tokens(CONFIG, models, ROWS, TOKENS + 1).to(device)
    targets = tokens[..., 1:].clone()
    targets[:, 0, 2] = targets[-1, 1, 0] = IGNORE
    weights = draw(*targets.shape, seed=8, device=device).abs()
    positions = torch.arange(models * ROWS * TOKENS, device=device) % 11
    return tokens[..., :-1], targets, weights, positions.view_as(targets)


@pytest.fixture(
    scope="module",
    params=[(1, False, "float32"), (3, True, "float32"), (2, True, "bfloat16")],
    ids=["one model", "three tied models", "two with a narrow residual stream"],
)
def case(kernel_device, request) -> Case:
    models, tied, residual = request.param
    model = make_model(kernel_device, models, tied=tied, residual=residual)
    columns = make_columns(kernel_device, models)
    divisor_N = 3.0 * torch.arange(1, models + 1, device=kernel_device)
    model.arena.grad_NP.fill_(float("nan"))  # what was there before must not matter
    made = Case(model, columns, divisor_N, divisor_N, model.arena.grad_NP)
    made.sums_N = made.gradients()
    made.grad_NP = model.arena.grad_NP.clone()
    return made


def test_gradients_replace_all_that_was_in_the_arena(case):
    assert torch.isfinite(case.grad_NP).all()


def test_gradients_are_as_near_to_float32_as_those_of_autocast(case):
    exact_sums_N, exact_NP = case.plain(narrow=False)
    _, narrow_NP = case.plain(narrow=True)
    # A GPU rounds the same values as autocast, in another order. The interpreter cuts off instead:
    # twice as far, and always towards zero, so that the errors of a product's terms add up.
    allowed = 1.5 if case.grad_NP.is_cuda else 3.0
    cut = case.model.arena.cut
    for name in case.model.arena.slices:
        exact = cut(exact_NP, name)
        error = relative(cut(case.grad_NP, name), exact)
        usual = relative(cut(narrow_NP, name), exact)
        assert (error <= allowed * usual).all(), (name, error, usual)
    # Losses near log 53 = 4 of logits near 1, each rounded to 2^-9 of its size.
    torch.testing.assert_close(case.sums_N, exact_sums_N, rtol=2**-9, atol=0)


def test_scoring_gives_the_same_bits_as_training(case):
    sums_N, weights_N = gpu.loss(case.model, *case.columns)
    assert torch.equal(sums_N, case.sums_N)
    counted = case.columns[1] != IGNORE
    torch.testing.assert_close(weights_N, (case.columns[2] * counted).sum((1, 2)))


def test_added_gradients_of_parts_are_those_of_the_whole(case):
    case.model.arena.grad_NP.fill_(float("nan"))
    sums_N = sum(case.gradients(slice(row, row + 1), add=row > 0) for row in range(ROWS))
    torch.testing.assert_close(sums_N, case.sums_N, rtol=2**-9, atol=0)
    # Products of fewer rows may add in another order, which moves a few of their results to the
    # next number in bfloat16; what is added, is added in float32.
    assert (relative(case.model.arena.grad_NP, case.grad_NP) < 2**-8).all()


def test_pieces_of_the_logits_join_without_a_seam(case, monkeypatch):
    monkeypatch.setattr(gpu, "_piece_rows", lambda *_: 3)  # does not divide 2 * 5 rows
    case.model.arena.grad_NP.fill_(float("nan"))
    sums_N = case.gradients()
    torch.testing.assert_close(sums_N, case.sums_N, rtol=2**-9, atol=0)
    # As with parts of a batch.
    assert (relative(case.model.arena.grad_NP, case.grad_NP) < 2**-8).all()


def test_pieces_of_the_logits_take_their_share_of_the_memory(monkeypatch):
    monkeypatch.setattr(gpu, "SMALLEST_MEMORY", 1 << 20)
    monkeypatch.setattr(gpu, "LOGITS_SHARE", 4)
    head_NVD = torch.empty(2, 100, 3, dtype=torch.bfloat16)
    assert gpu._piece_rows(head_NVD) * head_NVD[..., 0].numel() * 2 <= (1 << 20) // 4
    # Never so few that the products starve.
    assert gpu._piece_rows(torch.empty(2, 10_000, 3)) == 256


def test_a_model_for_inference_scores_through_kernels_where_autocast_asks_for_it(kernel_device):
    model = make_model(kernel_device, 1, trainable=False, kernels=True)
    columns = make_columns(kernel_device, 1)
    expected = gpu.loss(model, *columns)
    with torch.no_grad(), torch.autocast(kernel_device.type, dtype=torch.bfloat16):
        found = model(*columns)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)
    with torch.no_grad():
        exact_N, _ = model(*columns)
    assert not torch.equal(exact_N, expected[0])
    torch.testing.assert_close(expected[0], exact_N, rtol=2**-9, atol=0)


def relative(ours_NP: Tensor, exact_NP: Tensor) -> Tensor:
    """Return the size of each model's error relative to that of the exact values, [N]."""
    error_NP = (ours_NP.double() - exact_NP.double()).flatten(1)
    return error_NP.norm(dim=1) / exact_NP.double().flatten(1).norm(dim=1)

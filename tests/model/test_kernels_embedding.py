"""The kernels that add embedding gradients up, against their plain twin in float64.

They run on a GPU where there is one, else under triton's interpreter.

Shapes: N local models, M tokens of each, V vocabulary, D width.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rounding import assert_near, draw
from torch import Tensor

pytest.importorskip("triton", reason="the kernels are written in triton, which is not installed")

from atoll.model.kernels import embedding


def make_sink(models: int, vocabulary: int, width: int, device: torch.device) -> Tensor:
    """Return [N, V, D] as it lies in an arena: a model's rows do not follow those of another."""
    flat_NP = draw(models, vocabulary * width + 7, seed=0, device=device)
    return flat_NP[:, 3 : 3 + vocabulary * width].view(models, vocabulary, width)


def added(sink_NVD: Tensor, ids_NM: Tensor, grad_NMD: Tensor) -> Tensor:
    """Return the naive twin's result."""
    result_NVD = sink_NVD.clone()
    for model, ids_M in enumerate(ids_NM):
        result_NVD[model].index_add_(0, ids_M, grad_NMD[model])
    return result_NVD


def assert_is_its_twin(sink_NVD: Tensor, ids_NM: Tensor, grad_NMD: Tensor) -> None:
    exact_NVD = added(sink_NVD.double(), ids_NM, grad_NMD.double())
    sizes_NVD = added(sink_NVD.double().abs(), ids_NM, grad_NMD.double().abs())
    absent_NV = added(torch.zeros_like(sink_NVD), ids_NM, torch.ones_like(grad_NMD))[..., 0] == 0
    kept = sink_NVD[absent_NV].clone()
    embedding.add_rows(sink_NVD, ids_NM, grad_NMD)
    # At most every token in one row, one after another, and what was there.
    assert_near(sink_NVD, exact_NVD, roundings=ids_NM.shape[1] + 1, sizes=sizes_NVD)
    assert torch.equal(sink_NVD[absent_NV], kept)


@settings(deadline=None, max_examples=12)
@given(
    models=st.integers(1, 4),
    tokens=st.integers(1, 17),
    vocabulary=st.integers(1, 9),
    width=st.integers(1, 9),
    stretch=st.sampled_from([1, 2, 4, 16]),
    seed=st.integers(0, 1000),
)
def test_gradients_of_rows_are_added_as_by_the_twin(
    kernel_device, models, tokens, vocabulary, width, stretch, seed
):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocabulary, (models, tokens), generator=generator).to(kernel_device)
    grad = draw(models, tokens, width, seed=seed + 1, device=kernel_device)
    sink = make_sink(models, vocabulary, width, kernel_device)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(embedding, "STRETCH", stretch)
        assert_is_its_twin(sink, ids, grad)


@pytest.mark.parametrize(
    "counts",
    [[16], [4, 12], [3, 9, 4], [5, 1, 1, 9], [4, 4, 4, 4], [1, 14, 1], [8, 7]],
    ids=lambda counts: "-".join(map(str, counts)),
)
def test_runs_of_equal_ids_may_end_anywhere_in_stretches(kernel_device, counts, monkeypatch):
    monkeypatch.setattr(embedding, "STRETCH", 4)
    ids = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    ids = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))]
    sink = make_sink(1, len(counts) + 1, 5, kernel_device)
    grad = draw(1, len(ids), 5, seed=1, device=kernel_device)
    assert_is_its_twin(sink, ids[None].to(kernel_device), grad)


def test_the_same_bits_come_out_every_time(kernel_device):
    ids = torch.arange(80, device=kernel_device).view(2, 40) % 3
    grad = draw(2, 40, 24, seed=1, device=kernel_device)
    sinks = [make_sink(2, 3, 24, kernel_device) for _ in range(2)]
    for sink in sinks:
        embedding.add_rows(sink, ids, grad)
    assert torch.equal(*sinks)

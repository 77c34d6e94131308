"""Hand-written backward passes equal autograd's of their plain twins."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.model import fused, rope

# Float64 rounding of short sums; far below any mistake of a formula.
EXACT = {"rtol": 1e-10, "atol": 1e-10}


def draw(*shape, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


def assert_same(fast, plain, inputs, others=(), **tolerance):
    """Compare results and gradients of two functions at the same inputs."""
    found = []
    for function in (fast, plain):
        leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
        results = function(*leaves, *others)
        results = results if isinstance(results, tuple) else (results,)
        scale = [draw(*result.shape, seed=index) for index, result in enumerate(results)]
        sum((r.double() * s.detach()).sum() for r, s in zip(results, scale, strict=True)).backward()
        found.append([*results, *(leaf.grad for leaf in leaves)])
    for ours, theirs in zip(*found, strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, **(tolerance or EXACT))


@settings(deadline=None, max_examples=25)
@given(rows=st.integers(1, 9), width=st.integers(1, 20), models=st.integers(1, 3))
def test_rms_norm_equals_its_twin(rows, width, models):
    x, scale = draw(models, rows, width), draw(models, 1, width, seed=1)
    assert_same(fused.rms_norm, fused.rms_norm_plain, [x, scale], (1e-5,))
    assert_same(fused.rms_norm, fused.rms_norm_plain, [x[0], scale[0]], (1e-3,))


def test_rms_norm_of_narrow_inputs_has_wide_statistics():
    x, scale = draw(5, 7, dtype=torch.bfloat16), draw(7, dtype=torch.float32)
    exact = fused.rms_norm_plain(x.double(), scale.double(), 1e-5)
    assert fused.rms_norm(x, scale, 1e-5).dtype == torch.float32
    torch.testing.assert_close(fused.rms_norm(x, scale, 1e-5).double(), exact, rtol=1e-6, atol=1e-6)


@settings(deadline=None, max_examples=25)
@given(rows=st.integers(1, 9), width=st.integers(1, 20), dims=st.integers(2, 3))
def test_swiglu_equals_its_twin(rows, width, dims):
    shape = (2, rows, 2 * width)[3 - dims :]
    assert_same(fused.swiglu, fused.swiglu_plain, [draw(*shape)])


@settings(deadline=None, max_examples=25)
@given(
    rows=st.integers(1, 3),
    tokens=st.integers(1, 7),
    query_heads=st.integers(1, 4),
    key_heads=st.integers(1, 3),
    pairs=st.integers(1, 5),
    own_positions=st.booleans(),
)
def test_split_heads_equals_its_twin(rows, tokens, query_heads, key_heads, pairs, own_positions):
    shape = (rows, tokens) if own_positions else (tokens,)
    positions = torch.randint(0, 50, shape)
    cos, sin = (
        table.double() for table in rope.tables(positions, torch.rand(pairs, dtype=torch.float32))
    )
    qkv = draw(rows, tokens, query_heads + 2 * key_heads, 2 * pairs)
    assert_same(
        fused.split_heads, fused.split_heads_plain, [qkv], (cos, sin, query_heads, key_heads)
    )


def test_split_heads_of_bfloat16_turns_in_float32():
    cos, sin = rope.tables(torch.arange(6), torch.rand(4))
    qkv = draw(2, 6, 5, 8, dtype=torch.bfloat16)
    # Both round the turned pairs once; another order of two products moves the last bit.
    assert_same(
        fused.split_heads,
        fused.split_heads_plain,
        [qkv],
        (cos, sin, 3, 1),
        rtol=2**-7,
        atol=2**-7,
    )


def test_split_heads_keeps_values_and_lengths():
    cos, sin = rope.tables(torch.arange(6), torch.rand(4))
    qkv = draw(2, 6, 5, 8, dtype=torch.float32)
    q, k, v = fused.split_heads(qkv, cos, sin, 3, 1)
    assert torch.equal(v[:, 0], qkv[:, :, 4])
    for turned, plain in ((q, qkv[:, :, :3]), (k, qkv[:, :, 3:4])):
        torch.testing.assert_close(
            turned.norm(dim=-1), plain.norm(dim=-1).transpose(1, 2), rtol=1e-5, atol=1e-5
        )


def test_packed_embedding_equals_one_lookup_for_each_model():
    weight = draw(3, 11, 4)
    ids = torch.randint(0, 11, (3, 20))  # with repeats, which must add up

    def plain(weight):
        return torch.stack([weight[n][ids[n]] for n in range(3)])

    assert_same(lambda w: fused.embed_packed(ids, w), plain, [weight])


@pytest.mark.parametrize("width", [2, 8])
def test_rotation_depends_on_distance_alone(width):
    frequencies = torch.rand(width // 2)
    q, k = torch.randn(1, 1, 1, width), torch.randn(1, 1, 1, width)

    def score(i, j):
        turned = [
            rope.rotate(x, *rope.tables(torch.tensor([p]), frequencies))
            for x, p in ((q, i), (k, j))
        ]
        return (turned[0] * turned[1]).sum()

    torch.testing.assert_close(score(9, 4), score(25, 20), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(score(0, 0), (q * k).sum(), rtol=1e-5, atol=1e-6)

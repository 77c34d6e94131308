"""One Llama equals transformers' and the naive one; N of them equal N single ones."""

import copy
import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_llama import (
    SMALL,
    add_noise,
    naive_logits,
    naive_loss,
    random_tokens,
    transformers_twin,
    weights_of,
)

from atoll.config.model import LinearRopeScaling, Llama3RopeScaling, ModelConfig
from atoll.model.llama import Llama
from atoll.tensors import IGNORE

FP32_TOLERANCE = 1e-5
"""Largest difference over the largest value: FP32 rounding (6e-8) grown through a few layers.
Required by the project of logits; gradients are held to the same."""


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


@st.composite
def shapes(draw):
    keys, shared = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    channels = 2 * draw(st.integers(1, 9))
    heads = keys * shared
    own_width = draw(st.booleans())
    return ModelConfig(
        vocab_size=draw(st.integers(2, 300)),
        layers=draw(st.integers(1, 3)),
        width=heads * (draw(st.integers(2, 20)) if own_width else channels),
        heads=heads,
        kv_heads=keys if shared > 1 else None,
        head_width=channels if own_width else None,
        ffn_width=draw(st.integers(1, 90)),
        context_length=draw(st.integers(1, 40)),
        rope_theta=draw(st.sampled_from([100.0, 10_000.0, 500_000.0])),
        rope_scaling=draw(
            st.sampled_from(
                [
                    None,
                    LinearRopeScaling(kind="linear", factor=4.0),
                    Llama3RopeScaling(
                        kind="llama3",
                        factor=8.0,
                        low_freq_factor=1.0,
                        high_freq_factor=4.0,
                        original_context_length=64,
                    ),
                ]
            )
        ),
        norm_eps=draw(st.sampled_from([1e-6, 1e-5, 1e-3])),
        init_std=draw(st.sampled_from([0.02, 0.06])),
        tied_embeddings=draw(st.booleans()),
    )


@settings(deadline=None, max_examples=40)
@given(config=shapes(), rows=st.integers(1, 3), tokens=st.integers(1, 50), seed=st.integers(0, 99))
def test_logits_equal_those_of_transformers(config, rows, tokens, seed):
    model = Llama(config, seed=seed, trainable=False)
    inputs_BT = random_tokens(config, rows, tokens, seed=seed)
    with torch.no_grad():
        theirs = transformers_twin(model)(inputs_BT).logits
        ours = model.logits(inputs_BT[None])[0]
    assert ours.dtype == torch.float32
    assert relative(ours, theirs) < FP32_TOLERANCE


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kv_heads", [None, 2, 1])
def test_loss_and_gradients_equal_those_of_transformers(tied, kv_heads):
    config = SMALL.model_copy(update={"tied_embeddings": tied, "kv_heads": kv_heads})
    model = Llama(config, seed=1)
    tokens_BU = random_tokens(config, 3, 25)
    inputs, targets = tokens_BU[:, :-1], tokens_BU[:, 1:]
    twin = transformers_twin(model)
    theirs = twin(inputs, labels=inputs, shift_labels=targets.contiguous()).loss
    theirs.backward()
    sum_N, weight_N = model(inputs[None], targets[None])
    (sum_N / weight_N).sum().backward()
    assert weight_N.tolist() == [72.0]
    assert relative(sum_N / weight_N, theirs) < 1e-6
    grads = {name: p.grad for name, p in twin.named_parameters()}
    prefix, own = "model.layers.1", model.arena.grad_view
    joint = [grads[f"{prefix}.self_attn.{x}_proj.weight"] for x in "qkv"]
    assert relative(own("layers.1.qkv")[0], torch.cat(joint)) < FP32_TOLERANCE
    joint = [grads[f"{prefix}.mlp.{x}_proj.weight"] for x in ("gate", "up")]
    assert relative(own("layers.1.gate_up")[0], torch.cat(joint)) < FP32_TOLERANCE
    for name, theirs_name in (
        ("embedding", "model.embed_tokens.weight"),
        ("layers.0.mlp_out", "model.layers.0.mlp.down_proj.weight"),
        ("layers.0.attention_norm", "model.layers.0.input_layernorm.weight"),
        ("norm", "model.norm.weight"),
        *([] if tied else [("head", "lm_head.weight")]),
    ):
        assert relative(own(name)[0], grads[theirs_name]) < FP32_TOLERANCE, name


@settings(deadline=None, max_examples=15)
@given(config=shapes(), seed=st.integers(0, 99), models=st.integers(1, 3))
def test_loss_and_gradients_equal_the_naive_model_in_float64(config, seed, models):
    config = config.model_copy(update={"rope_scaling": None})
    model = Llama(config, num_models=models, seed=seed)
    add_noise(model)
    tokens_NBU = random_tokens(config, models, 2, 14, seed=seed)
    inputs, targets = tokens_NBU[..., :-1], tokens_NBU[..., 1:]
    sums_N, _ = model(inputs, targets)
    sums_N.sum().backward()
    for index in range(models):
        weights = weights_of(model, index)
        exact = naive_loss(config, weights, inputs[index], targets[index])
        exact.backward()
        assert sums_N[index].item() == pytest.approx(exact.item(), rel=1e-5)
        plain = weights_of(model, index, torch.float32)
        naive_loss(config, plain, inputs[index], targets[index]).backward()
        for name, weight in weights.items():
            error = (model.arena.grad_view(name)[index] - weight.grad).abs().max()
            # Shapes that amplify rounding do so in the plain float32 model too.
            rounding = (plain[name].grad - weight.grad).abs().max()
            largest = weight.grad.abs().max()
            assert error <= max(FP32_TOLERANCE * largest, 4 * rounding), name


@pytest.mark.parametrize("tied", [True, False])
def test_packed_models_equal_single_ones(tied):
    config = SMALL.model_copy(update={"tied_embeddings": tied})
    packed = Llama(config, num_models=3)
    add_noise(packed)
    tokens_NBU = random_tokens(config, 3, 2, 21)
    inputs, targets = tokens_NBU[..., :-1], tokens_NBU[..., 1:]
    scale_N = torch.tensor([1.0, 0.25, 3.0])  # a gradient in a wrong model would show
    sums_N, weights_N = packed(inputs, targets)
    (sums_N * scale_N).sum().backward()
    for index in range(3):
        single = Llama(config)
        single.arena.data_NP.copy_(packed.arena.data_NP[index : index + 1])
        one = slice(index, index + 1)
        sum_1, weight_1 = single(inputs[one], targets[one])
        (sum_1 * scale_N[one]).sum().backward()
        assert weight_1 == weights_N[index]
        # Not equal in bits: a batched product may sum in another order than a plain one. Rounding
        # (6e-8) of float32 sums of at most 131 terms, through two layers.
        assert sum_1.item() == pytest.approx(sums_N[index].item(), rel=1e-6)
        for name in packed.arena.slices:
            ours, theirs = packed.arena.grad_view(name)[one], single.arena.grad_view(name)
            assert relative(ours, theirs) < 1e-6, name
        with torch.no_grad():
            logits = packed.logits(inputs)[one]
            assert relative(logits, single.logits(inputs[one])) < 1e-6


def test_documents_and_positions_equal_separate_rows():
    model = Llama(SMALL)
    lengths = (5, 1, 9)
    whole = random_tokens(SMALL, 1, sum(lengths))
    documents = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))[None]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    with torch.no_grad():
        joined = model.logits(whole[None], positions[None], documents[None].int())[0, 0]
        apart = [model.logits(part[None])[0, 0] for part in whole.split(lengths, dim=1)]
    assert relative(joined, torch.cat(apart)) < 1e-6


def test_documents_reach_the_loss_of_packed_models():
    model = Llama(SMALL, num_models=2)
    add_noise(model)
    tokens = random_tokens(SMALL, 2, 2, 13)
    documents = (torch.arange(12) >= torch.tensor([[[4], [9]], [[1], [6]]])).int()
    positions = torch.arange(12).expand(2, 2, 12) + 3
    sums_N, _ = model(tokens[..., :-1], tokens[..., 1:], None, positions, documents)
    for index in range(2):
        exact = naive_loss(
            SMALL,
            weights_of(model, index),
            tokens[index, :, :-1],
            tokens[index, :, 1:],
            positions_BT=positions[index],
            documents_BT=documents[index],
        )
        assert sums_N[index].item() == pytest.approx(exact.item(), rel=1e-6)


def test_strided_inputs_are_read_as_they_are():
    model = Llama(SMALL)
    tokens_BU = random_tokens(SMALL, 4, 17)
    views = model(tokens_BU[None, :, :-1], tokens_BU[None, :, 1:])
    copies = model(tokens_BU[None, :, :-1].contiguous(), tokens_BU[None, :, 1:].contiguous())
    assert views[0].item() == copies[0].item()


def test_ignored_targets_and_weights_enter_the_gradients():
    model = Llama(SMALL)
    tokens_BU = random_tokens(SMALL, 3, 11)
    targets = tokens_BU[:, 1:].clone()
    targets[0, 3:] = IGNORE
    weights = torch.rand(3, 10, generator=torch.Generator().manual_seed(2))
    sum_N, weight_N = model(tokens_BU[None, :, :-1], targets[None], weights[None])
    sum_N.sum().backward()
    exact_weights = weights_of(model)
    exact = naive_loss(SMALL, exact_weights, tokens_BU[:, :-1], targets, weights)
    exact.backward()
    assert sum_N.item() == pytest.approx(exact.item(), rel=1e-6)
    assert weight_N.item() == pytest.approx(weights[targets != IGNORE].sum().item(), rel=1e-6)
    for name, weight in exact_weights.items():
        assert relative(model.arena.grad_view(name)[0], weight.grad) < FP32_TOLERANCE, name


def test_a_batch_without_targets_costs_and_teaches_nothing():
    model = Llama(SMALL, num_models=2)
    inputs = random_tokens(SMALL, 2, 2, 8)
    sums_N, weights_N = model(inputs, torch.full_like(inputs, IGNORE))
    sums_N.sum().backward()
    assert sums_N.tolist() == [0.0, 0.0]
    assert weights_N.tolist() == [0.0, 0.0]
    assert not model.arena.grad_NP.any()


def test_rows_longer_than_the_context_use_the_angles_that_follow():
    model = Llama(SMALL)
    inputs = random_tokens(SMALL, 1, SMALL.context_length + 9)
    exact = naive_logits(SMALL, weights_of(model), inputs)
    with torch.no_grad():
        assert relative(model.logits(inputs[None])[0], exact) < FP32_TOLERANCE


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning"
)  # torch's compiler uses what it deprecates
@pytest.mark.parametrize(
    ("backend", "models"),
    [
        ("aot_eager", 1),
        ("aot_eager", 2),
        pytest.param(
            "inductor",
            1,
            marks=pytest.mark.skipif(
                shutil.which("g++") is None, reason="inductor needs a C++ compiler"
            ),
        ),
    ],
)
def test_a_compiled_model_equals_the_eager_one(backend, models):
    eager = Llama(SMALL.model_copy(update={"layers": 1}), num_models=models)
    add_noise(eager)
    whole = copy.deepcopy(eager)
    compiled = torch.compile(whole, fullgraph=True, dynamic=False, backend=backend)
    tokens = random_tokens(SMALL, models, 2, 17)
    ours, theirs = (model(tokens[..., :-1], tokens[..., 1:])[0] for model in (compiled, eager))
    ours.sum().backward()
    theirs.sum().backward()
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    assert relative(whole.arena.grad_NP, eager.arena.grad_NP) < FP32_TOLERANCE
    torch._dynamo.reset()

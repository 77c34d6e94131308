"""Estimates equal what is counted when the thing is done."""

import pytest
import torch
from naive_llama import SMALL, random_tokens
from torch.utils.flop_counter import FlopCounterMode

from atoll.config.model import ModelConfig, parameter_count
from atoll.model.card import write_card
from atoll.model.cost import (
    Part,
    activation_bytes,
    forward_flops,
    training_flops,
    training_memory,
    update_parts,
)
from atoll.model.llama import Llama

PRESETS = {
    20_403_520: (8, 320, 5, 896),
    48_507_392: (10, 512, 8, 1408),
    91_605_120: (14, 640, 10, 1792),
}


@pytest.mark.parametrize("parameters", PRESETS)
def test_the_presets_have_exactly_their_parameters(parameters):
    layers, width, heads, ffn = PRESETS[parameters]
    config = ModelConfig(layers=layers, width=width, heads=heads, ffn_width=ffn)
    assert parameter_count(config) == parameters
    model = Llama(config, seed=None, trainable=False)
    assert model.arena.num_parameters == parameters
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


@pytest.mark.parametrize("tied", [True, False])
def test_operations_equal_those_that_torch_counts(tied):
    config = SMALL.model_copy(update={"tied_embeddings": tied})
    rows, tokens = 2, 32
    model = Llama(config)
    inputs = random_tokens(config, 1, rows, tokens)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), torch.no_grad():
        counter = FlopCounterMode(display=False)
        with counter:
            model.logits(inputs)
    # Torch counts all pairs of the attention; a causal one needs half of them.
    pairs = 4 * config.heads * 8 * tokens * config.layers
    expected = forward_flops(config, context_length=tokens) + pairs / 2
    assert counter.get_total_flops() == rows * tokens * expected
    assert training_flops(config) == 3 * forward_flops(config)


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("kv_heads", [None, 2])
def test_activations_are_what_the_forward_keeps(narrow, kv_heads):
    config = SMALL.model_copy(update={"kv_heads": kv_heads, "width": 96, "vocab_size": 64})
    model = Llama(config)
    own = {model.arena.data_NP.untyped_storage().data_ptr()}
    kept: dict[int, int] = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own and tensor.is_floating_point():
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    inputs = random_tokens(config, 1, 4, 32)
    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", dtype=torch.bfloat16, enabled=narrow),
    ):
        features = model.hidden(inputs)
    # Autocast also keeps narrow copies of the weights, which are no activations.
    weights = 2 * (model.arena.decay_size - model.embedding.numel()) if narrow else 0
    found = (sum(kept.values()) - weights) / inputs.numel()
    assert features.shape[-1] == 96
    # Row statistics and small tables are left out of the estimate: a few percent at this width.
    assert found == pytest.approx(activation_bytes(config, narrow=narrow), rel=0.1)


def test_memory_counts_every_model_and_grows_with_the_batch():
    one = training_memory(SMALL, micro_batch_size=4)
    three = training_memory(SMALL, micro_batch_size=4, num_models=3)
    double = training_memory(SMALL, micro_batch_size=8)
    assert one.weights == 4 * parameter_count(SMALL)
    assert one.moments == 2 * one.weights
    assert three.weights == 3 * one.weights
    assert three.activations == 3 * one.activations
    assert double.activations == 2 * one.activations
    assert double.total > one.total


def test_the_card_says_what_the_model_is(tmp_path):
    write_card(tmp_path / "README.md", SMALL, name="small", has_tokenizer=True)
    text = (tmp_path / "README.md").read_text()
    assert f"{parameter_count(SMALL):,} parameters" in text
    assert "2 for keys and values" in text
    assert 'AutoTokenizer.from_pretrained("small")' in text


def parts_by_term(config, **options):
    found: dict[str, list[Part]] = {}
    for part in update_parts(config, **options):
        found.setdefault(part.term, []).append(part)
    return found


def of_20m(**options):
    defaults = {"local_targets": 16_384, "micro_targets": 16_384, "narrow": True}
    return parts_by_term(ModelConfig(), **defaults | options)


def flops(parts):
    return sum(part.flops for part in parts)


def moved(parts):
    return sum(part.moved_bytes for part in parts)


def test_20m_takes_138_million_operations_a_target_by_hand():
    # Layers 6 * 1,269,760 * 8, head 6 * 10,240,000, attention 6 * 1024 * 320 * 8.
    assert training_flops(ModelConfig()) == 60_948_480 + 61_440_000 + 15_728_640 == 138_117_120
    found = of_20m()
    assert flops(found["gemm"]) == 60_948_480 + 61_440_000
    # Seven products of T/2 keys where training_flops counts six: the backward repeats the scores.
    assert flops(found["attention"]) == 15_728_640 * 7 / 6


@pytest.mark.parametrize("kv_heads", [None, 1, 5])
@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("micro", [1024, 4096])
def test_parts_take_the_operations_of_a_whole_update(kv_heads, narrow, micro):
    config = ModelConfig(kv_heads=kv_heads)
    found = parts_by_term(config, local_targets=4096, micro_targets=micro, narrow=narrow)
    repeated = 2 * config.context_length * config.width * config.layers / 2
    total = sum(map(flops, found.values()))
    assert total == training_flops(config) + repeated
    assert flops(found["loss"]) == flops(found["elementwise"]) == 0


def test_bytes_of_the_head_are_counted_by_hand():
    head = {part.name: part.moved_bytes for part in of_20m()["gemm"] if "head" in part.name}
    own = 2 * (320 + 32_000)
    assert head["head forward"] == head["head input gradient"] == own + 2 * 10_240_000 / 16_384
    assert head["head weight gradient"] == own + 4 * 10_240_000 / 16_384


def test_one_pass_over_the_logits_reads_and_writes_them():
    assert moved(of_20m()["loss"]) == 2 * 2 * 32_000
    assert moved(of_20m(narrow=False)["loss"]) == 2 * 4 * 32_000


def test_the_optimizer_moves_32_bytes_a_parameter_whatever_the_microbatch():
    expected = 32 * 20_403_520 / 16_384
    assert moved(of_20m()["optimizer_mixing"]) == expected
    assert moved(of_20m(micro_targets=1024)["optimizer_mixing"]) == expected


def test_smaller_microbatches_read_matrices_again_and_add_to_gradients():
    products = of_20m()["gemm"]
    halves = of_20m(micro_targets=8192)["gemm"]
    matrices = 20_403_520 - 17 * 320
    # Two more reads of each matrix in bfloat16, one more read and write of its gradient.
    assert moved(halves) - moved(products) == pytest.approx((4 + 8) * matrices / 16_384, rel=1e-12)


def test_a_float32_model_moves_its_residual_stream_without_narrow_copies():
    found = {part.name: part.moved_bytes for part in of_20m(narrow=False)["elementwise"]}
    width, layers, ffn = 320, 8, 896
    # Forward: stream and output in, stream and normed copy out; one norm adds nothing.
    assert found["add and norm forward"] == 4 * width * (4 * 2 * layers + 2)
    # Backward: gradient of the copy, stream, its gradient in and out; behind the last it ends.
    assert found["add and norm backward"] == 4 * width * (4 * 2 * layers + 3)
    assert found["SwiGLU forward"] == 4 * 3 * ffn * layers
    assert found["SwiGLU backward"] == 4 * 5 * ffn * layers
    assert found["rotary forward"] == 4 * 4 * width * layers

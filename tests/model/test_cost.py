"""Estimates equal what is counted when the thing is done."""

import pytest
import torch
from naive_llama import SMALL, random_tokens
from torch.utils.flop_counter import FlopCounterMode

from atoll.config.model import ModelConfig, parameter_count
from atoll.model.card import write_card
from atoll.model.cost import (
    activation_bytes,
    forward_flops,
    training_flops,
    training_memory,
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

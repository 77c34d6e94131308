"""The arena holds every weight and gradient, and nothing takes them out of it."""

import copy
import math

import pytest
import torch
from naive_llama import SMALL, add_noise, random_tokens

from atoll.config.model import ModelConfig
from atoll.errors import UsageError
from atoll.model.llama import Llama


def test_gradients_add_up_in_the_arena():
    model = Llama(SMALL)
    tokens = random_tokens(SMALL, 1, 2, 9)
    for _ in range(2):
        model(tokens[..., :-1], tokens[..., 1:])[0].sum().backward()
    twice = model.arena.grad_NP.clone()
    model.zero_grad()
    assert not model.arena.grad_NP.any()
    model(tokens[..., :-1], tokens[..., 1:])[0].sum().backward()
    torch.testing.assert_close(twice, 2 * model.arena.grad_NP, rtol=1e-6, atol=0)
    for name, parameter in model.named_parameters():
        assert parameter.data_ptr() == model.arena.view(name).data_ptr()
        assert parameter.grad is not None
        assert parameter.grad.data_ptr() == model.arena.grad_view(name).data_ptr()


def test_initial_weights_depend_on_the_seed_alone():
    single, packed = Llama(SMALL, seed=4), Llama(SMALL, num_models=3, seed=4)
    assert all(torch.equal(row, single.arena.data_NP[0]) for row in packed.arena.data_NP)
    assert not torch.equal(Llama(SMALL, seed=5).arena.data_NP, single.arena.data_NP)
    longer = Llama(SMALL.model_copy(update={"layers": 3}), seed=4)
    assert torch.equal(longer.arena.view("layers.1.qkv"), single.arena.view("layers.1.qkv"))


def test_initial_weights_have_the_asked_spread():
    config = ModelConfig(vocab_size=4096, layers=1, width=128, heads=4, ffn_width=352)
    model = Llama(config)
    matrices = model.arena.data_NP[:, : model.arena.decay_size]
    # Standard error of a standard deviation from n draws: sigma / sqrt(2 n); five of them.
    slack = 5 * config.init_std / math.sqrt(2 * matrices.numel())
    assert abs(matrices.std().item() - config.init_std) < slack
    assert (model.arena.data_NP[:, model.arena.decay_size :] == 1).all()


@pytest.mark.parametrize(
    "move",
    [
        lambda m: m.to("meta"),
        lambda m: m.half(),
        lambda m: m.double(),
        lambda m: m.to(torch.bfloat16),
    ],
)
def test_moving_a_model_is_refused(move):
    model = Llama(SMALL)
    with pytest.raises(UsageError, match="cannot be moved"):
        move(model)
    assert model.embedding.data_ptr() == model.arena.data_NP.data_ptr()


def test_moving_a_model_to_where_it_is_does_nothing():
    model = Llama(SMALL)
    assert model.to("cpu").float() is model
    assert model.embedding.data_ptr() == model.arena.data_NP.data_ptr()


def test_a_deep_copy_has_its_own_arena():
    model = Llama(SMALL, num_models=2)
    add_noise(model)
    twin = copy.deepcopy(model)
    assert torch.equal(twin.arena.data_NP, model.arena.data_NP)
    twin.arena.data_NP.zero_()
    assert not twin.embedding.any()
    assert model.embedding.any()


def test_a_model_for_inference_has_no_gradients():
    model = Llama(SMALL, trainable=False)
    assert model.arena.grad_NP.numel() == 0
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_a_state_dict_loads_into_the_arena():
    source, target = Llama(SMALL, seed=1), Llama(SMALL, seed=2)
    target.load_state_dict(source.state_dict())
    assert torch.equal(source.arena.data_NP, target.arena.data_NP)
    assert set(source.state_dict()) == set(source.arena.slices)


def test_the_arena_has_matrices_first_and_no_gaps():
    arena = Llama(SMALL.model_copy(update={"tied_embeddings": False})).arena
    places = list(arena.slices.values())
    assert [place.offset for place in places] == [
        sum(earlier.size for earlier in places[:index]) for index in range(len(places))
    ]
    assert sum(place.size for place in places) == arena.num_parameters
    is_matrix = [len(place.shape) == 2 for place in places]
    assert is_matrix == sorted(is_matrix, reverse=True)
    assert arena.decay_size == sum(place.size for place in places if len(place.shape) == 2)

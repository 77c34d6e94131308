"""Rules between settings: each says what was found and the nearest values that fit."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from atoll.config.budget import plan_budget
from atoll.config.load import load_config
from atoll.config.model import ModelConfig, parameter_count
from atoll.config.schema import RunConfig
from atoll.errors import ConfigError


def fault_of(*sets):
    """Return the one fault without its places."""
    with pytest.raises(ConfigError) as caught:
        load_config([], sets)
    assert caught.value.exit_code == 2
    (fault,) = caught.value.faults
    places = ", ".join(f"--set {number}" for number in range(1, len(sets) + 1))
    assert fault.startswith("--set ")
    assert set(fault.split(": ")[0].split(", ")) <= set(places.split(", "))
    return fault.partition(": ")[2]


@pytest.mark.parametrize(
    ("sets", "fault"),
    [
        (
            ["model.width=100", "model.heads=7"],
            "model.width 100 does not split into 7 model.heads of one even size. "
            "Set model.width to 98 or 112, or give model.head_width.",
        ),
        (
            ["model.width=35"],
            "model.width 35 does not split into 5 model.heads of one even size. "
            "Set model.width to 30 or 40, or give model.head_width.",
        ),
        (
            ["model.width=8"],
            "model.width 8 does not split into 5 model.heads of one even size. "
            "Set model.width to 10, or give model.head_width.",
        ),
        (
            ["model.head_width=9"],
            "model.head_width 9 is odd; rotary positions turn pairs. Set it to 8 or 10.",
        ),
        (
            ["model.kv_heads=4", "model.heads=10"],
            "model.kv_heads 4 does not divide model.heads 10. Set it to one of 1, 2, 5, 10.",
        ),
        (
            ["training.batch_tokens=3000"],
            "training.batch_tokens 3000 is not a multiple of strategy.models x "
            "model.context_length = 1 x 1024 = 1024. Set it to 2048 or 3072.",
        ),
        (
            ["training.batch_tokens=1000"],
            "training.batch_tokens 1000 is not a multiple of strategy.models x "
            "model.context_length = 1 x 1024 = 1024. Set it to 1024.",
        ),
        (
            ["training.micro_batch_size=48"],
            "training.micro_batch_size 48 does not divide the 128 sequences that one update gives "
            "each local model. Set it to 32 or 64.",
        ),
        (
            ["training.tokens_per_parameters=0.3"],
            "training.tokens_per_parameters 0.3 is not a whole number of virtual epochs of "
            "training.epoch_tokens_per_parameters 0.5. Set the total to 0.5.",
        ),
        (
            ["training.epoch_tokens_per_parameters=0.3"],
            "training.tokens_per_parameters 20.0 is not a whole number of virtual epochs of "
            "training.epoch_tokens_per_parameters 0.3. Set the total to 19.8 or 20.1.",
        ),
        (
            ["training.epoch_tokens_per_parameters=1e-9"],
            "training.tokens_per_parameters 20.0 holds 20000000000 virtual epochs; at most 1000000 "
            "are allowed. Raise training.epoch_tokens_per_parameters.",
        ),
        (
            ["training.epoch_tokens_per_parameters=0.001"],
            "training.epoch_tokens_per_parameters 0.001 x 20403520 parameters is 0.156 updates of "
            "131072 targets, so some virtual epochs are empty. Set it to at least 0.006424, or "
            "training.batch_tokens to at most 20403.",
        ),
        (
            ["training.checkpoint_policy=interval", "training.checkpoint_epochs=[1, 2]"],
            "training.checkpoint_policy interval takes one number of epochs, not the list [1, 2]. "
            "Set training.checkpoint_epochs to a whole number, or training.checkpoint_policy to "
            "explicit.",
        ),
        (
            ["training.checkpoint_policy=explicit", "training.checkpoint_epochs=3"],
            "training.checkpoint_policy explicit takes a list of epochs, not 3. "
            "Set training.checkpoint_epochs to [3], or training.checkpoint_policy to interval.",
        ),
        (
            ["training.checkpoint_policy=explicit", "training.checkpoint_epochs=[3, 2, 2]"],
            "training.checkpoint_epochs [3, 2, 2] is not strictly ascending. Set it to [2, 3].",
        ),
        (
            ["training.checkpoint_policy=explicit", "training.checkpoint_epochs=[1, 41]"],
            "training.checkpoint_epochs [1, 41] goes beyond the 40 virtual epochs of the budget. "
            "Leave out those above 40.",
        ),
        (
            ["strategy.kind=gossip", "strategy.scheme=awc"],
            "strategy.kind gossip needs strategy.topology. "
            "Set it to complete or one_peer_ring or one_peer_exponential or one_peer_base2.",
        ),
        (
            ["strategy.kind=gossip", "strategy.topology=complete"],
            "strategy.kind gossip needs strategy.scheme. Set it to awc or atc.",
        ),
        (
            ["strategy.topology=complete"],
            "strategy.topology complete has no effect with strategy.kind single. "
            "Set strategy.topology to null, or strategy.kind to gossip.",
        ),
        (
            ["strategy.outer_lr=3"],
            "strategy.outer_lr 3.0 has no effect with strategy.kind single. "
            "Leave strategy.outer_lr out, or set strategy.kind to diloco.",
        ),
        (
            ["strategy.consensus_power=1"],
            "strategy.consensus_power 1.0 has no effect with strategy.kind single. "
            "Set strategy.consensus_power to null, or strategy.kind to gossip.",
        ),
        (
            ["strategy.consensus_start_fraction=0.5"],
            "strategy.consensus_start_fraction 0.5 has no effect without strategy.consensus_power. "
            "Set that too, or strategy.consensus_start_fraction to 0.",
        ),
        (
            ["strategy.placement=packed", "strategy.models=2"],
            "strategy.placement packed needs local models that exchange, and strategy.kind is "
            "single. Set strategy.kind to gossip or diloco, or strategy.placement to ranks.",
        ),
        (
            ["strategy.placement=packed", "strategy.models=2", "strategy.kind=ddp"],
            "strategy.placement packed needs local models that exchange, and strategy.kind is "
            "ddp. Set strategy.kind to gossip or diloco, or strategy.placement to ranks.",
        ),
        (
            ["strategy.placement=packed", "strategy.kind=diloco"],
            "strategy.placement packed holds 1 local model; it needs at least 2. "
            "Set strategy.models to 2 or more, or strategy.placement to ranks.",
        ),
        (
            ["strategy.models=2"],
            "strategy.models 2 are packed on one device, but strategy.placement is ranks. "
            "Set strategy.placement to packed, or strategy.models to 1.",
        ),
        (
            ["data.source=hub:a/b"],
            "data.source: hub:a/b names no revision, so it may change. "
            "Write {path: hub:a/b, revision: R}, where R is a commit, tag or branch.",
        ),
        (
            ["data.source=[{path: 'hub:a/b'}]"],
            "hub:a/b names no revision, so it may change. "
            "Write {path: hub:a/b, revision: R}, where R is a commit, tag or branch.",
        ),
        (
            ["data.tokenizer.path='hub:a/b'"],
            "hub:a/b names no revision, so it may change. "
            "Write {path: hub:a/b, revision: R}, where R is a commit, tag or branch.",
        ),
    ],
)
def test_a_broken_rule_says_what_fits(sets, fault):
    assert fault_of(*sets) == fault


def test_two_rules_of_one_section_are_reported_together():
    with pytest.raises(ConfigError) as caught:
        load_config([], ["strategy.kind=gossip"])
    assert [fault.split(". ")[0] for fault in caught.value.faults] == [
        "--set 1: strategy.kind gossip needs strategy.topology",
        "--set 1: strategy.kind gossip needs strategy.scheme",
    ]


def test_a_microbatch_larger_than_what_an_update_holds_is_allowed():
    assert (
        load_config([], ["training.micro_batch_size=1000"]).config.training.batch_tokens == 131072
    )


def test_head_width_frees_the_width_from_the_heads():
    config = load_config([], ["model.width=100", "model.heads=7", "model.head_width=16"]).config
    assert config.model.head_width == 16


def test_checkpoint_epochs_are_free_where_the_policy_does_not_read_them():
    sets = ["training.checkpoint_policy=none", "training.checkpoint_epochs=[9, 1]"]
    assert load_config([], sets).config.training.checkpoint_epochs == [9, 1]


def test_a_recipe_built_in_python_keeps_the_same_rules():
    with pytest.raises(ValidationError, match=r"model\.kv_heads 3 does not divide"):
        ModelConfig(heads=5, kv_heads=3)


SMALL = ModelConfig(
    vocab_size=16, layers=1, width=4, heads=1, ffn_width=4, context_length=1, tied_embeddings=True
)


@given(epochs=st.integers(1, 12), hundredths=st.integers(1, 400), batch=st.integers(1, 600))
@settings(deadline=None, max_examples=300)
def test_empty_epochs_are_refused_exactly_when_counting_finds_one(epochs, hundredths, batch):
    values = {
        "model": SMALL.model_dump(),
        "training": {
            "tokens_per_parameters": epochs * hundredths / 100,
            "epoch_tokens_per_parameters": hundredths / 100,
            "batch_tokens": batch,
            "micro_batch_size": batch,
        },
    }
    # floor(k e P / B + 1/2) in integers alone.
    top, bottom = hundredths * parameter_count(SMALL), 100 * batch
    ends = [(2 * k * top + bottom) // (2 * bottom) for k in range(epochs + 1)]
    if any(later == earlier for earlier, later in pairwise(ends)):
        with pytest.raises(ValidationError, match="some virtual epochs are empty"):
            RunConfig.model_validate(values)
    else:
        assert plan_budget(RunConfig.model_validate(values)).epoch_ends == tuple(ends[1:])

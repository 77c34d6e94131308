"""What a recipe may ask of this version, and how it is refused."""

import pytest

from atoll.config.model import ModelConfig
from atoll.config.strategy import StrategyConfig
from atoll.errors import UnavailableError
from atoll.model.llama import Llama
from atoll.strategy.base import Round, Traffic
from atoll.strategy.build import build_strategy
from atoll.strategy.diloco import PackedDiloco
from atoll.strategy.gossip import PackedGossip
from atoll.strategy.single import Single

MODEL = ModelConfig(vocab_size=8, layers=1, width=4, heads=2, ffn_width=4, context_length=4)
GOSSIP = {"kind": "gossip", "topology": "one_peer_exponential", "scheme": "awc"}
PACKED = {"placement": "packed", "models": 3}


def build(**settings):
    config = StrategyConfig(**settings)
    return build_strategy(config, Llama(MODEL, num_models=config.models), weight=lambda step: 0.5)


def test_the_default_recipe_trains_one_model():
    assert isinstance(build(), Single)


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        (GOSSIP | PACKED, PackedGossip),
        (GOSSIP | PACKED | {"consensus_power": 1.0}, PackedGossip),
        ({"kind": "diloco"} | PACKED, PackedDiloco),
    ],
)
def test_packed_models_gossip_or_take_outer_steps(settings, kind):
    assert isinstance(build(**settings), kind)


@pytest.mark.parametrize(
    ("settings", "found", "remedy"),
    [
        ({"kind": "ddp"}, "strategy.kind is ddp: ddp training", "strategy.kind=single"),
        (
            {"kind": "diloco"},
            "strategy.kind is diloco with strategy.placement ranks: diloco between processes",
            "strategy.placement=packed",
        ),
        (
            GOSSIP,
            "strategy.kind is gossip with strategy.placement ranks: gossip between processes",
            "strategy.placement=packed",
        ),
    ],
)
def test_what_is_not_available_is_refused_by_the_name_of_its_setting(settings, found, remedy):
    with pytest.raises(UnavailableError) as refusal:
        build(**settings)
    assert refusal.value.message == f"{found} is not available in this version."
    assert remedy in (refusal.value.hint or "")
    assert refusal.value.exit_code == 2


def test_single_sends_nothing():
    strategy = build()
    round = Round(1, 1, (0,))
    assert strategy.before_update(round) + strategy.after_update(round) == Traffic()


def test_single_judges_the_live_weights_without_a_copy():
    model = Llama(MODEL)
    weights = Single(model).evaluation_weights(1)
    assert {n: w.data_ptr() for n, w in weights.items()} == {
        n: w.data_ptr() for n, w in model.named_parameters()
    }


def test_traffic_adds_up_field_by_field():
    total = Traffic(1, 2, 0.5, 1) + Traffic(10, 20, 0.25, 2)
    assert total == Traffic(11, 22, 0.75, 3)

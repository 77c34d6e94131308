"""What a recipe may ask of this version, and how it is refused."""

import pytest
from torch import nn

from atoll.config.strategy import StrategyConfig
from atoll.errors import UnavailableError
from atoll.strategy.base import Round, Traffic
from atoll.strategy.build import build_strategy
from atoll.strategy.single import Single


def test_the_default_recipe_trains_one_model():
    assert isinstance(build_strategy(StrategyConfig(), nn.Linear(1, 1)), Single)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (
            {
                "kind": "gossip",
                "topology": "one_peer_exponential",
                "scheme": "awc",
                "placement": "packed",
                "models": 8,
            },
            "strategy.placement is packed with strategy.models 8: packed training is not available",
        ),
        (
            {"kind": "diloco", "placement": "packed", "models": 2},
            "strategy.placement is packed with strategy.models 2",
        ),
        ({"kind": "ddp"}, "strategy.kind is ddp"),
        ({"kind": "diloco"}, "strategy.kind is diloco"),
        (
            {"kind": "gossip", "topology": "complete", "scheme": "atc"},
            "strategy.kind is gossip: gossip training is not available in this version.",
        ),
    ],
)
def test_what_is_not_available_is_refused_by_the_name_of_its_setting(settings, named):
    with pytest.raises(UnavailableError) as refusal:
        build_strategy(StrategyConfig(**settings), nn.Linear(1, 1))
    assert named in refusal.value.message
    assert "strategy.kind=single" in (refusal.value.hint or "")
    assert refusal.value.exit_code == 2


def test_single_sends_nothing():
    strategy = Single(nn.Linear(1, 1))
    round = Round(1, 1, (0,))
    assert strategy.before_update(round) + strategy.after_update(round) == Traffic()


def test_single_judges_the_live_weights_without_a_copy():
    model = nn.Linear(2, 2)
    weights = Single(model).evaluation_weights(1)
    assert {n: w.data_ptr() for n, w in weights.items()} == {
        n: w.data_ptr() for n, w in model.named_parameters()
    }


def test_traffic_adds_up_field_by_field():
    total = Traffic(1, 2, 0.5, 1) + Traffic(10, 20, 0.25, 2)
    assert total == Traffic(11, 22, 0.75, 3)

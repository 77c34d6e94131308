"""What packed gossip and packed diloco exchange, measure and store, against NumPy in float64."""

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.config.optimizer import LrScheduleConfig, OptimizerConfig
from atoll.config.strategy import StrategyConfig
from atoll.errors import StateMismatchError
from atoll.model.arena import Arena
from atoll.optim.schedule import learning_rate
from atoll.strategy.base import Round, Traffic
from atoll.strategy.consensus import first_other_weight, mixing_weight
from atoll.strategy.diloco import PackedDiloco
from atoll.strategy.gossip import PackedGossip
from atoll.strategy.packed import CPU_COLUMNS, average, consensus_measures
from atoll.tensors import Snapshot

EPS32 = float(torch.finfo(torch.float32).eps)
OPTIMIZER = OptimizerConfig(lr=0.01)
COSINE = LrScheduleConfig(warmup_steps=2)


def make_arena(models, columns=10, seed=0):
    arena = Arena(matrices={"a": (columns,)}, scales={}, num_models=models)
    arena.data_NP.normal_(generator=torch.Generator().manual_seed(seed))
    return arena


def round_of(step, models):
    return Round(step, 1, tuple(range(models)))


def gossip_config(**settings):
    given = {"topology": "complete", "scheme": "awc", "models": 4} | settings
    return StrategyConfig(kind="gossip", placement="packed", **given)


def diloco_config(**settings):
    return StrategyConfig(kind="diloco", placement="packed", **{"models": 4} | settings)


@given(
    total=st.integers(1, 60),
    power=st.floats(0.1, 4),
    percent=st.integers(0, 99),
    name=st.sampled_from(["cosine", "wsd"]),
)
@settings(deadline=None)
def test_adaptive_weight_is_the_rate_over_its_peak_to_the_power(total, power, percent, name):
    schedule = LrScheduleConfig(name=name, warmup_steps=2)
    config = gossip_config(consensus_power=power, consensus_start_fraction=percent / 100)
    for step in range(1, total + 1):
        rate = learning_rate(step, total_steps=total, optimizer=OPTIMIZER, schedule=schedule)
        found = mixing_weight(
            step, strategy=config, total_steps=total, optimizer=OPTIMIZER, schedule=schedule
        )
        begun = step * 100 > percent * total
        assert found == ((rate / OPTIMIZER.lr) ** power if begun else 1.0)
        assert 0 <= found <= 1


def test_before_the_first_update_all_of_an_exchange_would_be_applied():
    config = gossip_config(consensus_power=2.0)
    found = mixing_weight(0, strategy=config, total_steps=5, optimizer=OPTIMIZER, schedule=COSINE)
    assert found == 1.0


def test_another_total_moves_the_beginning_of_adaptive_consensus():
    wsd = LrScheduleConfig(name="wsd", warmup_steps=6)
    find = partial(first_other_weight, optimizer=OPTIMIZER, schedule=wsd)
    moved = gossip_config(consensus_power=1.0, consensus_start_fraction=0.1)
    # Updates 3 and 4 warm up below the peak: adaptive after 10% of 20, not yet after 10% of 40.
    assert find(10, old_total=20, new_total=40, strategy=moved) == 3
    assert find(2, old_total=20, new_total=40, strategy=moved) is None
    assert find(10, old_total=20, new_total=40, strategy=gossip_config()) is None


@pytest.mark.parametrize("topology", ["complete", "one_peer_exponential", "one_peer_base2"])
def test_adaptive_shares_are_the_matrix_pulled_towards_the_identity(topology):
    models, total = 6, 12
    config = gossip_config(
        topology=topology, models=models, consensus_power=0.7, consensus_start_fraction=0.25
    )
    weight = partial(
        mixing_weight,
        strategy=config,
        total_steps=total,
        optimizer=OPTIMIZER,
        schedule=COSINE,
    )
    adaptive = PackedGossip(make_arena(models), config, weight=weight)
    whole_config = gossip_config(topology=topology, models=models)
    whole = PackedGossip(make_arena(models), whole_config)
    for step in range(1, total + 1):
        moment = round_of(step, models)
        for strategy in (adaptive, whole):
            strategy.before_update(moment)
        found, full = (s.mixing(moment).shares_NN.double().numpy() for s in (adaptive, whole))
        rate = learning_rate(step, total_steps=total, optimizer=OPTIMIZER, schedule=COSINE)
        gamma = (rate / OPTIMIZER.lr) ** 0.7 if step > 3 else 1.0
        # A share, at most 1, is rounded by gamma, a difference, a product and a sum.
        wanted = gamma * full + (1 - gamma) * np.eye(models)
        np.testing.assert_allclose(found, wanted, rtol=0, atol=2 * EPS32)
        assert adaptive.measures(step)["mixing_weight"] == gamma


@given(
    models=st.integers(1, 9),
    columns=st.sampled_from([1, 7, CPU_COLUMNS - 1, CPU_COLUMNS, 2 * CPU_COLUMNS + 3]),
    spread=st.sampled_from([0.0, 1e-4, 1.0]),
    seed=st.integers(0, 100),
)
@settings(deadline=None, max_examples=30)
def test_average_and_distances_are_those_of_numpy(models, columns, spread, seed):
    generator = torch.Generator().manual_seed(seed)
    data_NP = torch.randn(columns, generator=generator) + spread * torch.randn(
        models, columns, generator=generator
    )
    exact = data_NP.double().numpy()
    mean = exact.mean(0)
    # Differences below 12 are rounded, summed over N and taken from a number below 12.
    tolerance = (models + 2) * 12 * EPS32
    np.testing.assert_allclose(average(data_NP).numpy(), mean, rtol=0, atol=tolerance)
    found = {name: float(value) for name, value in consensus_measures(data_NP).items()}
    distance = np.sqrt(((exact - mean) ** 2).sum(1).mean())
    # The rounded mean moves each column's distance by at most `tolerance`.
    slack = 1e-5 * distance + tolerance * np.sqrt(columns)
    assert abs(found["consensus_distance"] - distance) <= slack
    relative = found["consensus_distance_relative"] * np.linalg.norm(mean)
    assert abs(relative - distance) <= slack + 1e-5 * distance


def test_gossip_counts_its_traffic_where_it_mixes():
    for scheme in ("awc", "atc"):
        strategy = PackedGossip(make_arena(4), gossip_config(scheme=scheme))
        before = strategy.before_update(round_of(1, 4))
        after = strategy.after_update(round_of(1, 4))
        sent = Traffic(payload_bytes=40, wire_bytes=60, exchanges=1)
        assert (before, after) == ((sent, Traffic()) if scheme == "awc" else (Traffic(), sent))


def test_gossip_of_another_topology_is_refused_with_both_names():
    saved = PackedGossip(make_arena(4), gossip_config()).snapshot()
    other = PackedGossip(make_arena(4), gossip_config(topology="one_peer_ring"))
    with pytest.raises(StateMismatchError, match=r"strategy\.topology: complete -> one_peer_ring"):
        other.restore(saved)


def test_diloco_exchanges_only_where_an_outer_step_is_due():
    strategy = PackedDiloco(make_arena(4), diloco_config(local_steps=3))
    sent = Traffic(payload_bytes=40, wire_bytes=60, exchanges=1)
    for step in range(1, 10):
        moment = round_of(step, 4)
        assert strategy.before_update(moment) == Traffic()
        assert strategy.after_update(moment) == (sent if step % 3 == 0 else Traffic())
        assert strategy.exchanges_after(step) == (step % 3 == 0)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_outer_steps_follow_nesterov_from_piece_to_piece(momentum):
    arena = make_arena(3, columns=2 * CPU_COLUMNS + 5)
    arena.data_NP.copy_(arena.data_NP[:1].clone())
    parent, velocity = arena.data_NP[0].double().numpy().copy(), 0.0
    config = diloco_config(models=3, local_steps=2, outer_lr=0.7, outer_momentum=momentum)
    strategy = PackedDiloco(arena, config)
    rng = np.random.default_rng(0)
    for step in range(1, 9):
        arena.data_NP.add_(torch.from_numpy(rng.normal(size=arena.data_NP.shape)).float())
        local = arena.data_NP.double().numpy()
        strategy.after_update(round_of(step, 3))
        if step % 2:
            continue
        delta = (parent - local).mean(0)
        velocity = momentum * velocity + delta
        move = 0.7 * (delta + momentum * velocity)
        parent = parent - move
        # Ten roundings of numbers below 40 in each of at most four outer steps.
        np.testing.assert_allclose(arena.data_NP[0].numpy(), parent, rtol=0, atol=40 * 40 * EPS32)
        norm = float(strategy.measures(step)["outer_step_norm"])
        assert norm == pytest.approx(np.linalg.norm(move), rel=1e-5)


def test_diloco_judges_the_parent_after_an_outer_step_and_the_average_between():
    arena = make_arena(4)
    strategy = PackedDiloco(arena, diloco_config(local_steps=2))
    between = strategy.evaluation_weights(1)["a"]
    assert torch.equal(between[0], average(arena.data_NP))
    strategy.after_update(round_of(2, 4))
    parent = strategy.snapshot().tensors["parent"]
    assert torch.equal(strategy.evaluation_weights(2)["a"][0], parent)
    assert torch.equal(arena.data_NP, parent.expand(4, -1))
    assert strategy.shared_names(2) == {"strategy", "model"}
    assert strategy.shared_names(3) == {"strategy"}
    assert float(strategy.measures(2)["consensus_distance"]) == 0.0


def test_diloco_without_momentum_stores_none():
    plain = PackedDiloco(make_arena(4), diloco_config(outer_momentum=0.0))
    heavy = PackedDiloco(make_arena(4), diloco_config())
    assert set(plain.snapshot().tensors) == {"parent"}
    assert set(heavy.snapshot().tensors) == {"parent", "momentum"}


def test_a_parent_of_another_shape_is_refused_and_changes_nothing():
    strategy = PackedDiloco(make_arena(4), diloco_config())
    saved = strategy.snapshot()
    wrong = Snapshot(saved.tensors | {"parent": torch.ones(11)}, saved.facts)
    with pytest.raises(StateMismatchError, match=r"parent: \[11\] float32 -> \[10\] float32"):
        strategy.restore(wrong)
    found = strategy.snapshot().tensors
    assert all(torch.equal(found[name], tensor) for name, tensor in saved.tensors.items())


def test_models_far_apart_have_a_finite_distance():
    data_NP = torch.tensor([[1e25, 0.0], [-1e25, 0.0]])
    found = consensus_measures(data_NP)
    assert float(found["consensus_distance"]) == pytest.approx(1e25, rel=1e-6)


@pytest.mark.parametrize("topology", ["complete", "one_peer_base2"])
def test_rounding_the_shares_moves_no_mean(topology):
    for models in range(2, 41):
        arena = make_arena(models)
        gossip = PackedGossip(arena, gossip_config(topology=topology, models=models))
        for step in range(1, 12):
            gossip.before_update(round_of(step, models))
            shares = gossip.mixing(round_of(step, models)).shares_NN.double()
            # One number of each row takes up what the others miss: half a unit of it at most.
            unit = EPS32 * shares.diagonal()
            assert ((shares.sum(1) - 1).abs() <= unit / 2 + 1e-15).all(), (models, step)
            assert ((shares.sum(0) - 1).abs() <= unit / 2 + 1e-15).all(), (models, step)

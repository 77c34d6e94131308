"""Packed training against separate models that an independent program in float64 mixes.

Shapes: N local models, P parameters of one model, B rows of one local model.
"""

from collections.abc import Callable
from functools import cache, partial

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from train_tiny import MODEL, SCHEDULE, RandomRows, make_plan, make_state

from atoll.config.optimizer import OptimizerConfig
from atoll.config.strategy import StrategyConfig
from atoll.data.batch import IGNORE
from atoll.errors import NonFiniteError
from atoll.model.llama import Llama
from atoll.optim.adamw import mix
from atoll.strategy.base import Round
from atoll.strategy.consensus import mixing_weight
from atoll.strategy.gossip import PackedGossip
from atoll.train.loop import train
from atoll.train.step import Update

MODELS, STEPS, ROWS = 4, 20, 8
CLIP = 0.5  # below most gradient norms, and each model has its own
# AdamW divides a gradient by its own size plus eps. With eps far below the rounding of a gradient,
# those that happen to be near zero would turn rounding into whole steps of either sign.
OPTIMIZER = OptimizerConfig(lr=0.01, eps=1e-4, weight_decay=0.1)

Doubles = NDArray[np.float64]
EYE = np.eye(MODELS)


def rate(step: int) -> float:
    """Two updates of warm-up, then a cosine to a tenth at the last update."""
    if step <= 2:
        return OPTIMIZER.lr * step / 2
    cosine = (1 + np.cos(np.pi * (step - 2) / (STEPS - 2))) / 2
    return OPTIMIZER.lr * (0.1 + 0.9 * cosine)


def complete(step: int) -> Doubles:
    return np.ones((MODELS, MODELS)) / MODELS


def ring(step: int) -> Doubles:
    return (EYE + EYE[(np.arange(MODELS) + (1 if step % 2 else -1)) % MODELS]) / 2


def exponential(step: int) -> Doubles:
    return (EYE + EYE[(np.arange(MODELS) + (1 if step % 2 else 2)) % MODELS]) / 2


def hypercube(step: int) -> Doubles:
    """Four is a power of two: neighbours in pairs, then pairs two places apart."""
    return (EYE + EYE[np.arange(MODELS) ^ (1 if step % 2 else 2)]) / 2


class Reference:
    """Four separate models whose gradients torch gives; all else is written out here."""

    def __init__(self) -> None:
        self.models = [Llama(MODEL) for _ in range(MODELS)]
        self.loader = RandomRows()
        arena = self.models[0].arena
        self.weights = np.repeat(arena.data_NP.double().numpy(), MODELS, axis=0)
        self.first, self.second = np.zeros_like(self.weights), np.zeros_like(self.weights)
        self.decay = np.where(np.arange(arena.num_parameters) < arena.decay_size, 0.1, 0.0)

    def gradients(self, step: int) -> Doubles:
        rows = [self._gradient(i, step) for i in range(MODELS)]
        return np.stack(rows)

    def adamw(self, gradients: Doubles, step: int) -> None:
        norms = np.linalg.norm(gradients, axis=1, keepdims=True)
        gradients = gradients * np.minimum(1, CLIP / norms)
        self.first = 0.9 * self.first + 0.1 * gradients
        self.second = OPTIMIZER.beta2 * self.second + (1 - OPTIMIZER.beta2) * gradients**2
        mean = self.first / (1 - 0.9**step)
        root = np.sqrt(self.second / (1 - OPTIMIZER.beta2**step))
        lr = rate(step)
        self.weights = self.weights * (1 - lr * self.decay) - lr * mean / (root + OPTIMIZER.eps)

    def _gradient(self, i: int, step: int) -> Doubles:
        model, share = self.models[i], ROWS // MODELS
        model.arena.data_NP.copy_(torch.from_numpy(self.weights[i : i + 1]))
        batch = self.loader.batch((step - 1) * ROWS + i * share, share)
        logits = model.logits(batch.inputs_BT[None])[0].flatten(0, 1)
        targets = batch.targets_BT.flatten()
        model.zero_grad()
        torch.nn.functional.cross_entropy(logits, targets, ignore_index=IGNORE).backward()
        return model.arena.grad_NP[0].double().numpy()


def reference_gossip(matrix: Callable[[int], Doubles], *, scheme: str, power: float) -> Doubles:
    own = Reference()
    for step in range(1, STEPS + 1):
        gamma = (rate(step) / OPTIMIZER.lr) ** power if step > STEPS / 4 else 1.0
        shares = gamma * matrix(step) + (1 - gamma) * EYE
        gradients = own.gradients(step)
        if scheme == "awc":
            own.weights = shares @ own.weights
        own.adamw(gradients, step)
        if scheme == "atc":
            own.weights = shares @ own.weights
    return own.weights


def reference_diloco(*, local_steps: int, momentum: float) -> Doubles:
    own = Reference()
    parent, velocity = own.weights[0], np.zeros_like(own.weights[0])
    for step in range(1, STEPS + 1):
        own.adamw(own.gradients(step), step)
        if step % local_steps == 0:
            delta = (parent - own.weights).mean(0)
            velocity = momentum * velocity + delta
            parent = parent - 0.7 * (delta + momentum * velocity)
            own.weights = np.repeat(parent[None], MODELS, axis=0)
    return own.weights


@cache
def train_packed(config: StrategyConfig, *, micro_rows: int = 1) -> Doubles:
    weight = partial(
        mixing_weight,
        strategy=config,
        total_steps=STEPS,
        optimizer=OPTIMIZER,
        schedule=SCHEDULE,
    )
    state = make_state(strategy=config, optimizer=OPTIMIZER, weight=weight)
    plan = make_plan(
        total_steps=STEPS,
        rows=ROWS,
        micro_rows=micro_rows,
        grad_clip=CLIP,
        models=MODELS,
        optimizer=OPTIMIZER,
    )
    assert sum(1 for _ in train(state, RandomRows(), plan)) == STEPS
    return state.model.arena.data_NP.double().numpy()


def packed(**settings) -> StrategyConfig:
    return StrategyConfig(placement="packed", models=MODELS, **settings)


def assert_equal_up_to_rounding(found: Doubles, wanted: Doubles) -> None:
    # Weights up to 1.2 are rounded about four times in each of 20 updates, by 6e-8 at most. What
    # the rounding of gradients adds is smaller: about 1e-8, of which AdamW with this eps makes no
    # more than 1e-6. Measured: 3e-7 to 1e-6.
    np.testing.assert_allclose(found, wanted, rtol=0, atol=5e-6)


@pytest.mark.parametrize("scheme", ["awc", "atc"])
@pytest.mark.parametrize(
    ("topology", "matrix", "power"),
    [
        ("complete", complete, None),
        ("one_peer_ring", ring, None),
        ("one_peer_exponential", exponential, None),
        ("one_peer_exponential", exponential, 0.7),
        ("one_peer_base2", hypercube, None),
    ],
)
def test_packed_gossip_equals_four_models_mixed_in_numpy(topology, matrix, power, scheme):
    settings = {"topology": topology, "scheme": scheme}
    if power is not None:
        settings |= {"consensus_power": power, "consensus_start_fraction": 0.25}
    found = train_packed(packed(kind="gossip", **settings))
    wanted = reference_gossip(matrix, scheme=scheme, power=power or 0.0)
    assert_equal_up_to_rounding(found, wanted)


def test_all_rows_of_a_model_in_one_backward_give_the_same():
    """They come from the loader in one piece then, and not model by model."""
    config = packed(kind="gossip", topology="one_peer_ring", scheme="atc")
    wanted = reference_gossip(ring, scheme="atc", power=0.0)
    assert_equal_up_to_rounding(train_packed(config, micro_rows=ROWS // MODELS), wanted)


@pytest.mark.parametrize(("momentum", "local_steps"), [(0.0, 3), (0.9, 3), (0.9, 1)])
def test_packed_diloco_equals_four_models_and_a_parent_in_numpy(momentum, local_steps):
    config = packed(kind="diloco", local_steps=local_steps, outer_momentum=momentum)
    wanted = reference_diloco(local_steps=local_steps, momentum=momentum)
    assert_equal_up_to_rounding(train_packed(config), wanted)


def test_every_way_to_mix_gives_weights_of_its_own():
    ways = [
        packed(kind="gossip", topology="complete", scheme="awc"),
        packed(kind="gossip", topology="complete", scheme="atc"),
        packed(kind="gossip", topology="one_peer_ring", scheme="awc"),
        packed(kind="gossip", topology="one_peer_exponential", scheme="awc"),
        packed(kind="gossip", topology="complete", scheme="awc", consensus_power=0.7),
        packed(kind="diloco", local_steps=3),
        packed(kind="diloco", local_steps=3, outer_momentum=0.0),
    ]
    found = [train_packed(config) for config in ways]
    # So that a comparison to 5e-6 tells each of them from all others.
    for i, one in enumerate(found):
        for other in found[:i]:
            assert abs(one - other).max() > 1e-4


def test_complete_atc_with_plain_sgd_is_one_model_on_the_whole_batch():
    together = Llama(MODEL, num_models=MODELS)
    alone = Llama(MODEL)
    config = packed(kind="gossip", topology="complete", scheme="atc")
    strategy = PackedGossip(together.arena, config)
    loader = RandomRows(ignore_share=0.0)  # equal weights: a mean of local means is the mean
    start = alone.arena.data_NP.clone()
    for step in range(1, STEPS + 1):
        batch = loader.batch((step - 1) * ROWS, ROWS)
        moment = Round(step, 1, tuple(range(MODELS)))
        for model, models in ((together, MODELS), (alone, 1)):
            columns = [
                t.view(models, ROWS // models, -1) for t in (batch.inputs_BT, batch.targets_BT)
            ]
            model.zero_grad()
            sum_N, weight_N = model(*columns)
            (sum_N / weight_N).sum().backward()
            model.arena.data_NP.sub_(model.arena.grad_NP, alpha=0.6)
        strategy.before_update(moment)
        mixing = strategy.mixing(moment)
        assert mixing is not None
        mix(together.arena.data_NP, mixing.shares_NN)
    assert (alone.arena.data_NP - start).abs().max() > 0.1
    # Weights up to 1.2 are rounded three times in each of 20 updates, by 6e-8 at most; SGD divides
    # by nothing that is small, and at this rate training is stable. Measured: 6e-7.
    expected = alone.arena.data_NP.expand_as(together.arena.data_NP)
    torch.testing.assert_close(together.arena.data_NP, expected, rtol=0, atol=5e-6)


@pytest.mark.parametrize(
    "config",
    [
        packed(kind="gossip", topology="one_peer_base2", scheme="awc", consensus_power=1.0),
        packed(kind="diloco", local_steps=3),
    ],
    ids=["gossip", "diloco"],
)
@pytest.mark.parametrize("stop", [1, 3, 4])
def test_a_packed_run_resumed_from_its_snapshot_ends_in_equal_bits(config, stop):
    def fresh():
        weight = (lambda step: 1 / step) if config.consensus_power else None
        return make_state(strategy=config, weight=weight)

    plan = make_plan(total_steps=7, rows=ROWS, models=MODELS)
    whole, first, second = fresh(), fresh(), fresh()
    for _ in train(whole, RandomRows(), plan):
        pass
    for record in train(first, RandomRows(), plan):
        if record.step == stop:
            break
    second.restore(first.snapshot())
    for _ in train(second, RandomRows(), plan):
        pass
    assert second.digests() == whole.digests()


@pytest.mark.parametrize("name", ["gossip", "diloco"])
def test_a_gradient_that_is_no_number_stops_packed_training_before_it_spreads(name):
    extra = {"topology": "complete", "scheme": "atc"} if name == "gossip" else {"local_steps": 2}
    state = make_state(strategy=packed(kind=name, **extra))
    update = Update(state, RandomRows(), make_plan(total_steps=4, rows=ROWS, models=MODELS).update)
    update.run(lr=0.01)
    with torch.no_grad():
        state.model.arena.view("norm")[2] = float("nan")
    before = state.snapshot()
    with pytest.raises(NonFiniteError, match="of local model 2"):
        update.run(lr=0.01)
    after = state.snapshot()
    assert state.step == 1
    for key, tensor in before.tensors.items():
        assert torch.equal(tensor.nan_to_num(), after.tensors[key].nan_to_num()), key

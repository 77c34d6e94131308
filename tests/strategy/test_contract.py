"""What every strategy must keep, whatever it exchanges; a new one joins by one line of CASES.

Shapes: N local models, P parameters of one model, B rows.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from atoll.config.strategy import StrategyConfig
from atoll.errors import StateMismatchError
from atoll.model.arena import Arena
from atoll.optim.adamw import mix
from atoll.strategy.base import Round, Strategy, Traffic
from atoll.strategy.diloco import PackedDiloco
from atoll.strategy.gossip import PackedGossip
from atoll.strategy.single import Single
from atoll.tensors import Snapshot, parameter_digest

STEPS = 7


class Tiny(nn.Module):
    """N networks of two matrices and one scale over an arena, as `Llama` lays them out."""

    def __init__(self, num_models: int) -> None:
        super().__init__()
        matrices, scales = {"first": (3, 4), "second": (4, 1)}, {"scale": (4,)}
        self.arena = Arena(matrices=matrices, scales=scales, num_models=num_models)
        generator = torch.Generator().manual_seed(0)
        self.arena.data_NP.copy_(torch.randn(self.arena.num_parameters, generator=generator))
        for name in self.arena.slices:
            weight = nn.Parameter(self.arena.view(name))
            weight.grad = self.arena.grad_view(name)
            self.register_parameter(name, weight)

    def forward(self, x_NBD: Tensor) -> Tensor:
        hidden_NBD = torch.tanh(x_NBD @ self.first) * self.scale[:, None]
        return (hidden_NBD @ self.second).square().sum(dim=(1, 2))


@dataclass(frozen=True)
class Case:
    """A strategy by name: of how many models, and how it is built for them."""

    name: str
    models: int
    build: Callable[[Tiny], Strategy]


def gossip(name: str, models: int, **settings: Any) -> Case:
    config = StrategyConfig(kind="gossip", placement="packed", models=models, **settings)
    weight = None if config.consensus_power is None else lambda step: 1 / (1 + step)
    return Case(name, models, lambda model: PackedGossip(model.arena, config, weight=weight))


def diloco(name: str, models: int, **settings: Any) -> Case:
    config = StrategyConfig(
        kind="diloco", placement="packed", models=models, local_steps=3, **settings
    )
    return Case(name, models, lambda model: PackedDiloco(model.arena, config))


CASES = [
    Case("single", 1, Single),
    gossip("gossip-complete-atc", 3, topology="complete", scheme="atc"),
    gossip("gossip-ring-awc", 4, topology="one_peer_ring", scheme="awc"),
    gossip("gossip-exponential-awc", 4, topology="one_peer_exponential", scheme="awc"),
    gossip("gossip-base2-atc", 3, topology="one_peer_base2", scheme="atc"),
    gossip("gossip-adaptive", 4, topology="complete", scheme="awc", consensus_power=0.5),
    diloco("diloco", 3),
    diloco("diloco-plain", 4, outer_momentum=0.0, outer_lr=1.0),
]

# torch says once in a process that gradients of several models are strided, like their parameters.
pytestmark = pytest.mark.filterwarnings("ignore:grad and param do not obey")

every_case = pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])


class Run:
    """The loop in small: two microbatches, momentum as the inner update."""

    def __init__(self, case: Case) -> None:
        self.model = Tiny(case.models)
        self.velocity_NP = torch.zeros_like(self.model.arena.data_NP)
        self.step, self.members = 0, tuple(range(case.models))
        self.strategy = case.build(self.model)
        self.trained = self.strategy.wrap(self.model)

    def update(self, *, generation: int = 1) -> Traffic:
        self.step += 1
        arena, round = self.model.arena, Round(self.step, generation, self.members)
        generator = torch.Generator().manual_seed(self.step)
        x_NBD = torch.randn(arena.num_models, 4, 3, generator=generator)
        divisor = self.strategy.loss_divisor(local_weight=4.0, update_weight=4.0)
        arena.grad_NP.zero_()
        for part, rows_NBD in enumerate(x_NBD.split(2, dim=1)):
            with self.strategy.microbatch(last=part == 1):
                (self.trained(rows_NBD).sum() / divisor).backward()
        traffic = self.strategy.before_update(round)
        mixing = self.strategy.mixing(round)
        if mixing is not None and mixing.before:
            mix(arena.data_NP, mixing.shares_NN)
        self.velocity_NP.mul_(0.9).add_(arena.grad_NP)
        arena.data_NP.sub_(self.velocity_NP, alpha=0.01)
        if mixing is not None and not mixing.before:
            mix(arena.data_NP, mixing.shares_NN)
        return traffic + self.strategy.after_update(round)

    def snapshot(self) -> Snapshot:
        saved = Snapshot({}, {"step": self.step})
        saved.merge("strategy", self.strategy.snapshot())
        saved.merge("model", Snapshot({"data": self.model.arena.data_NP.clone()}))
        saved.merge("optimizer", Snapshot({"velocity": self.velocity_NP.clone()}))
        return saved

    def restore(self, saved: Snapshot) -> None:
        self.strategy.restore(saved.under("strategy"))
        self.model.arena.data_NP.copy_(saved.tensors["model.data"])
        self.velocity_NP.copy_(saved.tensors["optimizer.velocity"])
        self.step = saved.facts["step"]

    def digest(self) -> str:
        return parameter_digest(self.snapshot().tensors)


def run_to_the_end(case: Case) -> Run:
    run = Run(case)
    for _ in range(STEPS):
        run.update()
    return run


@every_case
def test_wrapping_keeps_the_models_own_weights_and_gradients(case):
    run = Run(case)
    before = {name: weight.data_ptr() for name, weight in run.model.named_parameters()}
    run.update()
    gradients = {name: w.grad.data_ptr() for name, w in run.model.named_parameters()}
    run.model.zero_grad(set_to_none=False)
    run.trained(torch.ones(case.models, 1, 3)).sum().backward()
    assert {name: weight.data_ptr() for name, weight in run.model.named_parameters()} == before
    assert {name: w.grad.data_ptr() for name, w in run.model.named_parameters()} == gradients


@every_case
def test_a_local_model_divides_by_its_own_weight_and_not_by_that_of_all(case):
    strategy = Run(case).strategy
    assert strategy.loss_divisor(local_weight=12.5, update_weight=12.5 * case.models) == 12.5


@every_case
def test_traffic_is_never_negative(case):
    run = Run(case)
    for _ in range(STEPS):
        traffic = run.update()
        assert min(traffic.payload_bytes, traffic.wire_bytes, traffic.exchanges) >= 0
        assert traffic.wait_seconds >= 0


@every_case
def test_snapshots_verdicts_and_measures_change_no_later_number(case):
    disturbed = Run(case)
    for _ in range(STEPS):
        disturbed.update()
        disturbed.snapshot()
        disturbed.strategy.evaluation_weights(disturbed.step)
        disturbed.strategy.measures(disturbed.step)
    assert disturbed.digest() == run_to_the_end(case).digest()


@every_case
@pytest.mark.parametrize("stop", range(1, STEPS + 1))
def test_a_run_resumed_at_any_step_ends_in_equal_bits(case, stop):
    first = Run(case)
    for _ in range(stop):
        first.update()
    saved = first.snapshot()
    resumed = Run(case)
    resumed.update()  # what it holds by then must not matter
    resumed.restore(Snapshot(saved.tensors, json.loads(json.dumps(saved.facts))))
    for _ in range(STEPS - stop):
        resumed.update(generation=2)
    assert resumed.digest() == run_to_the_end(case).digest()


@every_case
def test_a_snapshot_shares_no_storage_with_the_run(case):
    run = Run(case)
    run.update()
    saved = run.strategy.snapshot()
    before = parameter_digest(saved.tensors)
    for _ in range(STEPS):
        run.update()
    assert parameter_digest(saved.tensors) == before


@every_case
def test_state_of_another_strategy_is_refused_and_changes_nothing(case):
    run = run_to_the_end(case)
    before = run.digest()
    own = run.strategy.snapshot()
    strange = Snapshot(own.tensors | {"unknown": torch.ones(2)}, own.facts)
    for saved in (Snapshot({"unknown": torch.ones(2)}, {"strange": 1}), strange):
        with pytest.raises(StateMismatchError):
            run.strategy.restore(saved)
        assert run.digest() == before


@every_case
def test_the_state_of_every_other_case_is_refused(case):
    run = Run(case)
    for saved in [Run(other).strategy.snapshot() for other in CASES if other is not case]:
        with pytest.raises(StateMismatchError):
            run.strategy.restore(saved)


@every_case
def test_evaluation_weights_are_named_and_shaped_as_in_one_model(case):
    run = run_to_the_end(case)
    found = run.strategy.evaluation_weights(run.step)
    expected = {name: place.shape for name, place in run.model.arena.slices.items()}
    assert {name: tuple(weight.shape[1:]) for name, weight in found.items()} == expected
    assert {weight.shape[0] for weight in found.values()} == {1}
    assert not any(weight.requires_grad for weight in found.values())


@every_case
def test_evaluation_weights_of_equal_models_are_their_own_bits(case):
    run = Run(case)
    awkward = run.model.arena.data_NP[0]
    awkward[:4] = torch.tensor([0.1, -0.0, 1e-45, 3e38])
    run.model.arena.data_NP.copy_(awkward.clone())
    strategy = case.build(run.model)
    for step in (0, 1):
        for name, weight in strategy.evaluation_weights(step).items():
            own = run.model.arena.view(name)[0]
            assert torch.equal(weight[0].view(torch.int32), own.view(torch.int32)), name


@every_case
def test_what_shared_names_covers_is_equal_on_all_models(case):
    run = Run(case)
    for _ in range(STEPS):
        run.update()
        names = run.strategy.shared_names(run.step)
        assert {name.split(".")[0] for name in names} <= {"model", "optimizer", "strategy"}
        data_NP = run.model.arena.data_NP
        if "model" in names:
            assert torch.equal(data_NP, data_NP[:1].expand_as(data_NP))


@every_case
def test_weights_change_after_an_update_only_where_that_was_announced(case):
    run = Run(case)
    for _ in range(STEPS):
        run.update()
        round = Round(run.step + 1, 1, run.members)
        before = run.model.arena.data_NP.clone()
        saved = run.strategy.snapshot()
        run.strategy.after_update(round)
        changed = not torch.equal(run.model.arena.data_NP, before)
        assert changed == run.strategy.exchanges_after(round.step)
        run.model.arena.data_NP.copy_(before)
        run.strategy.restore(saved)


@every_case
def test_the_buffers_of_mixing_stay_where_they_are(case):
    run = Run(case)
    places = set()
    for _ in range(STEPS):
        run.update()
        mixing = run.strategy.mixing(Round(run.step, 1, run.members))
        places.add(None if mixing is None else (mixing.shares_NN.data_ptr(), mixing.before))
    assert len(places) == 1


@every_case
def test_measures_are_scalars_and_empty_for_one_model(case):
    run = run_to_the_end(case)
    found = run.strategy.measures(run.step)
    assert (found == {}) == (case.models == 1)
    for name, value in found.items():
        assert isinstance(value, float) or value.shape == (), name
        assert 0 <= float(value) < float("inf"), name


@every_case
def test_closing_twice_is_allowed(case):
    run = run_to_the_end(case)
    run.strategy.close()
    run.strategy.close()

"""What every strategy must keep, whatever it exchanges; a new one joins by one line of CASES."""

import json
from collections.abc import Callable

import pytest
import torch
from torch import nn

from atoll.errors import StateMismatchError
from atoll.strategy.base import Round, Strategy, Traffic
from atoll.strategy.single import Single
from atoll.tensors import Snapshot, parameter_digest

CASES: list[tuple[str, Callable[[nn.Module], Strategy]]] = [
    ("single", Single),
]
STEPS = 7

case = pytest.mark.parametrize("build", [build for _, build in CASES], ids=[n for n, _ in CASES])


class Run:
    """The loop in small: two microbatches, momentum as the inner update."""

    def __init__(self, build: Callable[[nn.Module], Strategy]) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        self.velocity = [torch.zeros_like(weight) for weight in self.model.parameters()]
        self.step = 0
        self.strategy = build(self.model)
        self.trained = self.strategy.wrap(self.model)

    def update(self, *, generation: int = 1) -> Traffic:
        self.step += 1
        round = Round(self.step, generation, (0,))
        x_BD = torch.randn(4, 3, generator=torch.Generator().manual_seed(self.step))
        divisor = self.strategy.loss_divisor(local_weight=4.0, update_weight=4.0)
        self.model.zero_grad()
        for part, rows_BD in enumerate(x_BD.split(2)):
            with self.strategy.microbatch(last=part == 1):
                (self.trained(rows_BD).square().sum() / divisor).backward()
        traffic = self.strategy.before_update(round)
        with torch.no_grad():
            for weight, velocity in zip(self.model.parameters(), self.velocity, strict=True):
                assert weight.grad is not None
                velocity.mul_(0.9).add_(weight.grad)
                weight.sub_(velocity, alpha=0.1)
        return traffic + self.strategy.after_update(round)

    def snapshot(self) -> Snapshot:
        saved = Snapshot({}, {"step": self.step})
        saved.merge("strategy", self.strategy.snapshot())
        saved.merge("model", Snapshot({n: w.clone() for n, w in self.model.state_dict().items()}))
        moments = {str(i): velocity.clone() for i, velocity in enumerate(self.velocity)}
        saved.merge("optimizer", Snapshot(moments))
        return saved

    def restore(self, saved: Snapshot) -> None:
        self.strategy.restore(saved.under("strategy"))
        self.model.load_state_dict(saved.under("model").tensors)
        for i, velocity in enumerate(self.velocity):
            velocity.copy_(saved.tensors[f"optimizer.{i}"])
        self.step = saved.facts["step"]

    def digest(self) -> str:
        return parameter_digest(self.snapshot().tensors)


def run_to_the_end(build: Callable[[nn.Module], Strategy]) -> Run:
    run = Run(build)
    for _ in range(STEPS):
        run.update()
    return run


@case
def test_wrapping_keeps_the_models_own_weights_and_gradients(build):
    run = Run(build)
    before = {name: weight.data_ptr() for name, weight in run.model.named_parameters()}
    run.update()
    gradients = {name: w.grad.data_ptr() for name, w in run.model.named_parameters()}
    run.model.zero_grad(set_to_none=False)
    run.trained(torch.ones(1, 3)).sum().backward()
    assert {name: weight.data_ptr() for name, weight in run.model.named_parameters()} == before
    assert {name: w.grad.data_ptr() for name, w in run.model.named_parameters()} == gradients


@case
def test_a_strategy_alone_divides_by_its_own_weight(build):
    strategy = Run(build).strategy
    assert strategy.loss_divisor(local_weight=12.5, update_weight=12.5) == 12.5


@case
def test_traffic_is_never_negative(build):
    run = Run(build)
    for _ in range(STEPS):
        traffic = run.update()
        assert min(traffic.payload_bytes, traffic.wire_bytes, traffic.exchanges) >= 0
        assert traffic.wait_seconds >= 0


@case
def test_taking_snapshots_changes_no_later_number(build):
    disturbed = Run(build)
    for _ in range(STEPS):
        disturbed.update()
        disturbed.snapshot()
    assert disturbed.digest() == run_to_the_end(build).digest()


@case
@pytest.mark.parametrize("stop", range(1, STEPS + 1))
def test_a_run_resumed_at_any_step_ends_in_equal_bits(build, stop):
    first = Run(build)
    for _ in range(stop):
        first.update()
    saved = first.snapshot()
    resumed = Run(build)
    resumed.restore(Snapshot(saved.tensors, json.loads(json.dumps(saved.facts))))
    for _ in range(STEPS - stop):
        resumed.update(generation=2)
    assert resumed.digest() == run_to_the_end(build).digest()


@case
def test_a_snapshot_shares_no_storage_with_the_run(build):
    run = Run(build)
    run.update()
    saved = run.strategy.snapshot()
    before = parameter_digest(saved.tensors)
    for _ in range(STEPS):
        run.update()
    assert parameter_digest(saved.tensors) == before


@case
def test_state_of_another_strategy_is_refused_and_changes_nothing(build):
    run = run_to_the_end(build)
    before = run.digest()
    with pytest.raises(StateMismatchError):
        run.strategy.restore(Snapshot({"unknown": torch.ones(2)}, {"strange": 1}))
    assert run.digest() == before


@case
def test_evaluation_weights_are_named_and_shaped_as_in_one_model(build):
    run = run_to_the_end(build)
    found = run.strategy.evaluation_weights(run.step)
    expected = {name: weight.shape for name, weight in run.model.named_parameters()}
    assert {name: weight.shape for name, weight in found.items()} == expected
    assert not any(weight.requires_grad for weight in found.values())


@case
def test_shared_names_stand_for_parts_of_the_state(build):
    run = Run(build)
    for _ in range(STEPS):
        run.update()
        for name in run.strategy.shared_names(run.step):
            assert name.split(".")[0] in {"model", "optimizer", "strategy"}


@case
def test_closing_twice_is_allowed(build):
    run = run_to_the_end(build)
    run.strategy.close()
    run.strategy.close()

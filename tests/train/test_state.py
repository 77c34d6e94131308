"""Snapshots decide everything that follows; what does not fit is refused whole."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from train_tiny import MODEL, OPTIMIZER, RandomRows, make_plan, make_state

from atoll.errors import StateMismatchError
from atoll.model.llama import Llama
from atoll.optim.adamw import AdamW
from atoll.strategy.single import Single
from atoll.tensors import Snapshot, parameter_digest
from atoll.train.loop import train
from atoll.train.state import TrainState

STEPS = 6


def run_to(state: TrainState, step: int) -> TrainState:
    for record in train(state, RandomRows(), make_plan(total_steps=STEPS)):
        if record.step == step:
            break
    return state


@settings(deadline=None, max_examples=10)
@given(step=st.integers(1, STEPS - 1), other_seed=st.integers(1, 3))
def test_resuming_anywhere_equals_not_stopping(step, other_seed):
    whole = run_to(make_state(), STEPS)
    saved = run_to(make_state(), step).snapshot()
    resumed = make_state(seed=other_seed)  # other weights, which restore replaces
    resumed.restore(saved)
    assert (resumed.step, resumed.cursor) == (step, 4 * step)
    assert run_to(resumed, STEPS).digests() == whole.digests()


def test_snapshot_shares_nothing_with_the_live_state():
    state = run_to(make_state(), 1)
    saved = state.snapshot()
    before = {name: tensor.clone() for name, tensor in saved.tensors.items()}
    run_to(state, STEPS)
    assert all(torch.equal(tensor, before[name]) for name, tensor in saved.tensors.items())


def test_restored_state_shares_nothing_with_the_snapshot():
    saved = run_to(make_state(), 1).snapshot()
    digest = parameter_digest(saved.tensors)
    state = make_state()
    state.restore(saved)
    run_to(state, STEPS)
    assert parameter_digest(saved.tensors) == digest


def test_snapshot_holds_every_part():
    saved = run_to(make_state(), 2).snapshot()
    parts = {name.partition(".")[0] for name in saved.tensors}
    assert parts == {"model", "optimizer", "generator"}  # one model alone exchanges nothing
    assert saved.tensors["model.layers.0.qkv"].shape[0] == 1
    assert saved.facts["step"] == 2
    assert saved.facts["cursor"] == 8


def test_model_digest_names_the_weights():
    state = make_state()
    named = {name: weight.detach() for name, weight in state.model.named_parameters()}
    assert state.digests()["model"] == parameter_digest(named)


def test_random_state_of_torch_is_restored():
    state = make_state()
    torch.manual_seed(7)
    saved = state.snapshot()
    drawn = torch.rand(3)
    torch.manual_seed(8)
    state.restore(saved)
    assert torch.equal(torch.rand(3), drawn)


def refused(state: TrainState, saved: Snapshot) -> str:
    before = state.digests(), state.step, state.cursor
    with pytest.raises(StateMismatchError) as raised:
        state.restore(saved)
    assert (state.digests(), state.step, state.cursor) == before
    return raised.value.message


def test_state_of_another_model_lists_the_first_of_each_kind_and_changes_nothing():
    bigger = MODEL.model_copy(update={"layers": 4, "vocab_size": 40})
    model = Llama(bigger)
    optimizer = AdamW(
        model.arena.data_NP,
        model.arena.grad_NP,
        decay_size=model.arena.decay_size,
        config=OPTIMIZER,
    )
    saved = TrainState(3, 12, model, optimizer, Single(model)).snapshot()
    message = refused(run_to(make_state(), 1), saved)
    assert "12 tensors unknown: model.layers.2.qkv" in message
    assert "and 7 more" in message
    assert "3 tensors of another shape: model.embedding [1, 40, 16] for [1, 32, 16]" in message
    assert "the parameters lie in another order" in message


def test_missing_and_mistyped_tensors_are_listed():
    saved = make_state().snapshot()
    del saved.tensors["model.norm"]
    saved.tensors["model.embedding"] = saved.tensors["model.embedding"].double()
    message = refused(make_state(seed=1), saved)
    assert "1 tensors missing: model.norm" in message
    assert "1 tensors of another type: model.embedding torch.float64 for torch.float32" in message


@pytest.mark.parametrize("value", [None, -1, "3"])
def test_facts_that_are_no_counts_are_refused(value):
    saved = make_state().snapshot()
    saved.facts["cursor"] = value
    assert "fact cursor" in refused(make_state(seed=1), saved)


def test_state_of_another_strategy_is_refused_before_anything_changes():
    saved = make_state().snapshot()
    saved.tensors["strategy.parent"] = torch.zeros(3)
    assert "strategy.kind single holds nothing" in refused(make_state(seed=1), saved)


def test_random_state_of_an_absent_gpu_is_left_out():
    saved = make_state().snapshot()
    saved.tensors["generator.cuda"] = torch.zeros(16, dtype=torch.uint8)
    make_state(seed=1).restore(saved)

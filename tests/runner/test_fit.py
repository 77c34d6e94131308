"""Checks before a run, and advice after memory ran out."""

import shutil
from collections import namedtuple

import pytest
import torch

from atoll.config.budget import plan_budget
from atoll.config.schema import RunConfig
from atoll.errors import AtollError, StorageError
from atoll.runner import fit

CPU = torch.device("cpu")
BASE = RunConfig.model_validate(
    {"training": {"tokens_per_parameters": 4.0, "epoch_tokens_per_parameters": 1.0}}
)
PARAMETERS = 20_403_520
Usage = namedtuple("Usage", "total used free")


def training(**settings) -> RunConfig:
    return RunConfig.model_validate(
        {"training": BASE.training.model_dump(exclude_unset=True) | settings}
    )


@pytest.mark.parametrize(
    ("settings", "epochs"),
    [
        ({"checkpoint_policy": "none"}, set()),
        ({"checkpoint_policy": "final"}, {4}),
        ({"checkpoint_policy": "interval", "checkpoint_epochs": 1}, {1, 2, 3, 4}),
        ({"checkpoint_policy": "interval", "checkpoint_epochs": 3}, {3, 4}),
        ({"checkpoint_policy": "explicit", "checkpoint_epochs": [1, 3]}, {1, 3}),
    ],
)
def test_policy_names_the_epochs_that_are_kept(settings, epochs):
    assert fit.checkpoint_epochs(training(**settings).training, 4) == epochs


@pytest.mark.parametrize(
    ("settings", "done", "checkpoints"),
    [
        ({"checkpoint_policy": "interval"}, 0, 4),
        ({"checkpoint_policy": "interval"}, 3, 1),
        ({"checkpoint_policy": "interval", "checkpoint_keep": 1}, 0, 2),
        ({"checkpoint_policy": "none"}, 0, 0),
    ],
)
def test_disk_must_hold_coming_checkpoints_and_weights(
    settings, done, checkpoints, monkeypatch, tmp_path
):
    config = training(**settings)
    needed = PARAMETERS * (12 * checkpoints + 4)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, needed))
    fit.check_disk(config, plan_budget(config), tmp_path, done_epochs=done)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, needed - 1))
    with pytest.raises(StorageError, match=f"{checkpoints} checkpoints") as raised:
        fit.check_disk(config, plan_budget(config), tmp_path, done_epochs=done)
    assert "training.checkpoint_keep" in str(raised.value.hint)


GOSSIP = {"kind": "gossip", "topology": "complete", "scheme": "atc"}


def packed(*, micro_batch_size: int = 16, **strategy) -> RunConfig:
    """Return the recipe with 8 local models, 16 sequences each in an update."""
    return RunConfig.model_validate(
        {
            "training": {"checkpoint_policy": "final", "micro_batch_size": micro_batch_size},
            "strategy": {"placement": "packed", "models": 8} | strategy,
        }
    )


@pytest.mark.parametrize(
    ("strategy", "kept"),
    [
        (GOSSIP, 0),
        ({"kind": "diloco"}, 2),
        ({"kind": "diloco", "outer_momentum": 0.0}, 1),
    ],
)
def test_packed_models_need_disk_and_memory_for_all_of_them_and_what_lies_between(
    strategy, kept, monkeypatch, tmp_path
):
    config = packed(**strategy)
    disk = PARAMETERS * (8 * 12 + kept * 4 + 4)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, disk))
    fit.check_disk(config, plan_budget(config), tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, disk - 1))
    with pytest.raises(StorageError, match="1 checkpoints"):
        fit.check_disk(config, plan_budget(config), tmp_path)
    memory = PARAMETERS * (8 * 16 + kept * 4 + 4)  # the last one is what is judged
    monkeypatch.setattr(fit, "free_memory", lambda device: memory)
    fit.check_memory(config, CPU, amp=None)
    monkeypatch.setattr(fit, "free_memory", lambda device: memory - 1)
    with pytest.raises(AtollError, match="moments of 8 local models take") as raised:
        fit.check_memory(config, CPU, amp=None)
    assert "fewer local models (strategy.models is 8)" in str(raised.value.hint)


def test_advice_for_packed_models_counts_the_sequences_of_all_in_one_backward():
    error = fit.out_of_memory(MemoryError(), packed(**GOSSIP), CPU)
    assert error.hint == (
        "set training.micro_batch_size=8 (it is 16 for each of 8 local models, 128 in one "
        "backward); the update stays the same"
    )
    error = fit.out_of_memory(MemoryError(), packed(micro_batch_size=1, **GOSSIP), CPU)
    assert "choose fewer local models (strategy.models is 8)" in str(error.hint)


def test_state_that_cannot_fit_is_refused(monkeypatch):
    monkeypatch.setattr(fit, "free_memory", lambda device: 16 * PARAMETERS - 1)
    with pytest.raises(AtollError, match=r"take 0\.30 GiB; cpu has 0\.30 GiB free"):
        fit.check_memory(BASE, CPU, amp=None)


def test_tight_memory_warns_with_the_setting_that_helps(monkeypatch, caplog):
    monkeypatch.setattr(fit, "free_memory", lambda device: 17 * PARAMETERS)
    with caplog.at_level("WARNING"):
        fit.check_memory(BASE, CPU, amp=None)
    assert "training.micro_batch_size" in caplog.text


def test_free_memory_is_known_here_and_positive():
    free = fit.free_memory(CPU)
    assert free is None or free > 0


@pytest.mark.parametrize(("micro", "half"), [(128, 64), (16, 8), (2, 1)])
def test_advice_halves_the_microbatch(micro, half):
    error = fit.out_of_memory(
        torch.OutOfMemoryError("CUDA out of memory."), training(micro_batch_size=micro), CPU
    )
    assert f"training.micro_batch_size={half} (it is {micro})" in str(error.hint)


def test_advice_for_single_sequences_is_another_model():
    error = fit.out_of_memory(MemoryError(), training(micro_batch_size=1), CPU)
    assert "model.context_length" in str(error.hint)
    assert "MemoryError" in error.message


def test_host_allocation_failures_count_as_memory_running_out():
    assert fit.is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory"))
    assert not fit.is_out_of_memory(RuntimeError("shape mismatch"))

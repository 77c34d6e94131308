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

"""Switches, devices and the binding."""

import dataclasses
import os

import pytest
import torch

from atoll.config.runtime import RuntimeConfig
from atoll.errors import UnavailableError, UsageError
from atoll.train.binding import binding_facts, environment_facts, source_hash
from atoll.train.device import Execution, resolve_amp, resolve_device, resolve_execution
from atoll.train.exact import torch_switches

CPU = torch.device("cpu")


@pytest.fixture
def _no_workspace(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)


def switches() -> tuple:
    return (
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.cudnn.deterministic,
        torch.backends.cudnn.benchmark,
        torch.utils.deterministic.fill_uninitialized_memory,
    )


@pytest.mark.usefixtures("_no_workspace")
@pytest.mark.parametrize("compiled", [True, False])
def test_deterministic_mode_sets_every_switch_and_puts_it_back(compiled):
    before = switches()
    with torch_switches(deterministic=True, cpu_threads=3, compiled=compiled):
        assert switches() == (3, True, True, False, False)
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert switches() == before


@pytest.mark.usefixtures("_no_workspace")
def test_fast_mode_leaves_the_environment_alone():
    with torch_switches(deterministic=False, cpu_threads=None):
        assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
        assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.usefixtures("_no_workspace")
def test_deterministic_mode_after_cuda_has_started_is_refused(monkeypatch):
    before = switches()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with (
        pytest.raises(UsageError, match="CUDA was used") as raised,
        torch_switches(deterministic=True, cpu_threads=None),
    ):
        pass
    assert "CUBLAS_WORKSPACE_CONFIG=:4096:8" in (raised.value.hint or "")
    assert switches() == before


def test_absent_device_is_refused_with_those_that_are_here():
    with pytest.raises(UnavailableError, match=r"runtime\.device is cuda:63.*cpu"):
        resolve_device("cuda:63")


def test_automatic_settings_on_a_cpu():
    assert resolve_device("cpu") == CPU
    assert resolve_amp("auto", CPU) is None
    assert resolve_amp("bf16", CPU) is torch.bfloat16
    assert resolve_execution(RuntimeConfig(), CPU) == EAGER
    assert resolve_execution(RuntimeConfig(compile=True), CPU).compiled


@pytest.mark.parametrize("name", ["kernels", "capture"])
def test_what_only_a_gpu_can_do_is_refused_on_a_cpu_by_name(name):
    with pytest.raises(UnavailableError, match=rf"runtime\.{name} is true.*cpu is no CUDA device"):
        resolve_execution(RuntimeConfig(**{name: True}), CPU)


EAGER = Execution(amp=None, kernels=False, compiled=False, captured=False)


def facts(**changes):
    execution = Execution(**{**dataclasses.asdict(EAGER), **changes})
    return binding_facts(device=CPU, execution=execution, seeds={"runtime.seed": 0})


def test_binding_is_equal_for_equal_settings_and_names_what_differs():
    assert facts() == facts()
    other = facts(amp=torch.bfloat16, compiled=True)
    assert {key for key in other if other[key] != facts()[key]} == {"amp", "compiled"}


def test_source_hash_follows_the_code_that_decides_numbers():
    assert source_hash() == source_hash()
    assert len(source_hash()) == 64


def test_environment_names_versions_and_source():
    found = environment_facts()
    assert found["versions"]["torch"] == torch.__version__
    assert found["source_hash"] == source_hash()

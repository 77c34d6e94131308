"""Where a run computes, and what `auto` stands for there."""

import importlib.util
import re
from dataclasses import dataclass

import torch

from atoll.config.runtime import RuntimeConfig
from atoll.errors import UnavailableError, UsageError


def resolve_device(name: str, *, option: str = "runtime.device") -> torch.device:
    """Return the device that `runtime.device` means on this machine.

    Args:
        name: cpu, cuda, cuda:N, mps, or auto for the first of cuda, mps and cpu that is here.
        option: Who asks for it, to be named in an error.

    Raises:
        UsageError: It is no device's name.
        UnavailableError: It was asked for by name and is not here; says what is.
    """
    if not re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", name):
        raise UsageError(
            f"{option} is {name}; it must be auto, cpu, cuda, cuda:N (N from 0) or mps.",
            hint="`atoll doctor` shows the devices of this machine",
        )
    here = available_devices()
    if name == "auto":
        return torch.device(here[0])
    found = torch.device(name)
    if found.type == "cuda" and torch.cuda.is_available():
        found = torch.device("cuda", 0 if found.index is None else found.index)
    if str(found) not in here:
        raise UnavailableError(
            f"{option} is {name}, and this machine has {', '.join(here)}.",
            hint=f"set {option}=auto to take the first of them",
        )
    return found


def available_devices() -> list[str]:
    """Return the devices of this machine, the fastest kind first."""
    here = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        here.append("mps")
    return [*here, "cpu"]


def resolve_amp(amp: str, device: torch.device) -> torch.dtype | None:
    """Return the autocast type that `runtime.amp` means on `device`, None for none.

    Raises:
        UnavailableError: bf16 was asked for on a GPU that cannot compute it.
    """
    if amp == "none" or (amp == "auto" and device.type != "cuda"):
        return None
    if device.type == "cuda" and not torch.cuda.is_bf16_supported():
        if amp == "auto":
            return None
        raise UnavailableError(
            f"runtime.amp is bf16, and {torch.cuda.get_device_name(device)} cannot compute it.",
            hint="set runtime.amp=none",
        )
    return torch.bfloat16


@dataclass(frozen=True, slots=True)
class Execution:
    """How updates are computed on one device, with nothing left to choose.

    Attributes:
        amp: Autocast type of matrix products, None for none.
        kernels: Whether atoll's own GPU kernels are used.
        compiled: Whether forward and backward are compiled.
        captured: Whether a whole update is one CUDA graph.
    """

    amp: torch.dtype | None
    kernels: bool
    compiled: bool
    captured: bool


def resolve_execution(runtime: RuntimeConfig, device: torch.device) -> Execution:
    """Return what `runtime.amp`, `kernels`, `compile` and `capture` mean on `device`.

    Raises:
        UnavailableError: One was asked for that this device or installation cannot do.
    """
    amp = resolve_amp(runtime.amp, device)
    lacking = _kernels_lack(device, amp)
    if runtime.kernels is True and lacking:
        raise UnavailableError(
            f"runtime.kernels is true, and {lacking}.", hint="set runtime.kernels=auto"
        )
    kernels = runtime.kernels is not False and runtime.compile is not True and lacking is None
    if runtime.capture is True and not kernels:
        raise UnavailableError(
            f"runtime.capture is true without atoll's own kernels: {lacking}.",
            hint="set runtime.capture=auto",
        )
    compiled = runtime.compile
    if compiled == "auto":
        compiled = device.type == "cuda" and not kernels
    return Execution(
        amp=amp,
        kernels=kernels,
        compiled=bool(compiled),
        captured=kernels and runtime.capture is not False,
    )


def may_compile(runtime: RuntimeConfig, device: torch.device) -> bool:
    """Return whether anything might be compiled, without waking the device to find out.

    `torch_switches` asks before CUDA starts; `resolve_execution` may start it.
    """
    return device.type == "cuda" if runtime.compile == "auto" else runtime.compile


def _kernels_lack(device: torch.device, amp: torch.dtype | None) -> str | None:
    if device.type != "cuda":
        return f"{device} is no CUDA device"
    if amp != torch.bfloat16:
        return "runtime.amp is not bf16"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    return None


def wait_for(device: torch.device) -> None:
    """Wait until the device has done everything asked of it; a CPU always has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()

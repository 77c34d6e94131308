"""The identity of everything that decides a rank's numbers besides its state."""

import hashlib
import os
import platform
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

import atoll
from atoll.files import identity, sha256_file
from atoll.train.device import Execution

DECISIVE = ("data", "model", "network", "optim", "strategy", "train", "seeds.py", "tensors.py")
"""Rooms and modules whose code decides numbers."""


def binding_facts(
    *,
    device: torch.device,
    execution: Execution,
    seeds: dict[str, int],
    world: int = 1,
    rank: int = 0,
) -> dict[str, Any]:
    """Return what must be equal for two runs from one state to give equal bits.

    Args:
        device: Where the run computes.
        execution: How it computes there.
        seeds: Every seed of the recipe by its dotted name.
        world: Ranks.
        rank: This one.
    """
    amp = execution.amp
    facts: dict[str, Any] = {
        "source_hash": source_hash(),
        "versions": versions(),
        "device": _device_facts(device),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "cublas_workspace": os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "amp": None if amp is None else str(amp).removeprefix("torch."),
        "kernels": execution.kernels,
        "compiled": execution.compiled,
        "captured": execution.captured,
        "seeds": seeds,
        "world": world,
        "rank": rank,
    }
    return facts


def versions() -> dict[str, str | None]:
    """Return the versions of everything that computes."""
    return {
        "atoll": atoll.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "cuda": torch.version.cuda,
        "cudnn": str(torch.backends.cudnn.version()) if torch.version.cuda else None,
    }


def environment_facts() -> dict[str, Any]:
    """Return what describes this machine and process, for people who read the run later."""
    return {
        "versions": versions(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "host": platform.node(),
        "cpu_count": os.cpu_count(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "source_hash": source_hash(),
        "source_revision": source_revision(),
    }


@cache
def source_hash() -> str:
    """Return the SHA-256 that names the code which decides numbers, file by file.

    Read once, since a running process keeps the code that it has imported.
    """
    package = Path(atoll.__file__).parent
    files = [
        path
        for name in DECISIVE
        for path in ([package / name] if name.endswith(".py") else (package / name).rglob("*.py"))
    ]
    return identity({path.relative_to(package).as_posix(): sha256_file(path) for path in files})


@cache
def source_revision() -> str | None:
    """Return the git commit of the checkout that runs, with `-dirty` where files differ.

    None where the package was installed from elsewhere, or where git is not installed.
    """
    root = Path(atoll.__file__).parents[2]
    if not (root / ".git").exists():
        return None

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        dirty = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "HEAD") + ("-dirty" if dirty else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _device_facts(device: torch.device) -> dict[str, Any]:
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return {
            "type": "cuda",
            "name": properties.name,
            "capability": [properties.major, properties.minor],
            "multiprocessors": properties.multi_processor_count,
        }
    return {
        "type": device.type,
        "machine": platform.machine(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "library": hashlib.sha256(torch.__config__.show().encode()).hexdigest()[:16],
    }

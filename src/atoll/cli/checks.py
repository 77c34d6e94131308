"""What this machine can do for a recipe, and what is missing; the checks behind `atoll doctor`.

A check never raises for what it looks for: its finding is the answer. `broken` is what the recipe
needs and this machine lacks, `missing` is what others may need.
"""

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from atoll.bench.machine import machine, usable_cores
from atoll.config.data import HUB, DataConfig, SourceConfig, TokenizerConfig
from atoll.config.schema import RunConfig
from atoll.errors import StorageError, UnavailableError
from atoll.files import remove_if_present, write_bytes

GIB = 1 << 30
TORCH_RANGE = ((2, 11), (2, 15))
"""Supported versions of torch, from the first to below the second."""
MAX_CLOCK_SKEW_SECONDS = 2.0
"""File systems keep times to 2 s at worst (FAT), so less says nothing."""


@dataclass(frozen=True, slots=True)
class Check:
    """One finding.

    Attributes:
        name: What was looked at.
        status: ok; missing, and nothing here needs it; or broken, and the recipe needs it.
        found: What was found.
        remedy: What to do about it, for a status other than ok.
    """

    name: str
    status: Literal["ok", "missing", "broken"]
    found: str
    remedy: str | None = None


def all_checks(config: RunConfig) -> Iterator[Check]:
    """Yield every check; a folder that is written to is left as it was."""
    yield check_python(sys.version_info[:3])
    yield check_torch(_installed("torch"))
    yield check_packages()
    yield from _torch_checks(config)
    yield check_compiler(required=config.runtime.compile is True)
    yield _memory()
    yield from (
        check_folder(name, folder)
        for name, folder in (
            ("data.cache_dir", config.data.cache_dir),
            ("runtime.output_dir", config.runtime.output_dir),
        )
    )
    yield from _extras(config)


def check_python(version: tuple[int, int, int]) -> Check:
    """Check the running Python against the lowest supported one."""
    text = ".".join(map(str, version))
    if version < (3, 11, 0):
        return Check("python", "broken", text, "install Python 3.11 or newer")
    return Check("python", "ok", f"{text}, {platform.system()} {platform.machine()}")


def check_torch(version: str | None) -> Check:
    """Check an installed version of torch, None for none, against the supported range."""
    low, high = TORCH_RANGE
    remedy = f"pip install 'torch>={low[0]}.{low[1]},<{high[0]}.{high[1]}'"
    if version is None:
        return Check("torch", "broken", "not installed", remedy)
    release = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if not low <= release < high:
        return Check("torch", "broken", f"{version} is outside the supported range", remedy)
    return Check("torch", "ok", version)


def check_packages() -> Check:
    """Check that every package that atoll itself requires is installed."""
    required = [
        text for text in importlib.metadata.requires("atoll") or () if "extra ==" not in text
    ]
    names = [re.split(r"[^\w.-]", text, maxsplit=1)[0] for text in required]
    absent = [name for name in names if _installed(name) is None]
    if absent:
        return Check("packages", "broken", f"without {', '.join(absent)}", "pip install atoll")
    return Check("packages", "ok", f"all {len(names)} required ones")


def check_compiler(*, required: bool) -> Check:
    """Check for what torch.compile needs: a C++ compiler for a CPU, Triton for a GPU."""
    compiler = next(filter(shutil.which, (os.environ.get("CXX", ""), "g++", "clang++", "cl")), None)
    triton = importlib.util.find_spec("triton") is not None
    found = [f"C++ compiler {compiler}"] * bool(compiler) + ["Triton"] * triton
    if found:
        return Check("compile", "ok", " and ".join(found))
    return Check(
        "compile",
        "broken" if required else "missing",
        "neither a C++ compiler (for a CPU) nor Triton (for a GPU)",
        "install g++ or clang++, or keep runtime.compile=false",
    )


def check_folder(name: str, folder: Path) -> Check:
    """Check free space, a durable write and the clock where a folder is or will be."""
    place = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    probe = place / f".atoll-doctor-{os.getpid()}"
    try:
        started = time.perf_counter()
        write_bytes(probe, b"atoll")
        elapsed_seconds = time.perf_counter() - started
        skew_seconds = probe.stat().st_mtime - time.time()
    except StorageError as error:
        return Check(name, "broken", error.message, error.hint or "choose another folder")
    finally:
        remove_if_present(probe)
    free = shutil.disk_usage(place).free / GIB
    found = f"{folder}: {free:,.1f} GiB free, a durable write takes {elapsed_seconds * 1e3:.1f} ms"
    if abs(skew_seconds) > MAX_CLOCK_SKEW_SECONDS:
        found += f", its clock is {skew_seconds:+.0f} s off this machine's"
        return Check(
            name, "missing", found, "set the clocks of this machine and of its file server"
        )
    return Check(name, "ok", found)


def _torch_checks(config: RunConfig) -> Iterator[Check]:
    if _installed("torch") is None:
        return
    try:
        import torch

        from atoll.train.device import resolve_device, resolve_execution
    except (ImportError, OSError) as error:
        remedy = "install torch again, into a fresh environment"
        yield Check("torch import", "broken", f"fails: {error}", remedy)
        return
    count = torch.cuda.device_count()
    devices = [torch.cuda.get_device_properties(index) for index in range(count)]
    found = ", ".join(f"{d.name} with {d.total_memory / GIB:,.0f} GiB" for d in devices)
    remedy = "install a torch that is built with CUDA" if shutil.which("nvidia-smi") else None
    yield _optional("cuda", found, "no device", remedy)
    mps = "Metal" if torch.backends.mps.is_available() else ""
    yield _optional("mps", mps, "no Apple GPU", None)
    bf16 = torch.cuda.get_device_name() if devices and torch.cuda.is_bf16_supported() else ""
    yield _optional("bf16", bf16, "no GPU that computes it; FP32 is used", None)
    yield Check("threads", "ok", f"{torch.get_num_threads()} of torch on {usable_cores()} cores")
    try:
        device = resolve_device(config.runtime.device)
        execution = resolve_execution(config.runtime, device)
    except UnavailableError as error:
        yield Check("runtime.device", "broken", error.message, error.hint)
    else:
        ways = [name for name in ("kernels", "compiled", "captured") if getattr(execution, name)]
        found = f"{config.runtime.device} is {device} with {execution.amp or torch.float32}"
        found += f"; updates are {' and '.join(ways) or 'eager'}"
        yield Check("runtime.device", "ok", found)


def _memory() -> Check:
    total = machine()["memory_bytes"]
    found = f"{total / GIB:,.1f} GiB" if total else "unknown on this system"
    if limit := _memory_limit_bytes():
        found += f", limited to {limit / GIB:,.1f} GiB by its container"
    return Check("memory", "ok", found)


def _memory_limit_bytes() -> int | None:
    file = Path("/sys/fs/cgroup/memory.max")
    text = file.read_text(encoding="ascii").strip() if file.is_file() else "max"
    return int(text) if text.isdigit() else None


def _extras(config: RunConfig) -> Iterator[Check]:
    yield _extra("hub", ("datasets", "huggingface_hub"), required=_uses_hub(config.data))
    for tracker in ("tensorboard", "wandb"):
        yield _extra(tracker, (tracker,), required=tracker in config.runtime.trackers)


def _extra(name: str, packages: tuple[str, ...], *, required: bool) -> Check:
    absent = [package for package in packages if _installed(package) is None]
    found = "" if absent else ", ".join(f"{p} {_installed(p)}" for p in packages)
    remedy = f"pip install 'atoll[{name}]'"
    return _optional(f"extra {name}", found, "not installed", remedy, required=required)


def _optional(
    name: str, found: str, absent: str, remedy: str | None, *, required: bool = False
) -> Check:
    if found:
        return Check(name, "ok", found)
    return Check(name, "broken" if required else "missing", absent, remedy)


def _uses_hub(data: DataConfig) -> bool:
    parts = [data.source] if not isinstance(data.source, list) else data.source
    for part in (*parts, data.validation_source, data.tokenizer):
        path = part.path if isinstance(part, SourceConfig | TokenizerConfig) else part
        if path is not None and path.startswith(HUB):
            return True
    return False


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None

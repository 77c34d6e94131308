"""Where and with what a measurement was made."""

import os
import platform
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("atoll", "torch", "numpy", "transformers", "tokenizers", "scipy")


def machine() -> dict[str, Any]:
    """Return processor, cores this process may use, memory, load and system, as JSON values."""
    return {
        "processor": _processor(),
        "architecture": platform.machine(),
        "cores": usable_cores(),
        "memory_bytes": _memory_bytes(),
        "load_average_1_minute": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "system": platform.platform(),
    }


def versions() -> dict[str, str | None]:
    """Return the version of Python and of each package that decides speed; None: not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def usable_cores() -> int:
    """Return how many cores this process may use."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def now() -> str:
    """Return the UTC time to the second, ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _processor() -> str:
    cpu_info = Path("/proc/cpuinfo")
    if cpu_info.is_file():
        for line in cpu_info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _memory_bytes() -> int | None:
    if sys.platform == "win32":
        return None
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

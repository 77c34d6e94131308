"""Where a loader trial ran, with what, and on which tokens."""

from importlib.metadata import PackageNotFoundError, version
from platform import node
from typing import Any

import torch

from atoll.bench.machine import versions
from atoll.data.placement import resolve_placement
from atoll.runner.build import Job
from atoll.runner.changes import config_identity
from atoll.train.binding import source_hash, source_revision

_MORE_PACKAGES = ("triton", "pydantic", "datasets")


def trial_facts(job: Job) -> dict[str, Any]:
    """Return host, GPU, threads, versions and every identity, as JSON values."""
    config, device = job.config, job.device
    return {
        "placement": resolve_placement(config.data.placement, device),
        "prefetch": config.data.prefetch,
        "device": str(device),
        "hostname": node(),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "cpu_threads": torch.get_num_threads(),
        "versions": versions() | _more_versions() | {"cuda": torch.version.cuda},
        "source_hash": source_hash(),
        "source_revision": source_revision(),
        "cache_identity": job.cache.manifest.cache_identity,
        "loader_identity": job.loader.identity,
        "config_identity": config_identity(config),
        "config": config.model_dump(mode="json"),
    }


def _more_versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for package in _MORE_PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found

"""Sections `evaluation` and `runtime`."""

import re
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from atoll.config.base import Section


class EvaluationConfig(Section):
    """How the model is judged on held-out text."""

    subset_sequences: int = Field(default=1024, ge=1)
    """Validation sequences scored after each virtual epoch; the whole split at the end."""
    batch_size: int = Field(default=16, ge=1)
    """Sequences of one forward."""
    seed: int = Field(default=0, ge=0)
    """Seed of the subset and of samples."""


class RuntimeConfig(Section):
    """Where and how the run is carried out."""

    seed: int = Field(default=0, ge=0)
    """Seed of the initial weights and of everything else that is not data order."""
    deterministic: bool = False
    """Whether equal inputs must give equal bits, at some cost in speed on a GPU."""
    device: str = "auto"
    """cpu, cuda, cuda:N, mps, or `auto`: the first of cuda, mps and cpu that is here."""
    amp: Literal["auto", "none", "bf16"] = "auto"
    """Autocast type of matrix products; `auto` is bf16 on CUDA and none elsewhere."""
    compile: bool | Literal["auto"] = "auto"
    """Whether the update is compiled; `auto` does so on CUDA."""
    cpu_threads: int | None = Field(default=None, ge=1, le=1024)
    """Threads of CPU kernels. Default: what torch chooses."""
    output_dir: Path = Path("runs/default")
    """Folder of the run."""
    trackers: list[Literal["tensorboard", "wandb"]] = Field(default=[])
    """Writers of metrics besides metrics.jsonl; each is an extra."""

    @field_validator("device")
    @classmethod
    def _device_is_known(cls, value: str) -> str:
        if not re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", value):
            raise ValueError("it must be auto, cpu, cuda, cuda:N (N from 0) or mps")
        return value

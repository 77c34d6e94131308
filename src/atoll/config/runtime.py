"""Sections `evaluation` and `runtime`."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from atoll.config.base import BrokenRule, Section, refuse


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
    kernels: bool | Literal["auto"] = "auto"
    """Whether forward, backward and the optimizer go through atoll's own GPU kernels, which need \
CUDA, bf16 and triton; `auto` does so where they are and `compile` is not true."""
    compile: bool | Literal["auto"] = "auto"
    """Whether forward and backward are compiled; `auto` does so on CUDA without `kernels`."""
    capture: bool | Literal["auto"] = "auto"
    """Whether the whole update is recorded once as a CUDA graph; `auto` does so with `kernels`."""
    cpu_threads: int | None = Field(default=None, ge=1, le=1024)
    """Threads of CPU kernels. Default: what torch chooses."""
    output_dir: Path = Path("runs/default")
    """Folder of the run."""
    trackers: list[Literal["tensorboard", "wandb"]] = Field(default=[])
    """Writers of metrics besides metrics.jsonl; each is an extra."""

    @model_validator(mode="after")
    def _hold_rules(self) -> Self:
        refuse(_broken_rules(self))
        return self

    @field_validator("device")
    @classmethod
    def _device_is_known(cls, value: str) -> str:
        if not re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", value):
            raise ValueError("it must be auto, cpu, cuda, cuda:N (N from 0) or mps")
        return value


def _broken_rules(runtime: RuntimeConfig) -> Iterator[BrokenRule]:
    if runtime.kernels is True and runtime.compile is True:
        yield BrokenRule(
            ("kernels", "compile"),
            "runtime.kernels and runtime.compile are two ways of doing the same. "
            "Set one of them to false.",
        )
    if runtime.capture is True and (runtime.kernels is False or runtime.compile is True):
        yield BrokenRule(
            ("capture", "kernels" if runtime.kernels is False else "compile"),
            "runtime.capture needs atoll's own kernels. "
            "Set runtime.kernels to auto and runtime.compile to auto, or runtime.capture to false.",
        )

"""Sections `optimizer` and `lr_schedule`."""

from typing import Literal

from pydantic import Field

from atoll.config.base import Section


class OptimizerConfig(Section):
    lr: float = Field(0.001, gt=0)
    """Peak learning rate, per update."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """Decay of the first moment."""
    beta2: float = Field(0.98, ge=0, lt=1)
    """Decay of the second moment."""
    eps: float = Field(1e-8, gt=0)
    """Added to the root of the second moment."""
    weight_decay: float = Field(0.1, ge=0)
    """Decoupled decay of matrices, times the rate; norm scales have none."""
    grad_clip: float | None = Field(1.0, gt=0)
    """Largest global gradient norm of a local model; null turns clipping off."""


class LrScheduleConfig(Section):
    name: Literal["cosine", "wsd"] = "cosine"
    """`cosine` to the minimum, or `wsd`: hold, then 1 - sqrt over the last part."""
    warmup_steps: int = Field(312, ge=0)
    """Updates of linear warm-up; update 1 uses lr / warmup_steps."""
    min_lr_ratio: float = Field(0.1, ge=0, le=1)
    """Share of the peak that `cosine` ends at."""
    decay_fraction: float = Field(0.2, gt=0, le=1)
    """Share of all updates that `wsd` decays over."""

"""Sections `optimizer` and `lr_schedule`."""

from typing import Literal

from pydantic import Field

from atoll.config.base import Section


class OptimizerConfig(Section):
    """AdamW, and the limit of the gradient norm."""

    lr: float = Field(default=0.001, gt=0)
    """Peak learning rate, per update."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the first moment."""
    beta2: float = Field(default=0.98, ge=0, lt=1)
    """Decay of the second moment."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the root of the second moment."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Decoupled decay of matrices, times the rate; norm scales have none."""
    grad_clip: float | None = Field(default=1.0, gt=0)
    """Largest global gradient norm of a local model; null turns clipping off."""


class LrScheduleConfig(Section):
    """The learning rate of each update: linear warm-up, then the named shape."""

    name: Literal["cosine", "wsd"] = "cosine"
    """`cosine` to the minimum, or `wsd`: hold, then 1 - sqrt over the last part."""
    warmup_steps: int = Field(default=312, ge=0)
    """Updates of linear warm-up; update 1 uses lr / warmup_steps."""
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1)
    """Share of the peak that `cosine` ends at."""
    decay_fraction: float = Field(default=0.2, gt=0, le=1)
    """Share of all updates that `wsd` decays over."""

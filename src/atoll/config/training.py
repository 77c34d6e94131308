"""Section `training`: the budget, the batch and what is kept on the way."""

from pydantic import Field
from typing import Literal

from atoll.config.base import Section


class TrainingConfig(Section):
    tokens_per_parameters: float = Field(20.0, gt=0)
    """Total budget in targets per trainable parameter of one model."""
    epoch_tokens_per_parameters: float = Field(0.5, gt=0)
    """Length of a virtual epoch, in the same unit; divides the total."""
    batch_tokens: int = Field(131_072, ge=1)
    """Targets of one update over all local models."""
    micro_batch_size: int = Field(16, ge=1)
    """Sequences of one backward of one local model."""
    checkpoint_policy: Literal["none", "final", "interval", "explicit"] = "final"
    """When a checkpoint is kept, besides those for resuming after a signal."""
    checkpoint_epochs: int | list[int] = 1
    """Every how many virtual epochs (`interval`), or after which (`explicit`)."""
    log_every: int = Field(10, ge=1)
    """Updates between two lines of metrics."""
    sample_prompt: str | None = None
    """Text continued by the model after every virtual epoch; null writes no samples."""
    sample_tokens: int = Field(48, ge=1)
    """Length of such a sample."""

"""Section `training`: the budget, the batch and what is kept on the way."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from atoll.config.base import BrokenRule, Section, refuse


class TrainingConfig(Section):
    """The budget, the batch and what is kept on the way."""

    tokens_per_parameters: float = Field(default=20.0, gt=0)
    """Total budget in targets per trainable parameter of one model."""
    epoch_tokens_per_parameters: float = Field(default=0.5, gt=0)
    """Length of a virtual epoch, in the same unit; divides the total. Evaluation follows each."""
    batch_tokens: int = Field(default=131_072, ge=1)
    """Targets of one update over all local models; a multiple of `strategy.models` times
    `model.context_length`."""
    micro_batch_size: int = Field(default=16, ge=1)
    """Sequences of one backward of one local model; divides those that an update gives it, or is
    larger and means all of them. Lower it where memory is short: results differ by rounding
alone."""
    checkpoint_policy: Literal["none", "final", "interval", "explicit"] = "final"
    """When a checkpoint is kept, besides those for resuming after a signal."""
    checkpoint_epochs: (
        Annotated[int, Field(ge=1)]
        | Annotated[list[Annotated[int, Field(ge=1)]], Field(min_length=1)]
    ) = 1
    """Every how many virtual epochs (`interval`), or after which (`explicit`)."""
    checkpoint_keep: int | None = Field(default=None, ge=1)
    """At most this many checkpoints stay, the newest ones; null keeps all."""
    log_every: int = Field(default=10, ge=1)
    """Updates between two lines of metrics."""
    sample_prompt: str | None = None
    """Text continued by the model after every virtual epoch; null writes no samples."""
    sample_tokens: int = Field(default=48, ge=1)
    """Length of such a sample."""

    @model_validator(mode="after")
    def _hold_rules(self) -> Self:
        refuse(_broken_rules(self))
        return self


def _broken_rules(training: TrainingConfig) -> Iterator[BrokenRule]:
    policy, epochs = training.checkpoint_policy, training.checkpoint_epochs
    keys = ("checkpoint_policy", "checkpoint_epochs")
    if policy == "interval" and isinstance(epochs, list):
        yield BrokenRule(
            keys,
            f"training.checkpoint_policy interval takes one number of epochs, not the list "
            f"{epochs}. Set training.checkpoint_epochs to a whole number, or training."
            "checkpoint_policy to explicit.",
        )
    if policy == "explicit" and isinstance(epochs, int):
        yield BrokenRule(
            keys,
            f"training.checkpoint_policy explicit takes a list of epochs, not {epochs}. "
            f"Set training.checkpoint_epochs to [{epochs}], or training.checkpoint_policy to "
            "interval.",
        )
    listed = epochs if policy == "explicit" and isinstance(epochs, list) else []
    if any(later <= earlier for earlier, later in pairwise(listed)):
        yield BrokenRule(
            keys,
            f"training.checkpoint_epochs {epochs} is not strictly ascending. "
            f"Set it to {sorted(set(listed))}.",
        )

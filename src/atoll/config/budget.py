"""How many updates a recipe makes, and after which of them each virtual epoch ends.

Exact: a ratio is the decimal that was written, and counts stay fractions until they are rounded.
"""

from dataclasses import dataclass
from fractions import Fraction
from math import floor
from typing import TYPE_CHECKING

from atoll.config.model import parameter_count
from atoll.config.training import TrainingConfig

if TYPE_CHECKING:
    from atoll.config.schema import RunConfig


@dataclass(frozen=True, slots=True)
class Budget:
    """The updates of a run.

    Attributes:
        parameters: Trainable parameters of one local model.
        batch_tokens: Targets of one update.
        epoch_ends: Updates made when virtual epoch 1, 2, ... ends; strictly ascending.
    """

    parameters: int
    batch_tokens: int
    epoch_ends: tuple[int, ...]

    @property
    def total_steps(self) -> int:
        """Updates of the whole run."""
        return self.epoch_ends[-1]

    @property
    def num_epochs(self) -> int:
        """Virtual epochs of the whole run."""
        return len(self.epoch_ends)

    @property
    def total_targets(self) -> int:
        """Targets of the whole run; every update uses one complete batch."""
        return self.total_steps * self.batch_tokens


def plan_budget(config: "RunConfig") -> Budget:
    """Return the updates that a valid recipe makes.

    With P parameters, e targets per parameter and epoch, and B targets per update, epoch k ends
    after floor(k * e * P / B + 1/2) updates, so a larger total leaves earlier epochs as they are.
    """
    parameters = parameter_count(config.model)
    per_epoch = steps_per_epoch(config.training, parameters)
    count = num_epochs(config.training)
    ends = tuple(floor(k * per_epoch + Fraction(1, 2)) for k in range(1, count.numerator + 1))
    return Budget(parameters, config.training.batch_tokens, ends)


def steps_per_epoch(training: TrainingConfig, parameters: int) -> Fraction:
    """Return the nominal updates of one virtual epoch, before rounding."""
    return as_written(training.epoch_tokens_per_parameters) * parameters / training.batch_tokens


def num_epochs(training: TrainingConfig) -> Fraction:
    """Return the virtual epochs of the budget; a valid recipe has a whole number of them."""
    total = as_written(training.tokens_per_parameters)
    return total / as_written(training.epoch_tokens_per_parameters)


def as_written(value: float) -> Fraction:
    """Return the shortest decimal that reads as this float: 0.1 is one tenth here."""
    return Fraction(repr(value))

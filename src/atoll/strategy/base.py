"""A strategy owns what passes between local models, not the step."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from atoll.optim.adamw import Mixing
from atoll.tensors import Snapshot


@dataclass(frozen=True, slots=True)
class Round:
    """One moment at which local models may exchange.

    Attributes:
        step: The update being made, counted from 1.
        generation: Group starts so far; an exchange of an older generation is never accepted.
        members: Ranks (or packed models) that take part, ascending.
    """

    step: int
    generation: int
    members: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Traffic:
    """What one call sent: by this rank, or for each local model where they are packed.

    An exchange counts where it is launched, its wait where its result is taken. Packed models put
    nothing on a wire; their figures are what ranks doing the same would send.

    Attributes:
        payload_bytes: Bytes of tensor data handed to the channel.
        wire_bytes: Bytes that the algorithm must put on the wire for it (predicted).
        wait_seconds: Time this rank waited for others.
        exchanges: Collective or pairwise operations.
    """

    payload_bytes: int = 0
    wire_bytes: int = 0
    wait_seconds: float = 0.0
    exchanges: int = 0

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(
            self.payload_bytes + other.payload_bytes,
            self.wire_bytes + other.wire_bytes,
            self.wait_seconds + other.wait_seconds,
            self.exchanges + other.exchanges,
        )


class Strategy(Protocol):
    """How local models share what they learn.

    Per update the loop runs each forward and backward inside `microbatch`, then calls
    `before_update`, clips, updates with `mixing`, and calls `after_update`. A result that overlaps
    with computation is applied at launch + tau, never on arrival, so that timing does not decide
    numbers.
    """

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the module whose forward is trained; ddp overlaps its reduction in it.

        Called once, before `restore`; names, weights and gradients stay those of `model`.
        """
        ...

    def microbatch(self, *, last: bool) -> AbstractContextManager[None]:
        """Return what surrounds one forward and backward; ddp reduces in the last one only."""
        ...

    def loss_divisor(self, *, local_weight: float, update_weight: float) -> float:
        """Return what the loss sum of one local model is divided by before its backward.

        Args:
            local_weight: Summed target weight of its own rows in this update.
            update_weight: Summed target weight of the rows of all local models.
        """
        ...

    def before_update(self, round: Round) -> Traffic:
        """Gradients are summed: reduce them (ddp) or mix parameters (awc)."""
        ...

    def mixing(self, round: Round) -> Mixing | None:
        """Return how the inner update of packed models mixes them; None where it does not.

        The buffers are the strategy's own and stay where they are: a captured update reads them
        again. Whether a run mixes, and when, is the same in all its updates; how, is not.
        """
        ...

    def after_update(self, round: Round) -> Traffic:
        """The inner update is done: mix (atc) or take the outer step (diloco) when one is due."""
        ...

    def exchanges_after(self, step: int) -> bool:
        """Return whether `after_update` changes weights at `step`: then it must be known by then
        that the update was good, which on a GPU means to wait for it."""
        ...

    def evaluation_weights(self, step: int) -> Mapping[str, torch.Tensor]:
        """Return the weights to judge: the FP32 average, or the outer parent.

        Named and shaped as in a model of one; read-only and valid until the next update, since
        they may be the live weights. Every rank calls it at the same step: it may exchange.
        """
        ...

    def measures(self, step: int) -> Mapping[str, torch.Tensor | float]:
        """Return figures about what passes between the models, as scalars; empty for one model.

        Args:
            step: The last update.

        Returns:
            By name: `consensus_distance`, the root mean square over models of the distance to
            their mean, and `mixing_weight`, the share of the exchange that was applied.
        """
        ...

    def shared_names(self, step: int) -> frozenset[str]:
        """Return what is bitwise equal on all local models after `step`.

        Names of the snapshot of `TrainState`; a name stands for all that lies under it, so
        "model" covers every weight and "strategy.parent" one tensor of the strategy.
        """
        ...

    def snapshot(self) -> Snapshot:
        """Complete what is in flight and store it unapplied; no message survives in a snapshot.

        Completing may change other state (residuals), so it comes before anything is copied. The
        strategy goes on with the completed result: taking a snapshot changes no later number.
        """
        ...

    def restore(self, saved: Snapshot) -> None:
        """Load what `snapshot` gave, by copy; all or nothing.

        Raises:
            StateMismatchError: It is not a snapshot of this strategy; nothing has been changed.
        """
        ...

    def close(self) -> None:
        """Complete and drop what is in flight, so that no peer waits; closing twice is allowed."""
        ...

"""A strategy owns what passes between local models, not the step."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

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
    """What one call sent, as seen by this rank.

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

    Per update the loop runs the backwards, calls `before_update`, clips, updates, then calls
    `after_update`. A result that overlaps with computation is applied at launch + tau, never on
    arrival, so that timing does not decide numbers.
    """

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the module whose forward is trained; ddp overlaps its reduction in it."""
        ...

    def before_update(self, round: Round) -> Traffic:
        """Gradients are summed: reduce them (ddp) or mix parameters (awc)."""
        ...

    def after_update(self, round: Round) -> Traffic:
        """The inner update is done: mix (atc) or take the outer step (diloco) when one is due."""
        ...

    def evaluation_weights(self, step: int) -> Mapping[str, torch.Tensor]:
        """Return the weights to judge: the FP32 average, or the outer parent."""
        ...

    def shared_names(self, step: int) -> frozenset[str]:
        """Return the tensors that are bitwise equal on all local models after `step`."""
        ...

    def snapshot(self) -> Snapshot:
        """Complete what is in flight and store it unapplied; no message survives in a snapshot."""
        ...

    def restore(self, saved: Snapshot) -> None:
        """Load what `snapshot` gave; all or nothing."""
        ...

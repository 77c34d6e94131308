"""What every update of a run has in common."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class UpdatePlan:
    """What every update of a run has in common.

    Attributes:
        rows: Sequences of one update, over all local models.
        micro_rows: Sequences of one backward of one local model; divides rows / N, or exceeds it.
        grad_clip: Largest gradient norm of a local model, None for no limit.
        amp: Autocast type of matrix products, None for none.
        compiled: Whether forward and backward are compiled.
        kernels: Whether forward and backward go through `atoll.model.gpu`, in bfloat16, wherever
            rows carry no document numbers.
        captured: Whether the whole update is recorded as a CUDA graph; the optimizer then has its
            kernels, and the strategy exchanges nothing but what its `mixing` says.
        generation: Group starts so far.
        members: Ranks or packed models that exchange, ascending.
    """

    rows: int
    micro_rows: int
    grad_clip: float | None
    amp: torch.dtype | None = None
    compiled: bool = False
    kernels: bool = False
    captured: bool = False
    generation: int = 1
    members: tuple[int, ...] = (0,)

"""One update recorded as a CUDA graph: the host then starts it with a single call.

Source: PyTorch documentation, CUDA semantics, CUDA graphs.
"""

import gc
from collections.abc import Callable

import torch
from torch import Tensor

WARM_UPDATES = 2
"""Updates made without a graph first: they load kernels and make handles, which a capture cannot.
They are updates of the run like any others."""

Columns = list[Tensor | None]
"""What the forward takes, in its order."""


class Capture:
    """Records `work` over inputs of its own, and replays it.

    Everything else that `work` reads and writes has to stay where it is in memory.
    """

    def __init__(
        self, microbatches: list[Columns], work: Callable[[list[Columns]], Tensor]
    ) -> None:
        """Record; nothing is computed.

        Args:
            microbatches: The inputs of one update; others of the same form may follow.
            work: Makes an update from such inputs and returns what is to be read from it.
        """
        self._held = [[_place(column) for column in columns] for columns in microbatches]
        self._graph = torch.cuda.CUDAGraph()
        gc.collect()
        torch.cuda.empty_cache()  # the graph has memory of its own
        # thread_local: another thread may read data and talk to CUDA meanwhile.
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._result = work(self._held)

    def run(self, microbatches: list[Columns]) -> Tensor:
        """Make one update from these inputs; returns a copy of what it gives."""
        for held, given in zip(self._held, microbatches, strict=True):
            for place, column in zip(held, given, strict=True):
                assert (place is None) == (column is None), "inputs of another form"
                if place is not None and column is not None:
                    place.copy_(column, non_blocking=True)
        self._graph.replay()
        return self._result.clone()


def _place(column: Tensor | None) -> Tensor | None:
    return (
        None if column is None else torch.empty_like(column, memory_format=torch.contiguous_format)
    )

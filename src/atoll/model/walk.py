"""Gradients of N packed models on a CPU, a few models after others.

A CPU is fast while what a model's forward leaves behind is still in the cache for its backward.
N models at once leave N times as much; so a part of them goes forward and backward before the next
part starts, and memory holds the activations of one part.

Shapes: N local models, B rows, T tokens, D width.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from atoll.model.cost import activation_bytes
from atoll.model.llama import Llama

PART_BYTES = 40 << 20
"""Activations that the models of one part may keep for their backward, for each thread.
About the last cache of a server CPU; more threads need longer operations to share.
A part has one model at least."""


Compiler = Callable[[nn.Module], Callable[..., tuple[Tensor, Tensor]]]
"""Turns a model's forward into a faster one."""


class Walk:
    """Walks over the models of a Llama on a CPU; same numbers as its forward and backward.

    Parts share weights and gradients with the Llama's arena, and are made when first needed.
    """

    def __init__(
        self,
        model: Llama,
        *,
        amp: torch.dtype | None = None,
        compiler: Compiler | None = None,
    ) -> None:
        """Compute nothing yet.

        Args:
            model: On a CPU, trainable.
            amp: Autocast type of matrix products, None for none.
            compiler: Turns the forward of a part into a faster one; None leaves it eager.
        """
        self._model, self._amp, self._compiler = model, amp, compiler
        self._parts: dict[tuple[int, int], Callable[..., tuple[Tensor, Tensor]]] = {}

    def gradients(self, columns: Sequence[Tensor | None], *, divisor_N: Tensor) -> Tensor:
        """Add the gradients of every model's loss sum / divisor to the arena; return the sums [N].

        Args:
            columns: What `Llama.forward` takes, in its order, each with a leading N axis or None.
            divisor_N: float32 divisors.
        """
        inputs_NBT = columns[0]
        assert inputs_NBT is not None, "the first column holds the inputs"
        sums = []
        for models in self._slices(inputs_NBT.shape[1] * inputs_NBT.shape[2]):
            part = self._part(models)
            with self._autocast():
                sum_N, _ = part(*(None if c is None else c[models] for c in columns))
            (sum_N / divisor_N[models]).sum().backward()
            sums.append(sum_N.detach())
        return torch.cat(sums)

    def _slices(self, targets: int) -> Iterator[slice]:
        """Yield the parts of all models whose microbatch holds so many targets each."""
        model_bytes = targets * activation_bytes(self._model.config, narrow=self._amp is not None)
        count = max(1, PART_BYTES * torch.get_num_threads() // model_bytes)
        models = self._model.arena.num_models
        for start in range(0, models, count):
            yield slice(start, min(start + count, models))

    def _part(self, models: slice) -> Callable[..., tuple[Tensor, Tensor]]:
        key = (models.start, models.stop)
        if key not in self._parts:
            part = Llama(self._model.config, arena=self._model.arena.part(models))
            self._parts[key] = part if self._compiler is None else self._compiler(part)
        return self._parts[key]

    def _autocast(self) -> AbstractContextManager[object]:
        return nullcontext() if self._amp is None else torch.autocast("cpu", dtype=self._amp)

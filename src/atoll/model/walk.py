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

from atoll.model.attention import document_mask
from atoll.model.cost import activation_bytes
from atoll.model.llama import Block, Llama, embed, norm
from atoll.model.loss import weighted_loss

PART_BYTES = 40 << 20
"""Activations that the models of one part may keep for their backward, for each thread.
About the last cache of a server CPU; more threads need longer operations to share.
A part has one model at least."""


class Walk:
    """Walks over the models of a Llama on a CPU; same numbers as its forward and backward.

    Parts share weights and gradients with the Llama's arena, and are made when first needed.
    """

    def __init__(
        self,
        model: Llama,
        *,
        amp: torch.dtype | None = None,
        compiler: Callable[[nn.Module], Callable[..., tuple[Tensor, Tensor]]] | None = None,
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
            part = _Part(self._model, models)
            self._parts[key] = part if self._compiler is None else self._compiler(part)
        return self._parts[key]

    def _autocast(self) -> AbstractContextManager[object]:
        return nullcontext() if self._amp is None else torch.autocast("cpu", dtype=self._amp)


class _Part(nn.Module):
    """The forward of some of a Llama's models, over parameters that share the Llama's memory."""

    def __init__(self, whole: Llama, models: slice) -> None:
        super().__init__()

        def parameter(name: str) -> nn.Parameter:
            shared = nn.Parameter(whole.arena.view(name)[models])
            shared.grad = whole.arena.grad_view(name)[models]
            return shared

        self.embedding = parameter("embedding")
        self.layers = nn.ModuleList(
            Block(whole.config, lambda name, layer=layer: parameter(f"layers.{layer}.{name}"))
            for layer in range(whole.config.layers)
        )
        self.norm = parameter("norm")
        self.head = None if whole.head is None else parameter("head")
        self.norm_eps = whole.config.norm_eps
        self.angles = whole.angles

    def forward(
        self,
        inputs_NBT: Tensor,
        targets_NBT: Tensor,
        weights_NBT: Tensor | None = None,
        positions_NBT: Tensor | None = None,
        documents_NBT: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return what `Llama.forward` does, for the models of this part."""
        models, rows, tokens = inputs_NBT.shape
        if positions_NBT is not None:
            positions_NBT = positions_NBT.reshape(models * rows, tokens)
        mask = None if documents_NBT is None else document_mask(documents_NBT.flatten(0, 1))
        cos, sin = self.angles(positions_NBT, tokens)
        x = embed(inputs_NBT.reshape(models, -1), self.embedding)
        for layer in self.layers:
            x = layer(x, tokens, cos, sin, mask)
        x = norm(x, self.norm, self.norm_eps)
        return weighted_loss(
            x.view(models, -1, x.shape[-1]),
            self.embedding if self.head is None else self.head,
            targets_NBT.reshape(models, -1),
            None if weights_NBT is None else weights_NBT.reshape(models, -1),
        )

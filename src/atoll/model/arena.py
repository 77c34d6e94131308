"""One flat tensor of weights and one of gradients, shared by everything that walks over them.

Shapes: N local models, P parameters of one model.
"""

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Slice:
    """Where one tensor of a model lies: columns [offset, offset + size) of the arena."""

    offset: int
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements in one model."""
        return math.prod(self.shape)


class Arena:
    """Weights and gradients of N equal models, FP32, without gaps.

    Matrices come first, then norm scales, each in the order given, so that weight decay, clipping,
    the optimizer and mixing between models are one pass over [N, P].

    The gradients exist once and are zeroed in place (`grad_NP.zero_()`). A `zero_grad()` that sets
    `.grad` to None would detach the parameters from `grad_NP`; `Llama` therefore overrides it.

    Attributes:
        data_NP: float32 weights.
        grad_NP: float32 gradients in the same layout; [N, 0] when the arena is not trainable.
        decay_size: Columns [0, decay_size) take weight decay.
        slices: Canonical name -> place of one model's tensor.
    """

    def __init__(
        self,
        *,
        matrices: Mapping[str, tuple[int, ...]],
        scales: Mapping[str, tuple[int, ...]],
        num_models: int = 1,
        device: torch.device | str = "cpu",
        trainable: bool = True,
    ) -> None:
        slices: dict[str, Slice] = {}
        offset = 0
        for name, shape in (*matrices.items(), *scales.items()):
            slices[name] = Slice(offset, tuple(shape))
            offset += slices[name].size
        self.slices: Mapping[str, Slice] = slices
        self.decay_size = sum(math.prod(shape) for shape in matrices.values())
        self.data_NP = torch.zeros(num_models, offset, device=device)
        self.grad_NP = torch.zeros(num_models, offset if trainable else 0, device=device)

    @property
    def num_models(self) -> int:
        """N."""
        return self.data_NP.shape[0]

    @property
    def num_parameters(self) -> int:
        """P, the parameters of one model."""
        return self.data_NP.shape[1]

    def view(self, name: str) -> Tensor:
        """Return the weights under a canonical name, [N, *shape]; shares storage."""
        return self.cut(self.data_NP, name)

    def grad_view(self, name: str) -> Tensor:
        """Return the gradients under a canonical name, [N, *shape]; shares storage."""
        return self.cut(self.grad_NP, name)

    def named(self) -> dict[str, Tensor]:
        """Return every view of the weights by canonical name, in layout order."""
        return {name: self.view(name) for name in self.slices}

    def part(self, models: slice) -> "Arena":
        """Return an arena of some of the models, in this one's memory."""
        part = copy.copy(self)
        part.data_NP, part.grad_NP = self.data_NP[models], self.grad_NP[models]
        return part

    def cut(self, flat_NP: Tensor, name: str) -> Tensor:
        """Return [N, *shape] of a canonical name out of any tensor with the arena's columns.

        Args:
            flat_NP: [N, P], or its first columns as far as that name's.
            name: The canonical name.
        """
        place = self.slices[name]
        columns = flat_NP[:, place.offset : place.offset + place.size]
        return columns.view(self.num_models, *place.shape)

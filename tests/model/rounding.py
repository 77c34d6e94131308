"""How far a kernel may be from its plain twin in float64, and random inputs for both."""

import torch
from torch import Tensor

EPS32 = torch.finfo(torch.float32).eps
UNIT = 2**-7
"""Largest distance of two neighbours in bfloat16, relative to either. A GPU rounds to the nearest,
half as far; triton's interpreter cuts digits off, which is up to a whole unit."""


def draw(*shape: int, seed: int, device: torch.device, dtype=torch.float32) -> Tensor:
    """Return normal numbers, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device, dtype)


def doubles(*tensors: Tensor) -> list[Tensor]:
    """Return leaf copies in float64."""
    return [tensor.detach().double().requires_grad_() for tensor in tensors]


def assert_near(found: Tensor, exact: Tensor, *, roundings: int, sizes: Tensor) -> None:
    """Hold every element to the rounding of its own sum, and to that of its type.

    Args:
        found: float32 or bfloat16.
        exact: The same in float64.
        roundings: In float32, one after another, that an element has behind it.
        sizes: What each of them is relative to: for a sum, the sum of the sizes of its terms.
    """
    assert found.shape == exact.shape
    allowed = roundings * EPS32 * sizes.abs()
    if found.dtype == torch.bfloat16:
        allowed = allowed + UNIT * (exact.abs() + allowed)
    excess = (found.double() - exact).abs() - allowed
    assert not (excess > 0).any(), f"beyond what rounding explains by {excess.max()}"
    assert torch.isfinite(found).all()

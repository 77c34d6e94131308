"""Rotary position angles, in the half-rotation layout that Hugging Face weights expect.

Shapes: B rows, T tokens, H heads (query and key), C channels of one head, R = C / 2 rotated pairs.
Channel r is rotated with channel r + R by the angle position * frequency[r].

Source: Su et al., "RoFormer", arXiv 2104.09864, section 3.2.2.
"""

import math

import torch
from torch import Tensor

from atoll.config.model import Llama3RopeScaling, ModelConfig


def frequencies(config: ModelConfig) -> Tensor:
    """Return the angle per position of each pair, float32 [R], on the CPU, scaling included."""
    width = head_width(config)
    exponents_R = torch.arange(0, width, 2, dtype=torch.float32) / width
    plain_R = 1.0 / (config.rope_theta**exponents_R)
    match config.rope_scaling:
        case None:
            return plain_R
        case Llama3RopeScaling() as scaling:
            return _llama3(plain_R, scaling)
        case linear:
            return plain_R / linear.factor


def head_width(config: ModelConfig) -> int:
    """Return C, the channels of one head."""
    return config.head_width or config.width // config.heads


def tables(positions: Tensor, frequencies_R: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosine and sine, float32 [*positions.shape, R], of integer positions."""
    angles = positions.to(torch.float32).unsqueeze(-1) * frequencies_R
    return angles.cos(), angles.sin()


def rotate(x_BTHC: Tensor, cos_BTR: Tensor, sin_BTR: Tensor) -> Tensor:
    """Rotate every head by its position's angles; the tables may lack the row axis.

    The result has the dtype of `x_BTHC`; the arithmetic has the wider one of both.
    """
    cos, sin = cos_BTR.unsqueeze(-2), sin_BTR.unsqueeze(-2)
    low, high = x_BTHC.chunk(2, dim=-1)
    turned = torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)
    return turned.to(x_BTHC.dtype)


def _llama3(plain_R: Tensor, scaling: Llama3RopeScaling) -> Tensor:
    """Divide low frequencies by the factor, keep high ones, and blend between.

    Source: Llama 3.1 reference code, `apply_scaling`; Hugging Face `rope_type: llama3`.
    """
    context = scaling.original_context_length
    wavelengths_R = 2 * math.pi / plain_R
    share_R = (context / wavelengths_R - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blended_R = (1 - share_R) * plain_R / scaling.factor + share_R * plain_R
    is_low_R = wavelengths_R > context / scaling.low_freq_factor
    is_high_R = wavelengths_R < context / scaling.high_freq_factor
    kept_R = torch.where(is_high_R, plain_R, blended_R)
    return torch.where(is_low_R, plain_R / scaling.factor, kept_R)

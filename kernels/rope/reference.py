"""Rotary position embedding on adjacent pairs, with YaRN frequencies; the model page's section 4."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling:
    """YaRN stretches the slow frequencies by ``factor`` and leaves the fast ones, with a ramp between."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int


def rope_frequencies(dim: int, theta: float, yarn: YarnScaling | None) -> Tensor:
    """Angular frequencies in fp32, [dim / 2].

    ``theta^(-2i/dim)``; with YaRN, index i is ramped from "kept" at ``low`` to "divided by factor"
    at ``high``, where ``d(n) = dim ln(original / (2 pi n)) / (2 ln theta)``, ``low = max(floor
    d(beta_fast), 0)`` and ``high = min(ceil d(beta_slow), dim - 1)``.
    """
    frequencies = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if yarn is None:
        return frequencies

    def dimension_of(num_rotations: float) -> float:
        ratio = yarn.original_max_position_embeddings / (num_rotations * 2 * math.pi)
        return dim * math.log(ratio) / (2 * math.log(theta))

    low = max(math.floor(dimension_of(yarn.beta_fast)), 0)
    high = min(math.ceil(dimension_of(yarn.beta_slow)), dim - 1)
    # A ramp of no width would divide by zero; the published formula widens it by a hair.
    width = high - low if high != low else 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return frequencies * (1 - ramp) + frequencies / yarn.factor * ramp


def rope_tables(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of fp32 angles, each [num_rows, dim / 2] in fp32.

    The angle is rounded to fp32 as the release computes it; its cosine is then taken in fp64, so
    that devices agree.
    """
    angles = (positions.to(torch.float32)[:, None] * frequencies[None, :]).double()
    return torch.cos(angles).float(), torch.sin(angles).float()


def apply_rope_reference(x: Tensor, cos: Tensor, sin: Tensor, *, inverse: bool = False) -> Tensor:
    """Rotate the last ``2 * cos.shape[1]`` channels of each row.

    Args:
        x: [num_rows, dim] or [num_rows, num_heads, dim], float32 or bfloat16.
        cos, sin: [num_rows, rope_dim / 2], fp32.
        inverse: rotate by the negative angle.

    Returns:
        A new tensor like ``x``; pairs (2i, 2i+1) of the slice are complex numbers times ``e^{ia}``.
    """
    half = cos.shape[1]
    if x.shape[-1] < 2 * half or x.shape[0] != cos.shape[0]:
        raise ValueError(f"x {tuple(x.shape)} cannot be rotated by tables {tuple(cos.shape)}")
    if x.dim() == 3:
        cos, sin = cos[:, None], sin[:, None]
    if inverse:
        sin = -sin
    pairs = x[..., x.shape[-1] - 2 * half :].float().unflatten(-1, (half, 2))
    even, odd = pairs[..., 0], pairs[..., 1]
    rotated = torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)
    return torch.cat([x[..., : x.shape[-1] - 2 * half], rotated.to(x.dtype)], dim=-1)


def rotate_queries_reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``apply_rope_reference`` of [num_rows, num_heads, head_dim], in place."""
    return x.copy_(apply_rope_reference(x, cos, sin))

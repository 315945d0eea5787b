"""How routed experts are held: plain tensors, the release's mxfp4 as published, or that prepared for Hopper.

Owns the types and what they mean in numbers. It knows neither products nor devices.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Mxfp4Weight(NamedTuple):
    """Weights of all experts [E, O, I] as stored in a checkpoint."""

    values: Tensor  # [E, O, I / 2] uint8, the even column in the low nibble
    scales: Tensor  # [E, O, I / 32] uint8, e8m0


class PreparedMxfp4(NamedTuple):
    """``Mxfp4Weight`` of one kind of product, from ``prepare_experts``."""

    values: Tensor  # [E, O / 128, I / 128, 2, 32, 128] uint8
    scales: Tensor  # [E, O / 128, I / 128, 2, 8, 8] int32: the e8m0 bytes of a row's four groups
    bases: Tensor  # [E, O / 128, 2, 2, 32] uint8: the exponent byte that a row's are counted from
    is_wide: Tensor  # [E, O / 128] uint8: a row's exponents do not fit into e4m3
    has_wide: bool
    is_gated: bool


ExpertWeight = Tensor | Mxfp4Weight | PreparedMxfp4
"""[E, O, I] in the dtype of the rows, or one of its mxfp4 forms."""


def weight_shape(weight: ExpertWeight) -> tuple[int, int, int]:
    """(experts, outputs, inputs)."""
    if isinstance(weight, Tensor):
        experts, outputs, inputs = weight.shape
        return experts, outputs, inputs
    if isinstance(weight, PreparedMxfp4):
        experts, tiles, blocks = weight.values.shape[:3]
        return experts, 128 * tiles, 128 * blocks
    experts, outputs, half = weight.values.shape
    return experts, outputs, 2 * half

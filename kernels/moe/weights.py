"""How routed experts are held: plain tensors, or the release's mxfp4 as published.

Owns the types and what they mean in numbers. It knows neither products nor devices.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.number_formats import dequantise_mxfp4_weight


class Mxfp4Weight(NamedTuple):
    """Weights of all experts [E, O, I] as stored in a checkpoint."""

    values: Tensor  # [E, O, I / 2] uint8, the even column in the low nibble
    scales: Tensor  # [E, O, I / 32] uint8, e8m0


ExpertWeight = Tensor | Mxfp4Weight
"""[E, O, I] in the dtype of the rows, or its mxfp4 form."""


def weight_shape(weight: ExpertWeight) -> tuple[int, int, int]:
    """(experts, outputs, inputs)."""
    if isinstance(weight, Tensor):
        experts, outputs, inputs = weight.shape
        return experts, outputs, inputs
    experts, outputs, half = weight.values.shape
    return experts, outputs, 2 * half


def expert_matrix(weight: ExpertWeight, expert: int, dtype: torch.dtype) -> Tensor:
    """[O, I] of one expert. Exact in bfloat16 too: e2m1 times a power of two."""
    if isinstance(weight, Tensor):
        return weight[expert]
    return dequantise_mxfp4_weight(weight.values[expert], weight.scales[expert]).to(dtype)

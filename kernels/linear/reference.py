"""``x @ weight^T`` that gives a row the same bits in any batch.

A library picks its matrix kernel by the number of rows, so every product here is cut into
zero-padded tiles of one fixed number of rows: the library always sees one shape per weight.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.number_formats import QuantisedRows, dequantise_activations, dequantise_fp8_weight

CPU_ROW_TILE = 32
CUDA_ROW_TILE = 128


class Fp8Weight(NamedTuple):
    """A weight as the release stores it: ``values * 2^(scales - 127)``, a scale for each 32 x 32 tile.

    ``is_even``: the four tiles of each 128 inputs are known to share their scale, which is faster; see
    ``align_scales``. It changes no bit of a product.
    """

    values: Tensor  # [out_features, in_features] float8_e4m3fn
    scales: Tensor  # [ceil(out_features / 32), ceil(in_features / 32)] uint8 e8m0
    is_even: bool = False

    def widened(self) -> Tensor:
        """[out_features, in_features] fp32, exact."""
        return dequantise_fp8_weight(self.values, self.scales)


def linear_reference(x: Tensor, weight: Tensor) -> Tensor:
    """Row-invariant linear layer without bias.

    Args:
        x: [num_rows, in_features], float32 or bfloat16, rows contiguous in the last axis.
        weight: [out_features, in_features], dtype and device of ``x``.

    Returns:
        [num_rows, out_features], dtype of ``x``; accumulated in fp32 by the library.

    Raises:
        ValueError: shapes or dtypes do not match.
    """
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(f"x {tuple(x.shape)} and weight {tuple(weight.shape)}: in_features differ")
    if x.dtype != weight.dtype:
        raise ValueError(f"x is {x.dtype} but weight is {weight.dtype}")
    tile = CPU_ROW_TILE if x.device.type == "cpu" else CUDA_ROW_TILE
    num_rows = x.shape[0]
    transposed = weight.t()
    whole = num_rows - num_rows % tile
    if whole == 0:
        return torch.mm(F.pad(x, (0, 0, 0, tile - num_rows)), transposed)[:num_rows]
    out = x.new_empty(num_rows, weight.shape[0])
    for start in range(0, whole, tile):
        torch.mm(x[start : start + tile], transposed, out=out[start : start + tile])
    if whole < num_rows:
        padded = F.pad(x[whole:], (0, 0, 0, tile - num_rows + whole))
        out[whole:] = torch.mm(padded, transposed)[: num_rows - whole]
    return out


def fp8_linear_reference(x: QuantisedRows | Tensor, weight: Fp8Weight, *, dtype: torch.dtype) -> Tensor:
    """``linear_reference`` of an fp8 weight.

    Args:
        x: [num_rows, in_features], as quantised, or float32 or bfloat16.
        weight: [out_features, in_features].
        dtype: of the product's operands and of the output.

    Returns:
        [num_rows, out_features] in ``dtype``.
    """
    wide = dequantise_activations(x, dtype) if isinstance(x, QuantisedRows) else x.to(dtype)
    return linear_reference(wide, weight.widened().to(dtype))


def grouped_linear_reference(x: Tensor, weight: Fp8Weight | Tensor, *, num_groups: int) -> Tensor:
    """Each group of outputs reads its own slice of the inputs.

    Args:
        x: [num_rows, num_groups * group_in], float32 or bfloat16.
        weight: [num_groups * group_out, group_in]; a tensor has the dtype of ``x``.

    Returns:
        [num_rows, num_groups * group_out], dtype of ``x``.
    """
    wide = weight.widened().to(x.dtype) if isinstance(weight, Fp8Weight) else weight
    pairs = zip(x.chunk(num_groups, dim=1), wide.chunk(num_groups), strict=True)
    return torch.cat([linear_reference(inputs, part) for inputs, part in pairs], dim=1)


def fp32_linear_reference(x: Tensor, weight: Tensor) -> Tensor:
    """[num_rows, in], [out, in], each float32 or bfloat16 -> fp32 [num_rows, out]."""
    return linear_reference(x.float(), weight.float())

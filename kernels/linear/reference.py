"""``x @ weight^T`` that gives a row the same bits in any batch.

A library picks its matrix kernel by the number of rows, so every product here is cut into
zero-padded tiles of one fixed number of rows: the library always sees one shape per weight.
"""

from __future__ import annotations

import torch
from torch import Tensor

CPU_ROW_TILE = 32
CUDA_ROW_TILE = 128


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
    out = x.new_empty(num_rows, weight.shape[0])
    whole = num_rows - num_rows % tile
    for start in range(0, whole, tile):
        torch.mm(x[start : start + tile], transposed, out=out[start : start + tile])
    if whole < num_rows:
        padded = x.new_zeros(tile, x.shape[1])
        padded[: num_rows - whole] = x[whole:]
        out[whole:] = torch.mm(padded, transposed)[: num_rows - whole]
    return out

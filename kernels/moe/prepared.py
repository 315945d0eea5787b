"""Mxfp4 weights rearranged once at load for Hopper's kernels: the same codes and scales, another order.

A tile is 128 rows of the weight and a block 128 columns. Of each block a warpgroup's 64 rows lie together,
and in them each thread's 32 bytes. Two rows make a pair: of a gated weight a gate row and its up row, else
rows eight apart. A word holds one row's eight codes of one group of 32: columns ``4 j + i`` and
``16 + 4 j + i``, i < 4, for the j-th lane of four.

So the kernels read rows with their columns in this order: of each block, the first 16 columns of its four
groups, then the second 16 (and within 16 what ``place_rows_kernel`` says).
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.moe.weights import ExpertWeight, Mxfp4Weight, PreparedMxfp4, weight_shape
from kernels.number_formats import dequantise_mxfp4_weight

TILE = 128
DEPTH = 256
EXPONENTS = 12
"""Exponents of one row that fit into e4m3 beside a code: the row's largest and the eleven below."""


def can_prepare(shape: tuple[int, int, int], dtype: torch.dtype, capability: tuple[int, int] | None) -> bool:
    """Whether Hopper's kernels serve a weight [E, O, I] and rows of a dtype on a device.

    Args:
        capability: of the device, None for none.
    """
    is_served = dtype == torch.bfloat16 and capability is not None and capability[0] == 9
    return is_served and _has_whole_tiles(shape)


def _has_whole_tiles(shape: tuple[int, int, int]) -> bool:
    """Whole tiles of rows, whole pairs of blocks."""
    _, outputs, inputs = shape
    return outputs % TILE == 0 and inputs % DEPTH == 0


def _row_axes(rows: Tensor, is_gated: bool) -> Tensor:
    """[E, O, ...] -> [E, tiles, warpgroup 2, row of the pair 2, warp 4, lane / 4 8, ...]."""
    if is_gated:
        return rows.unflatten(1, (2, -1, 2, 4, 8)).movedim(1, 3)
    return rows.unflatten(1, (-1, 2, 4, 2, 8)).transpose(3, 4)


def _rows_again(axes: Tensor, is_gated: bool) -> Tensor:
    """The inverse of ``_row_axes``."""
    axes = axes.movedim(3, 1) if is_gated else axes.transpose(3, 4)
    return axes.flatten(1, 5)


def prepare_experts(weight: Mxfp4Weight, *, is_gated: bool) -> PreparedMxfp4:
    """Rearrange; exact, and undone by ``restore_experts``. Called once at load: it looks at the values.

    A group of nothing but zeros takes its row's smallest other exponent, which changes no number.

    Args:
        weight: [E, O, I]; any number of experts, so that they can be prepared one by one.
        is_gated: the first half of the rows are gates, the second half their ups.
    """
    experts, outputs, half = weight.values.shape
    if not _has_whole_tiles((experts, outputs, 2 * half)):
        raise ValueError(f"weight: expected whole tiles, got [{experts}, {outputs}, {2 * half}]")
    values = torch.cat([_prepare_values(v[None], is_gated) for v in weight.values])
    is_zero = ((weight.values & 0x77) == 0).unflatten(-1, (-1, 16)).all(-1)
    largest = weight.scales.masked_fill(is_zero, 0).amax(-1)
    smallest = weight.scales.masked_fill(is_zero, 255).amin(-1)
    smallest = torch.minimum(smallest, largest)
    scales = torch.where(is_zero, smallest[..., None], weight.scales)
    base = (largest.int() - (EXPONENTS - 1)).clamp_min(0).to(torch.uint8)
    is_wide = _row_axes((smallest < base).to(torch.uint8), is_gated).flatten(2).amax(-1)
    # [E, tiles, group of the warps 2, pair row, warp, lane, blocks, groups] -> words
    grouped = _row_axes(scales.unflatten(-1, (-1, 4)), is_gated).movedim(6, 2).contiguous()
    words = grouped.view(torch.int32).squeeze(-1).flatten(4, 5)
    bases = _row_axes(base, is_gated).flatten(4, 5).contiguous()
    return PreparedMxfp4(
        values, words.contiguous(), bases, is_wide.contiguous(), bool(is_wide.any()), is_gated
    )


def fastest_experts(
    w13: ExpertWeight, w2: ExpertWeight, dtype: torch.dtype
) -> tuple[ExpertWeight, ExpertWeight]:
    """Both weights of a layer prepared where Hopper's kernels serve them, else as they are."""
    if not (isinstance(w13, Mxfp4Weight) and isinstance(w2, Mxfp4Weight)):
        return w13, w2
    device = w13.values.device
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    if not all(can_prepare(weight_shape(weight), dtype, capability) for weight in (w13, w2)):
        return w13, w2
    return prepare_experts(w13, is_gated=True), prepare_experts(w2, is_gated=False)


def _prepare_values(packed: Tensor, is_gated: bool) -> Tensor:
    """[1, O, I / 2] bytes -> [1, tiles, blocks, 2, 32, 128]."""
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(-2)
    # [1, tiles, 2, pair row, warp, lane, blocks, group 4, second 2, j 4, i 4]
    codes = _row_axes(codes.unflatten(-1, (-1, 4, 2, 4, 4)), is_gated)
    codes = codes.permute(0, 1, 6, 2, 4, 5, 9, 7, 3, 8, 10)
    packed = codes[..., 0::2] | (codes[..., 1::2] << 4)
    return packed.flatten(6).flatten(4, 5).contiguous()


def restore_experts(weight: PreparedMxfp4, expert: int) -> Mxfp4Weight:
    """One expert [1, O, I] in the checkpoint's order, equal in every number."""
    packed = weight.values[expert][None].unflatten(4, (4, 8)).unflatten(6, (4, 4, 2, 2, 2))
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(-2)
    # [1, tiles, blocks, 2, warp, lane, j, group, pair row, second, i]
    codes = codes.permute(0, 1, 3, 8, 4, 5, 2, 7, 9, 6, 10)
    codes = _rows_again(codes, weight.is_gated).flatten(2)
    scales = weight.scales[expert][None].contiguous().view(torch.uint8).unflatten(-1, (8, 4))
    scales = scales.unflatten(4, (2, 4)).movedim(2, 6)
    scales = _rows_again(scales, weight.is_gated).flatten(2)
    return Mxfp4Weight(codes[..., 0::2] | (codes[..., 1::2] << 4), scales)


def expert_matrix(weight: ExpertWeight, expert: int, dtype: torch.dtype) -> Tensor:
    """[O, I] of one expert. Exact in bfloat16 too: e2m1 times a power of two."""
    if isinstance(weight, Tensor):
        return weight[expert]
    if isinstance(weight, PreparedMxfp4):
        values, scales = restore_experts(weight, expert)
        return dequantise_mxfp4_weight(values[0], scales[0]).to(dtype)
    return dequantise_mxfp4_weight(weight.values[expert], weight.scales[expert]).to(dtype)

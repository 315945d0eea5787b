"""Device code of ``x @ weight^T``: weights are the left operand, so that few rows make a narrow tile.

A product is a sum of NUM_SPLITS parts, each a chain over its own stretch of the inputs; parts are added in
order, starting with the first. One program computes all parts in turn where rows abound, one program each
where they do not: the same sums.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.number_formats.kernel import e4m3_values, e8m0_values

# Four e4m3 codes of one word -> four bfloat16 times a power of two. Moved into place, a code is its value
# times 2^-120; both products are exact.
WIDEN_E4M3 = tl.constexpr("""
{
    .reg .b32 t, u;
    prmt.b32 t, $2, 0, 0x1404;
    shr.b32 u, t, 4;
    and.b32 u, u, 0x07F007F0;
    lop3.b32 u, t, 0x80008000, u, 0xEA;
    mul.rn.bf16x2 u, u, $5;
    mul.rn.bf16x2 $0, u, $3;
    prmt.b32 t, $2, 0, 0x3424;
    shr.b32 u, t, 4;
    and.b32 u, u, 0x07F007F0;
    lop3.b32 u, t, 0x80008000, u, 0xEA;
    mul.rn.bf16x2 u, u, $6;
    mul.rn.bf16x2 $1, u, $4;
}
""")


@triton.jit
def _load_slice(ptrs, first, IN: tl.constexpr, SLICE: tl.constexpr):
    """A slice of inputs; zeros past the last one."""
    if IN % SLICE == 0:
        return tl.load(ptrs + first)
    column = tl.arange(0, SLICE)
    return tl.load(ptrs + first, mask=(first + column < IN)[None, :], other=0.0)


@triton.jit
def _part(
    x_ptrs, weight_ptrs, scale_ptrs, start, stop, acc,
    IN: tl.constexpr, UNROLL: tl.constexpr, IS_FP8_WEIGHT: tl.constexpr, IS_ROW: tl.constexpr,
    DOT_TYPE: tl.constexpr, num_stages: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    """One part of the sum: slices [start, stop), a multiple of UNROLL of them."""
    for first in tl.range(start, stop, UNROLL, num_stages=num_stages):
        for step in tl.static_range(UNROLL):
            index = first + step
            weight = _load_slice(weight_ptrs, index * SLICE, IN, SLICE)
            x = _load_slice(x_ptrs, index * SLICE, IN, SLICE)
            if IS_ROW:
                scale = e8m0_values(tl.load(scale_ptrs + index))
                acc += tl.dot(weight, tl.trans(x)) * scale[:, None]
            else:
                if IS_FP8_WEIGHT:
                    scale = e8m0_values(tl.load(scale_ptrs + index))
                    if tl.float32 == DOT_TYPE:
                        weight = e4m3_values(weight.to(tl.uint8, bitcast=True)) * scale[:, None]
                    else:
                        wide = tl.broadcast_to(scale.to(tl.bfloat16)[:, None], weight.shape)
                        unit = tl.full(weight.shape, 2.0**120, tl.bfloat16)
                        weight = tl.inline_asm_elementwise(
                            WIDEN_E4M3, "=&r,=&r,r,r,r,r,r", [weight, wide, unit], tl.bfloat16, True, 4
                        )
                acc = tl.dot(weight.to(DOT_TYPE), tl.trans(x.to(DOT_TYPE)), acc, input_precision="ieee")
    return acc


@triton.jit
def linear_kernel(
    x_ptr, row_scale_ptr, weight_ptr, scale_ptr, out_ptr, num_rows, stride_x_row, stride_out_row, stride_part,
    GROUP_OUT: tl.constexpr, IN: tl.constexpr, NUM_GROUPS: tl.constexpr, NUM_SPLITS: tl.constexpr,
    SPLIT_SLICES: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_ROWS: tl.constexpr, UNROLL: tl.constexpr,
    NUM_STAGES: tl.constexpr, IS_FP8_WEIGHT: tl.constexpr, IS_ROW: tl.constexpr, IS_PARTIAL: tl.constexpr,
    DOT_TYPE: tl.constexpr, BAND: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    """A tile of outputs for a tile of rows; IS_PARTIAL: one part of it, as fp32 into a plane of its own."""
    out_tiles: tl.constexpr = (GROUP_OUT + BLOCK_OUT - 1) // BLOCK_OUT
    # Programs that run together share weights and rows: bands of BAND output tiles, rows within.
    row_tiles = tl.cdiv(num_rows, BLOCK_ROWS)
    pid = tl.program_id(0)
    band = pid // (BAND * row_tiles)
    band_size = min(BAND, out_tiles * NUM_GROUPS - band * BAND)
    within = pid - band * BAND * row_tiles
    tile = band * BAND + within % band_size
    row_tile = within // band_size
    group, out_tile = tile // out_tiles, tile % out_tiles
    out = out_tile * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    row = row_tile.to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.arange(0, SLICE)
    # Rows and outputs past the end repeat the last one; only what is there is stored.
    source_out = (group * GROUP_OUT + tl.minimum(out, GROUP_OUT - 1)).to(tl.int64)
    source_row = tl.minimum(row, num_rows - 1)
    num_slices: tl.constexpr = (IN + SLICE - 1) // SLICE
    x_ptrs = x_ptr + source_row[:, None] * stride_x_row + group * IN + column[None, :]
    weight_ptrs = weight_ptr + source_out[:, None] * IN + column[None, :]
    scale_ptrs = source_out
    if IS_FP8_WEIGHT:
        scale_ptrs = scale_ptr + (source_out // SLICE) * num_slices
    first = 0
    if IS_PARTIAL:
        first = tl.program_id(1) * SPLIT_SLICES
        out_ptr += tl.program_id(1).to(tl.int64) * stride_part
    acc = _part(
        x_ptrs, weight_ptrs, scale_ptrs, first, min(first + SPLIT_SLICES, num_slices),
        tl.zeros([BLOCK_OUT, BLOCK_ROWS], tl.float32), IN, UNROLL, IS_FP8_WEIGHT, IS_ROW, DOT_TYPE,
        NUM_STAGES, SLICE,
    )  # fmt: skip
    if not IS_PARTIAL:
        for split in range(1, NUM_SPLITS):
            acc += _part(
                x_ptrs, weight_ptrs, scale_ptrs, split * SPLIT_SLICES,
                min((split + 1) * SPLIT_SLICES, num_slices),
                tl.zeros([BLOCK_OUT, BLOCK_ROWS], tl.float32), IN, UNROLL, IS_FP8_WEIGHT, IS_ROW, DOT_TYPE,
                NUM_STAGES, SLICE,
            )  # fmt: skip
    if IS_ROW and not IS_PARTIAL:
        acc *= e8m0_values(tl.load(row_scale_ptr + source_row))[None, :]
    out_ptrs = out_ptr + row[None, :] * stride_out_row + (group * GROUP_OUT + out)[:, None]
    is_there = (out < GROUP_OUT)[:, None] & (row < num_rows)[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=is_there)


@triton.jit
def sum_parts_kernel(
    parts_ptr, row_scale_ptr, out_ptr, stride_part, stride_out_row,
    OUT: tl.constexpr, NUM_SPLITS: tl.constexpr, BLOCK: tl.constexpr, IS_ROW: tl.constexpr,
):  # fmt: skip
    """Add the planes of parts in order."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in = column < OUT
    total = tl.load(parts_ptr + row * OUT + column, mask=is_in)
    for split in tl.static_range(1, NUM_SPLITS):
        total += tl.load(parts_ptr + split * stride_part + row * OUT + column, mask=is_in)
    if IS_ROW:
        total *= e8m0_values(tl.load(row_scale_ptr + row))
    tl.store(out_ptr + row * stride_out_row + column, total.to(out_ptr.dtype.element_ty), mask=is_in)


@triton.jit
def widen_rows_kernel(
    values_ptr, scales_ptr, out_ptr, WIDTH: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr
):
    """e4m3 rows times their scales, one for each GROUP channels; exact in bfloat16."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in = column < WIDTH
    codes = tl.load(values_ptr + row * WIDTH + column, mask=is_in, other=0)
    scale = tl.load(scales_ptr + row * (WIDTH // GROUP) + column // GROUP, mask=is_in, other=0)
    wide = e4m3_values(codes) * e8m0_values(scale)
    tl.store(out_ptr + row * WIDTH + column, wide.to(out_ptr.dtype.element_ty), mask=is_in)


@triton.jit
def widen_weight_kernel(
    values_ptr, scales_ptr, out_ptr, num_rows,
    WIDTH: tl.constexpr, NUM_SCALES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A row of tiles of an fp8 weight times their scales; exact in bfloat16."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in = (row < num_rows)[:, None] & (column < WIDTH)[None, :]
    codes = tl.load(values_ptr + row[:, None] * WIDTH + column[None, :], mask=is_in, other=0)
    scale_ptrs = scales_ptr + tl.program_id(0).to(tl.int64) * NUM_SCALES + column // ROWS
    scale = e8m0_values(tl.load(scale_ptrs, mask=column < WIDTH, other=0))
    wide = e4m3_values(codes) * scale[None, :]
    tl.store(out_ptr + row[:, None] * WIDTH + column[None, :], wide.to(out_ptr.dtype.element_ty), mask=is_in)

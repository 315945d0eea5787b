"""Device code of engram: gather table rows as stored, and gate a value into the streams."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.number_formats.kernel import e8m0_values


@triton.jit
def engram_gather_kernel(
    table_ptr, scale_ptr, rows_ptr, out_ptr,
    DIM: tl.constexpr, NUM_LOOKUPS: tl.constexpr, LOOKUPS: tl.constexpr, BLOCK: tl.constexpr,
    HAS_SCALE: tl.constexpr,
):  # fmt: skip
    """All lookups of one row: table rows and their scales are independent loads."""
    row = tl.program_id(0).to(tl.int64)
    lookup = tl.arange(0, LOOKUPS)
    channel = tl.arange(0, BLOCK)
    at = tl.load(rows_ptr + row * NUM_LOOKUPS + lookup, mask=lookup < NUM_LOOKUPS, other=0).to(tl.int64)
    is_in = (lookup < NUM_LOOKUPS)[:, None] & (channel < DIM)[None, :]
    values = tl.load(table_ptr + at[:, None] * DIM + channel[None, :], mask=is_in, other=0.0).to(tl.float32)
    if HAS_SCALE:
        group = tl.arange(0, BLOCK // 32)
        is_group = (lookup < NUM_LOOKUPS)[:, None] & (group < DIM // 32)[None, :]
        exponents = tl.load(scale_ptr + at[:, None] * (DIM // 32) + group[None, :], mask=is_group, other=127)
        grouped = tl.reshape(values, [LOOKUPS, BLOCK // 32, 32]) * e8m0_values(exponents)[:, :, None]
        values = tl.reshape(grouped, [LOOKUPS, BLOCK])
    out_ptrs = out_ptr + (row * NUM_LOOKUPS + lookup)[:, None] * DIM + channel[None, :]
    tl.store(out_ptrs, values.to(out_ptr.dtype.element_ty), mask=is_in)


@triton.jit
def engram_gate_kernel(
    x_ptr, keys_ptr, value_ptr, q_weight_ptr, k_weight_ptr, out_ptr,
    num_rows, stride_keys_row, stride_value_row, eps,
    NUM_STREAMS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One stream of a few rows, one after the other, so that the weights are read once for them."""
    stream = tl.program_id(0)
    first = tl.program_id(1).to(tl.int64) * ROWS
    column = tl.arange(0, BLOCK)
    is_in = column < WIDTH
    q_weight = tl.load(q_weight_ptr + stream * WIDTH + column, mask=is_in, other=0.0)
    weight = q_weight * tl.load(k_weight_ptr + stream * WIDTH + column, mask=is_in, other=0.0)
    for row in tl.range(first, tl.minimum(first + ROWS, num_rows)):
        at = (row * NUM_STREAMS + stream) * WIDTH + column
        x = tl.load(x_ptr + at, mask=is_in, other=0.0).to(tl.float32)
        key_ptrs = keys_ptr + row * stride_keys_row + stream * WIDTH + column
        key = tl.load(key_ptrs, mask=is_in, other=0.0).to(tl.float32)
        value = tl.load(value_ptr + row * stride_value_row + column, mask=is_in, other=0.0).to(tl.float32)
        dot = tl.sum(x * weight * key, 0)
        dot = dot * tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps) * tl.rsqrt(tl.sum(key * key, 0) / WIDTH + eps)
        dot = dot * (1.0 / tl.sqrt(WIDTH * 1.0))
        root = tl.sqrt(tl.maximum(tl.abs(dot), 1e-6))
        gate = tl.sigmoid(tl.where(dot > 0, root, tl.where(dot < 0, -root, 0.0)))
        tl.store(out_ptr + at, (x + gate * value).to(out_ptr.dtype.element_ty), mask=is_in)

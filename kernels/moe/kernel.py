"""Device code of experts at any shape: rounding of rows, grouped products, the activation, the slots' sum.

Rows are sorted by expert; a program owns one tile of rows of one expert and one tile of outputs. Products
read rows that are rounded already, in the dtype of the engine, and weights as they are stored.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.number_formats.kernel import e2m1_values, e4m3_codes, e4m3_values, e8m0_values, fp8_exponents


@triton.jit
def silu_product(gate, up, limit):
    """``silu(min(gate, limit)) * clip(up, -limit, limit)`` in fp32."""
    gate = tl.minimum(gate, limit)
    up = tl.minimum(tl.maximum(up, -limit), limit)
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def round_rows_kernel(
    x_ptr, out_ptr, stride_x_row, WIDTH: tl.constexpr, BLOCK: tl.constexpr, IS_ROW: tl.constexpr
):
    """One row: to e4m3 with a power-of-two scale for all of it or per 32 channels, and back to its dtype."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK // 32)[:, None] * 32 + tl.arange(0, 32)[None, :]
    is_in = column < WIDTH
    x = tl.load(x_ptr + row * stride_x_row + column, mask=is_in, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(x), 1)
    if IS_ROW:
        largest = tl.zeros([BLOCK // 32], tl.float32) + tl.max(largest, 0)
    scale = tl.broadcast_to(e8m0_values(fp8_exponents(largest))[:, None], [BLOCK // 32, 32])
    rounded = e4m3_values(e4m3_codes(tl.div_rn(x, scale))) * scale
    tl.store(out_ptr + row * WIDTH + column, rounded.to(out_ptr.dtype.element_ty), mask=is_in)


@triton.jit
def widen_rows_kernel(
    codes_ptr, exponents_ptr, out_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, IS_ROW: tl.constexpr
):
    """One rounded row, e4m3 bytes and exponents, to its numbers: what ``round_rows_kernel`` gives."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, BLOCK // 32)
    column = group[:, None] * 32 + tl.arange(0, 32)[None, :]
    is_in = column < WIDTH
    codes = tl.load(codes_ptr + row * WIDTH + column, mask=is_in, other=0).to(tl.int32)
    if IS_ROW:
        exponents = tl.load(exponents_ptr + row + group * 0)
    else:
        exponents = tl.load(exponents_ptr + row * (WIDTH // 32) + group, mask=group < WIDTH // 32, other=127)
    scale = tl.broadcast_to(e8m0_values(exponents)[:, None], [BLOCK // 32, 32])
    wide = e4m3_values(codes) * scale
    tl.store(out_ptr + row * WIDTH + column, wide.to(out_ptr.dtype.element_ty), mask=is_in)


@triton.jit
def place_rows_kernel(
    x_ptr, exponent_ptr, position_ptr, fp8_ptr, bf16_ptr, scale_ptr, stride_x_row,
    WIDTH: tl.constexpr, COPIES: tl.constexpr, BLOCK: tl.constexpr,
    IS_ROW: tl.constexpr, IS_ROUNDED: tl.constexpr, IS_QUANTISED: tl.constexpr,
    HAS_FP8: tl.constexpr, HAS_BF16: tl.constexpr,
):  # fmt: skip
    """One row, rounded, to the positions of its slots, columns in the order that prepared weights want.

    Rows that were rounded before come as e4m3 bytes with their exponents. A slot without an expert (position
    -1) gets nothing.

    With one scale a row the numbers go out without it, and it to ``scale`` [num_slots] fp32. On the GPU only:
    the interpreter does not round its conversion to e4m3.
    """
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, BLOCK // 32)[:, None, None]
    second = tl.arange(0, 2)[None, :, None]
    n = tl.arange(0, 16)[None, None, :]
    is_in = (group < WIDTH // 32) & (second < 2) & (n < 16)
    x_ptrs = x_ptr + row * stride_x_row + group * 32 + second * 16 + n
    if IS_QUANTISED:
        codes = tl.load(x_ptrs, mask=is_in, other=0).to(tl.float8e4nv, bitcast=True)
        of_group = tl.arange(0, BLOCK // 32)
        if IS_ROW:
            exponent = tl.load(exponent_ptr + row + of_group * 0).to(tl.int32)
        else:
            of_row = exponent_ptr + row * (WIDTH // 32)
            exponent = tl.load(of_row + of_group, mask=of_group < WIDTH // 32, other=127).to(tl.int32)
    else:
        x = tl.load(x_ptrs, mask=is_in, other=0.0).to(tl.float32)
        exponent = fp8_exponents(tl.max(tl.max(tl.abs(x), 2), 1))
        if IS_ROW:
            exponent = tl.zeros([BLOCK // 32], tl.int32) + tl.max(exponent, 0)
        if IS_ROUNDED:
            # A product with the power of two's reciprocal is exact, or so small that it rounds to zero.
            inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
            codes = (x * inverse[:, None, None]).to(tl.float8e4nv)
    if IS_ROUNDED:
        x = codes.to(tl.float32)
        if not IS_ROW:
            x = x * e8m0_values(exponent)[:, None, None]
    to_block = (group // 4) * 128 + (group % 4) * 16 + second * 64
    for copy in tl.static_range(COPIES):
        position = row * COPIES + copy
        if COPIES > 1:
            position = tl.load(position_ptr + position).to(tl.int64)
        is_placed = is_in & (position >= 0)
        if HAS_FP8:
            tl.store(fp8_ptr + position * WIDTH + to_block + n, codes, mask=is_placed)
        if HAS_BF16:
            place = 8 * (n // 2 % 2) + 2 * (n // 4) + n % 2
            tl.store(bf16_ptr + position * WIDTH + to_block + place, x.to(tl.bfloat16), mask=is_placed)
        if IS_ROW:
            tl.store(scale_ptr + position, tl.max(e8m0_values(exponent), 0), mask=position >= 0)


@triton.jit
def _load_weight(
    w_ptr, scale_ptr, row, is_row, k, DEPTH: tl.constexpr,
    OUTPUTS: tl.constexpr, BLOCK: tl.constexpr, IS_FP4: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """[OUTPUTS, BLOCK] of the weight from column k on, in the rows' dtype."""
    if IS_FP4:
        byte = k // 2 + tl.arange(0, BLOCK // 2)
        is_byte = is_row[:, None] & (byte < DEPTH // 2)[None, :]
        packed = tl.load(w_ptr + row[:, None] * (DEPTH // 2) + byte[None, :], mask=is_byte, other=0)
        packed = packed.to(tl.int32)
        values = tl.join(e2m1_values(packed & 15), e2m1_values(packed >> 4))
        group = k // 32 + tl.arange(0, BLOCK // 32)
        is_group = is_row[:, None] & (group < DEPTH // 32)[None, :]
        scale = tl.load(scale_ptr + row[:, None] * (DEPTH // 32) + group[None, :], mask=is_group, other=0)
        values = tl.reshape(values, [OUTPUTS, BLOCK // 32, 32]) * e8m0_values(scale)[:, :, None]
        return tl.reshape(values, [OUTPUTS, BLOCK]).to(DTYPE)
    else:
        column = k + tl.arange(0, BLOCK)
        is_in = is_row[:, None] & (column < DEPTH)[None, :]
        return tl.load(w_ptr + row[:, None] * DEPTH + column[None, :], mask=is_in, other=0.0)


@triton.jit(do_not_specialize=["slots_per_home"])
def expert_product_kernel(
    x_ptr, w_ptr, scale_ptr, order_ptr, tiles_ptr, weights_ptr, out_ptr, homes_ptr, slots_per_home, limit,
    DEPTH: tl.constexpr, WIDTH: tl.constexpr, TOP_K: tl.constexpr, IS_GATED: tl.constexpr,
    HAS_HOMES: tl.constexpr, IS_FP4: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One tile of an expert's rows and outputs.

    Gated: ``x`` [num_rows, DEPTH] is read by slot, the weight has 2 * WIDTH rows, and the activated hidden
    rows go to ``out`` [num_slots, WIDTH] in sorted order. Otherwise sorted rows go to ``out`` by slot or,
    with homes, to the address of the home of every ``slots_per_home`` slots.
    """
    num_columns: tl.constexpr = (WIDTH + OUTPUTS - 1) // OUTPUTS
    tile_ptr = tiles_ptr + (tl.program_id(0) // num_columns) * 3
    expert = tl.load(tile_ptr).to(tl.int64)
    if expert < 0:
        return
    position = tl.load(tile_ptr + 1) + tl.arange(0, ROWS)
    is_row = position < tl.load(tile_ptr + 2)
    slot = tl.load(order_ptr + position, mask=is_row, other=0).to(tl.int64)
    source = position.to(tl.int64)
    if IS_GATED:
        source = slot // TOP_K
    output = (tl.program_id(0) % num_columns) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_output = output < WIDTH
    weight_row = expert * (2 * WIDTH if IS_GATED else WIDTH) + output
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    z = tl.zeros([ROWS, OUTPUTS], tl.float32)
    up = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for k in tl.range(0, DEPTH, BLOCK):
        column = k + tl.arange(0, BLOCK)
        is_in = is_row[:, None] & (column < DEPTH)[None, :]
        x = tl.load(x_ptr + source[:, None] * DEPTH + column[None, :], mask=is_in, other=0.0)
        w = _load_weight(w_ptr, scale_ptr, weight_row, is_output, k, DEPTH, OUTPUTS, BLOCK, IS_FP4, dtype)
        z = tl.dot(x, tl.trans(w), acc=z, input_precision="ieee")
        if IS_GATED:
            w = _load_weight(
                w_ptr, scale_ptr, weight_row + WIDTH, is_output, k, DEPTH, OUTPUTS, BLOCK, IS_FP4, dtype
            )
            up = tl.dot(x, tl.trans(w), acc=up, input_precision="ieee")
    target = slot
    if IS_GATED:
        # As the engine's products are: rounded to its dtype before the activation.
        z = silu_product(z.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32), limit)
        z = z * tl.load(weights_ptr + slot, mask=is_row, other=0.0)[:, None]
        target = position.to(tl.int64)
    row_ptrs = out_ptr + target * WIDTH
    if HAS_HOMES:
        home = slot // slots_per_home
        address = tl.load(homes_ptr + home, mask=is_row, other=0).to(tl.pointer_type(dtype))
        row_ptrs = tl.multiple_of(address, [16]) + (slot - home * slots_per_home) * WIDTH
    out_ptrs = row_ptrs[:, None] + output[None, :]
    tl.store(out_ptrs, z.to(dtype), mask=is_row[:, None] & is_output[None, :])


@triton.jit
def swiglu_kernel(
    x_ptr, weights_ptr, out_ptr, limit, stride_x_row,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, HAS_WEIGHTS: tl.constexpr,
):  # fmt: skip
    """One block of one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in = column < WIDTH
    x_ptrs = x_ptr + row * stride_x_row + column
    gate = tl.load(x_ptrs, mask=is_in, other=0.0).to(tl.float32)
    up = tl.load(x_ptrs + WIDTH, mask=is_in, other=0.0).to(tl.float32)
    hidden = silu_product(gate, up, limit)
    if HAS_WEIGHTS:
        hidden = hidden * tl.load(weights_ptr + row)
    tl.store(out_ptr + row * WIDTH + column, hidden.to(out_ptr.dtype.element_ty), mask=is_in)


@triton.jit
def combine_experts_kernel(
    slots_ptr, shared_ptr, out_ptr, stride_shared_row, stride_out_row,
    WIDTH: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One block of one row: its slots in order, then the shared expert."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in = column < WIDTH
    slot_ptrs = slots_ptr + row * (TOP_K * WIDTH) + column
    total = tl.load(slot_ptrs, mask=is_in, other=0.0).to(tl.float32)
    for slot in tl.static_range(1, TOP_K):
        total += tl.load(slot_ptrs + slot * WIDTH, mask=is_in, other=0.0).to(tl.float32)
    total += tl.load(shared_ptr + row * stride_shared_row + column, mask=is_in, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * stride_out_row + column, total.to(out_ptr.dtype.element_ty), mask=is_in)

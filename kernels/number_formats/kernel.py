"""Device code of the small number formats: bit-exact twins of this folder's reference.

Channels come as an even and an odd half, because one byte (or pair of bytes) carries two neighbours.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def e2m1_values(codes):
    """4-bit codes (int32) -> fp32."""
    magnitude = codes & 7
    normal = (((magnitude >> 1) + 126) << 23) | ((magnitude & 1) << 22)
    value = tl.where(magnitude < 2, magnitude.to(tl.float32) * 0.5, normal.to(tl.float32, bitcast=True))
    return tl.where(codes >= 8, -value, value)


@triton.jit
def e2m1_codes(x):
    """fp32 -> 4-bit codes (int32): to nearest, ties to the even code, sign in bit 3."""
    a = tl.abs(x)
    code = (
        (a > 0.25).to(tl.int32)
        + (a >= 0.75).to(tl.int32)
        + (a > 1.25).to(tl.int32)
        + (a >= 1.75).to(tl.int32)
    )
    code += (a > 2.5).to(tl.int32) + (a >= 3.5).to(tl.int32) + (a > 5.0).to(tl.int32)
    return code | tl.where(x.to(tl.int32, bitcast=True) < 0, 8, 0)


@triton.jit
def e4m3_values(codes):
    """Bytes of e4m3 in any integer type -> fp32."""
    return codes.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def e4m3_codes(x):
    """fp32 of magnitude <= 448 -> bytes of e4m3 (int32), to nearest even.

    In integers and one fp32 addition, because Triton's interpreter does not round its own conversion.
    """
    a = tl.abs(x)
    exponent = tl.maximum(a.to(tl.int32, bitcast=True) >> 23, 121)
    # A number whose own last place is the target's last place: the sum rounds to it.
    anchor = ((exponent + 20) << 23).to(tl.float32, bitcast=True)
    rounded = (a + anchor) - anchor
    bits = rounded.to(tl.int32, bitcast=True)
    code = tl.where(bits < (121 << 23), (rounded * 512.0).to(tl.int32), (bits >> 20) - (120 << 3))
    return code | tl.where(x.to(tl.int32, bitcast=True) < 0, 128, 0)


@triton.jit
def e8m0_values(exponents):
    """Bytes -> powers of two in fp32; byte 0 is 2^-127."""
    bits = exponents.to(tl.int32) << 23
    return tl.where(exponents == 0, 0x400000, bits).to(tl.float32, bitcast=True)


@triton.jit
def ceil_power_of_two(x):
    """Biased exponent (int32) of the smallest power of two >= a positive fp32 number."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32)


@triton.jit
def fp8_exponents(largest):
    """Biased exponents (int32) of the scales of e4m3 channels with these largest magnitudes."""
    return ceil_power_of_two(tl.maximum(largest, 1e-4) * (1.0 / 448.0))


@triton.jit
def group_maxima(even, odd, ROWS: tl.constexpr, HALF: tl.constexpr, PAIRS: tl.constexpr):
    """Largest magnitude of each run of PAIRS pairs: two [ROWS, HALF] -> [ROWS, HALF / PAIRS]."""
    largest = tl.maximum(tl.abs(even), tl.abs(odd))
    return tl.max(tl.reshape(largest, [ROWS, HALF // PAIRS, PAIRS]), 2)


@triton.jit
def scale_groups(x, scales, ROWS: tl.constexpr, HALF: tl.constexpr, PAIRS: tl.constexpr):
    """Multiply each run of PAIRS channels of a half by its scale [ROWS, HALF / PAIRS]."""
    grouped = tl.reshape(x, [ROWS, HALF // PAIRS, PAIRS])
    return tl.reshape(grouped * scales[:, :, None], [ROWS, HALF])


@triton.jit
def divide_groups(x, scales, ROWS: tl.constexpr, HALF: tl.constexpr, PAIRS: tl.constexpr):
    """Divide each run of PAIRS channels of a half by its scale, correctly rounded."""
    grouped = tl.reshape(x, [ROWS, HALF // PAIRS, PAIRS])
    wide = tl.broadcast_to(scales[:, :, None], [ROWS, HALF // PAIRS, PAIRS])
    return tl.reshape(tl.div_rn(grouped, wide), [ROWS, HALF])


@triton.jit
def store_fp4_index(
    ptr, row_start, is_in, is_row, even, odd, pair, DIM: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr
):
    """Index vectors: e2m1 nibbles, the even channel low, then an e8m0 scale per 32 channels."""
    amax = tl.maximum(group_maxima(even, odd, ROWS, HALF, 16), 6.0 * 2.0**-126)
    exponent = ceil_power_of_two(amax * (1.0 / 6.0))
    # Dividing by a power of two is multiplying by its exact inverse.
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    low = e2m1_codes(scale_groups(even, inverse, ROWS, HALF, 16))
    high = e2m1_codes(scale_groups(odd, inverse, ROWS, HALF, 16))
    tl.store(ptr + row_start[:, None] + pair[None, :], (low | (high << 4)).to(tl.uint8), mask=is_in)
    group = tl.arange(0, HALF // 16)
    is_group = is_row[:, None] & (group < DIM // 32)[None, :]
    tl.store(ptr + row_start[:, None] + DIM // 2 + group[None, :], exponent.to(tl.uint8), mask=is_group)


@triton.jit
def pack_index_queries_kernel(
    x_ptr,
    out_ptr,
    num_vectors,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    HALF: tl.constexpr,
):
    """ROWS vectors a program."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_row = row < num_vectors
    channel = tl.arange(0, 2 * HALF)
    is_there = is_row[:, None] & (channel < DIM)[None, :]
    x = tl.load(x_ptr + row[:, None] * DIM + channel[None, :], mask=is_there, other=0.0).to(tl.float32)
    even, odd = tl.split(tl.reshape(x, [ROWS, HALF, 2]))
    pair = tl.arange(0, HALF)
    is_in = is_row[:, None] & (pair < DIM // 2)[None, :]
    store_fp4_index(out_ptr, row * WIDTH, is_in, is_row, even, odd, pair, DIM, ROWS, HALF)


@triton.jit
def quantise_activations_kernel(
    x_ptr,
    values_ptr,
    scales_ptr,
    stride_x_row,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    CONVERTS: tl.constexpr,
):
    """One row a program; GROUP channels share a scale. CONVERTS: the device rounds to e4m3 by itself."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * stride_x_row + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    grouped = tl.reshape(x, [BLOCK // GROUP, GROUP])
    exponents = fp8_exponents(tl.max(tl.abs(grouped), 1))
    # A product with the exact inverse is the division by a power of two, rounded once.
    inverse = e8m0_values(254 - exponents)
    scaled = tl.reshape(grouped * inverse[:, None], [BLOCK])
    if CONVERTS:
        codes = scaled.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        codes = e4m3_codes(scaled).to(tl.uint8)
    tl.store(values_ptr + row * WIDTH + column, codes, mask=column < WIDTH)
    group = tl.arange(0, BLOCK // GROUP)
    num_groups: tl.constexpr = (WIDTH + GROUP - 1) // GROUP
    tl.store(scales_ptr + row * num_groups + group, exponents.to(tl.uint8), mask=group < num_groups)

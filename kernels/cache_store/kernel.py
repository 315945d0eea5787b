"""Device code of what enters the caches: pool a group, normalise, rotate, quantise, store.

Every intermediate is rounded to the engine's dtype where separate ops would round it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.number_formats.kernel import (
    divide_groups,
    e2m1_codes,
    e4m3_codes,
    e4m3_values,
    fp8_exponents,
    group_maxima,
    scale_groups,
    store_fp4_index,
)


@triton.jit
def _load_pair(ptr, rows, is_in, pair):
    """(even, odd) fp32 halves of rows that start at ``ptr + rows``."""
    ptrs = ptr + rows[:, None] + 2 * pair[None, :]
    even = tl.load(ptrs, mask=is_in, other=0.0).to(tl.float32)
    return even, tl.load(ptrs + 1, mask=is_in, other=0.0).to(tl.float32)


@triton.jit
def _pool_pair(
    source_ptr,
    open_ptr,
    group_rows_ptr,
    row,
    is_in,
    pair,
    num_open_rows,
    DIM: tl.constexpr,
    RATIO: tl.constexpr,
):
    """Per channel, the gates' softmax over the group's tokens, applied to the keys; tokens ascending."""
    peak_even = tl.full(is_in.shape, float("-inf"), tl.float32)
    peak_odd = peak_even
    for token in tl.static_range(RATIO):
        gate_even, gate_odd = _load_token(
            source_ptr, open_ptr, group_rows_ptr, row, is_in, pair, num_open_rows, token, 1, DIM, RATIO
        )
        peak_even = tl.maximum(peak_even, gate_even)
        peak_odd = tl.maximum(peak_odd, gate_odd)
    total_even = tl.zeros(is_in.shape, tl.float32)
    total_odd = total_even
    even = total_even
    odd = total_even
    for token in tl.static_range(RATIO):
        key_even, key_odd = _load_token(
            source_ptr, open_ptr, group_rows_ptr, row, is_in, pair, num_open_rows, token, 0, DIM, RATIO
        )
        gate_even, gate_odd = _load_token(
            source_ptr, open_ptr, group_rows_ptr, row, is_in, pair, num_open_rows, token, 1, DIM, RATIO
        )
        weight_even = tl.exp(gate_even - peak_even)
        weight_odd = tl.exp(gate_odd - peak_odd)
        total_even += weight_even
        total_odd += weight_odd
        even += weight_even * key_even
        odd += weight_odd * key_odd
    return even / total_even, odd / total_odd


@triton.jit
def _load_token(
    source_ptr, open_ptr, group_rows_ptr, row, is_in, pair, num_open_rows, token, part,
    DIM: tl.constexpr, RATIO: tl.constexpr,
):  # fmt: skip
    """Keys (part 0) or gates (part 1) of one token of each group, from the open groups or the step's rows."""
    at = tl.load(group_rows_ptr + row * RATIO + token).to(tl.int64)
    is_open = at < num_open_rows
    ptr = (
        tl.where(is_open, open_ptr + at * (2 * DIM), source_ptr + (at - num_open_rows) * (2 * DIM))
        + part * DIM
    )
    ptrs = ptr[:, None] + 2 * pair[None, :]
    return tl.load(ptrs, mask=is_in, other=0.0), tl.load(ptrs + 1, mask=is_in, other=0.0)


@triton.jit
def _store_window(
    ptr, row_start, is_in, is_row, even, odd, pair, DIM: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr
):
    """e4m3 values, then an e8m0 scale per 32 channels."""
    exponent = fp8_exponents(group_maxima(even, odd, ROWS, HALF, 16))
    # Dividing by a power of two is multiplying by its exact inverse.
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    low = e4m3_codes(scale_groups(even, inverse, ROWS, HALF, 16))
    high = e4m3_codes(scale_groups(odd, inverse, ROWS, HALF, 16))
    if DIM % 64 == 0:
        pairs_ptr = (ptr + row_start).to(tl.pointer_type(tl.uint16))
        tl.store(pairs_ptr[:, None] + pair[None, :], (low | (high << 8)).to(tl.uint16), mask=is_in)
    else:
        # Rows of an odd number of bytes: a pair may lie across a 2-byte boundary.
        bytes_ptr = ptr + row_start[:, None] + 2 * pair[None, :]
        tl.store(bytes_ptr, low.to(tl.uint8), mask=is_in)
        tl.store(bytes_ptr + 1, high.to(tl.uint8), mask=is_in)
    group = tl.arange(0, HALF // 16)
    is_group = is_row[:, None] & (group < DIM // 32)[None, :]
    tl.store(ptr + row_start[:, None] + DIM + group[None, :], exponent.to(tl.uint8), mask=is_group)


@triton.jit
def _store_entry(
    ptr, row_start, is_in, is_row, even, odd, pair, DIM: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr
):
    """e2m1 nibbles, the even channel low, then an e4m3 scale per 16 channels."""
    amax = tl.maximum(group_maxima(even, odd, ROWS, HALF, 8), 6.0 * 2.0**-9)
    scale_code = e4m3_codes(tl.minimum(tl.div_rn(amax, tl.full(amax.shape, 6.0, tl.float32)), 448.0))
    scale = e4m3_values(scale_code)
    low = e2m1_codes(divide_groups(even, scale, ROWS, HALF, 8))
    high = e2m1_codes(divide_groups(odd, scale, ROWS, HALF, 8))
    tl.store(ptr + row_start[:, None] + pair[None, :], (low | (high << 4)).to(tl.uint8), mask=is_in)
    group = tl.arange(0, HALF // 8)
    is_group = is_row[:, None] & (group < DIM // 16)[None, :]
    tl.store(ptr + row_start[:, None] + DIM // 2 + group[None, :], scale_code.to(tl.uint8), mask=is_group)


@triton.jit
def _store_rows(
    ptr, row_start, is_in, is_row, even, odd, pair, FORMAT: tl.constexpr,
    DIM: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    if FORMAT == "window":
        _store_window(ptr, row_start, is_in, is_row, even, odd, pair, DIM, ROWS, HALF)
    elif FORMAT == "entry":
        _store_entry(ptr, row_start, is_in, is_row, even, odd, pair, DIM, ROWS, HALF)
    elif FORMAT == "index":
        store_fp4_index(ptr, row_start, is_in, is_row, even, odd, pair, DIM, ROWS, HALF)
    else:
        ptrs = ptr + row_start[:, None] + 2 * pair[None, :]
        tl.store(ptrs, even.to(ptr.dtype.element_ty), mask=is_in)
        tl.store(ptrs + 1, odd.to(ptr.dtype.element_ty), mask=is_in)


@triton.jit
def cache_store_kernel(
    source_ptr, open_ptr, group_rows_ptr, weight_ptr, cos_ptr, sin_ptr, slots_ptr,
    pool_ptr, packed_ptr, normed_ptr,
    num_rows, num_open_rows, stride_source_row, eps,
    DIM: tl.constexpr, ROPE_HALF: tl.constexpr, WIDTH: tl.constexpr, RATIO: tl.constexpr,
    FORMAT: tl.constexpr, HAS_POOL: tl.constexpr, HAS_PACKED: tl.constexpr, HAS_NORMED: tl.constexpr,
    ROWS: tl.constexpr, HALF: tl.constexpr, IS_BF16: tl.constexpr,
):  # fmt: skip
    """RATIO 0 gathers nothing, 1 takes one source row a group, more pool keys by their gates."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_row = row < num_rows
    safe_row = tl.where(is_row, row, 0)
    pair = tl.arange(0, HALF)
    is_channel = pair < DIM // 2
    is_in = is_row[:, None] & is_channel[None, :]
    dtype = tl.bfloat16 if IS_BF16 else tl.float32
    if RATIO == 0:
        even, odd = _load_pair(source_ptr, safe_row * stride_source_row, is_in, pair)
    elif RATIO == 1:
        at = tl.load(group_rows_ptr + safe_row).to(tl.int64)
        even, odd = _load_pair(source_ptr, at * stride_source_row, is_in, pair)
    else:
        even, odd = _pool_pair(
            source_ptr, open_ptr, group_rows_ptr, safe_row, is_in, pair, num_open_rows, DIM, RATIO
        )
        even = tl.where(is_in, even, 0.0).to(dtype).to(tl.float32)
        odd = tl.where(is_in, odd, 0.0).to(dtype).to(tl.float32)

    inverse_rms = tl.rsqrt(tl.sum(even * even + odd * odd, 1) / DIM + eps)[:, None]
    weight_even = tl.load(weight_ptr + 2 * pair, mask=is_channel, other=0.0)[None, :]
    weight_odd = tl.load(weight_ptr + 2 * pair + 1, mask=is_channel, other=0.0)[None, :]
    even = (even * inverse_rms * weight_even).to(dtype).to(tl.float32)
    odd = (odd * inverse_rms * weight_odd).to(dtype).to(tl.float32)
    if HAS_NORMED:
        normed_ptrs = normed_ptr + safe_row[:, None] * DIM + 2 * pair[None, :]
        tl.store(normed_ptrs, even.to(dtype), mask=is_in)
        tl.store(normed_ptrs + 1, odd.to(dtype), mask=is_in)

    angle = pair - (DIM // 2 - ROPE_HALF)
    is_rotated = is_row[:, None] & ((angle >= 0) & (angle < ROPE_HALF))[None, :]
    at_angle = safe_row[:, None] * ROPE_HALF + angle[None, :]
    cos = tl.load(cos_ptr + at_angle, mask=is_rotated, other=1.0)
    sin = tl.load(sin_ptr + at_angle, mask=is_rotated, other=0.0)
    turned_even = (even * cos - odd * sin).to(dtype).to(tl.float32)
    turned_odd = (even * sin + odd * cos).to(dtype).to(tl.float32)

    if HAS_PACKED:
        _store_rows(
            packed_ptr,
            safe_row * WIDTH,
            is_in,
            is_row,
            turned_even,
            turned_odd,
            pair,
            FORMAT,
            DIM,
            ROWS,
            HALF,
        )
    if HAS_POOL:
        slot = tl.load(slots_ptr + safe_row).to(tl.int64)
        is_kept = is_row & (slot >= 0)
        _store_rows(
            pool_ptr, slot * WIDTH, is_kept[:, None] & is_channel[None, :], is_kept,
            turned_even, turned_odd, pair, FORMAT, DIM, ROWS, HALF,
        )  # fmt: skip


@triton.jit
def copy_rows_kernel(
    source_ptr, target_ptr, sources_ptr, targets_ptr,
    NUM_WORDS: tl.constexpr, SPAN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A span of one row a program, as words of whatever size divides a row; none for a target below 0."""
    n = tl.program_id(0)
    source = tl.load(sources_ptr + n).to(tl.int64)
    target = tl.load(targets_ptr + n).to(tl.int64)
    num_copied = tl.where(target >= 0, NUM_WORDS, 0)
    for start in tl.range(0, SPAN, BLOCK):
        word = tl.program_id(1) * SPAN + start + tl.arange(0, BLOCK)
        words = tl.load(source_ptr + source * NUM_WORDS + word, mask=word < num_copied, other=0)
        tl.store(target_ptr + target * NUM_WORDS + word, words, mask=word < num_copied)

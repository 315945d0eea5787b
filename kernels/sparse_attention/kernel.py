"""Device code of attention over window rows and selected entries. One program owns one query's heads.

Channels are held as an even and an odd half: a packed byte (or pair of bytes) carries two neighbours, a
product does not care for the order of channels, and rotation pairs neighbours.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.number_formats.kernel import e2m1_values, e4m3_values, e8m0_values, scale_groups

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _load_window_keys(
    rows_ptr,
    is_valid,
    HEAD_DIM: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    IS_PACKED: tl.constexpr,
):
    """Rows of e4m3 values and e8m0 scales (or of plain floats) -> (even, odd) fp32 halves."""
    pair = tl.arange(0, BLOCK_HALF)
    is_in = is_valid[:, None] & (pair < HEAD_DIM // 2)[None, :]
    if IS_PACKED:
        if HEAD_DIM % 64 == 0:
            pairs_ptr = rows_ptr.to(tl.pointer_type(tl.uint16))
            packed = tl.load(pairs_ptr[:, None] + pair[None, :], mask=is_in, other=0).to(tl.int32)
        else:
            # Rows of an odd number of bytes: a pair may lie across a 2-byte boundary.
            low = tl.load(rows_ptr[:, None] + 2 * pair[None, :], mask=is_in, other=0).to(tl.int32)
            high = tl.load(rows_ptr[:, None] + 2 * pair[None, :] + 1, mask=is_in, other=0).to(tl.int32)
            packed = low | (high << 8)
        group = tl.arange(0, BLOCK_HALF // 16)
        is_group = is_valid[:, None] & (group < HEAD_DIM // 32)[None, :]
        scales = e8m0_values(tl.load(rows_ptr[:, None] + HEAD_DIM + group[None, :], mask=is_group, other=127))
        even = scale_groups(e4m3_values(packed & 0xFF), scales, BLOCK_KEYS, BLOCK_HALF, 16)
        odd = scale_groups(e4m3_values(packed >> 8), scales, BLOCK_KEYS, BLOCK_HALF, 16)
    else:
        even = tl.load(rows_ptr[:, None] + 2 * pair[None, :], mask=is_in, other=0.0).to(tl.float32)
        odd = tl.load(rows_ptr[:, None] + 2 * pair[None, :] + 1, mask=is_in, other=0.0).to(tl.float32)
    return even, odd


@triton.jit
def _load_entries(
    rows_ptr,
    is_valid,
    HEAD_DIM: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    IS_PACKED: tl.constexpr,
):
    """Rows of e2m1 values and e4m3 scales (or of plain floats) -> (even, odd) fp32 halves."""
    pair = tl.arange(0, BLOCK_HALF)
    is_in = is_valid[:, None] & (pair < HEAD_DIM // 2)[None, :]
    if IS_PACKED:
        packed = tl.load(rows_ptr[:, None] + pair[None, :], mask=is_in, other=0).to(tl.int32)
        group = tl.arange(0, BLOCK_HALF // 8)
        is_group = is_valid[:, None] & (group < HEAD_DIM // 16)[None, :]
        scales = e4m3_values(
            tl.load(rows_ptr[:, None] + HEAD_DIM // 2 + group[None, :], mask=is_group, other=0)
        )
        even = scale_groups(e2m1_values(packed & 15), scales, BLOCK_KEYS, BLOCK_HALF, 8)
        odd = scale_groups(e2m1_values(packed >> 4), scales, BLOCK_KEYS, BLOCK_HALF, 8)
    else:
        even = tl.load(rows_ptr[:, None] + 2 * pair[None, :], mask=is_in, other=0.0).to(tl.float32)
        odd = tl.load(rows_ptr[:, None] + 2 * pair[None, :] + 1, mask=is_in, other=0.0).to(tl.float32)
    return even, odd


@triton.jit
def _fold_keys(
    q_even, q_odd, even, odd, is_valid, scale_log2, peak, total, acc_even, acc_odd, PRECISION: tl.constexpr
):
    """One tile of keys into the running softmax. A tile without a valid key changes no bit."""
    even = even.to(q_even.dtype)
    odd = odd.to(q_even.dtype)
    scores = tl.dot(q_even, tl.trans(even), input_precision=PRECISION)
    scores = tl.dot(q_odd, tl.trans(odd), acc=scores, input_precision=PRECISION)
    scores = tl.where(is_valid[None, :], scores * scale_log2, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    shrink = tl.exp2(peak - new_peak)
    weights = tl.exp2(scores - new_peak[:, None])
    total = total * shrink + tl.sum(weights, 1)
    weights = weights.to(q_even.dtype)
    acc_even = tl.dot(weights, even, acc=acc_even * shrink[:, None], input_precision=PRECISION)
    acc_odd = tl.dot(weights, odd, acc=acc_odd * shrink[:, None], input_precision=PRECISION)
    return new_peak, total, acc_even, acc_odd


@triton.jit
def paged_sparse_attention_kernel(
    q_ptr, ring_ptr, chunk_ptr, window_rows_ptr, entries_ptr, slots_ptr, sink_ptr, cos_ptr, sin_ptr, out_ptr,
    num_ring_rows, scale_log2,
    stride_q_row, stride_out_row,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROPE_HALF: tl.constexpr,
    WINDOW: tl.constexpr, NUM_SELECTED: tl.constexpr, WINDOW_WIDTH: tl.constexpr, ENTRY_WIDTH: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_KEYS: tl.constexpr,
    BLOCK_SELECTED: tl.constexpr, IS_PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Window rows ascending, then selected entries, in tiles of BLOCK_KEYS; then rotate back."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    pair = tl.arange(0, BLOCK_HALF)
    is_in = (head < NUM_HEADS)[:, None] & (pair < HEAD_DIM // 2)[None, :]
    channels = head[:, None] * HEAD_DIM + 2 * pair[None, :]
    q_ptrs = q_ptr + row * stride_q_row + channels
    q_even = tl.load(q_ptrs, mask=is_in, other=0.0)
    q_odd = tl.load(q_ptrs + 1, mask=is_in, other=0.0)
    peak = tl.load(sink_ptr + head, mask=head < NUM_HEADS, other=0.0) * LOG2_E
    total = tl.full([BLOCK_HEADS], 1.0, tl.float32)
    acc_even = tl.zeros([BLOCK_HEADS, BLOCK_HALF], tl.float32)
    acc_odd = tl.zeros([BLOCK_HEADS, BLOCK_HALF], tl.float32)

    for start in tl.range(0, WINDOW, BLOCK_KEYS):
        place = start + tl.arange(0, BLOCK_KEYS)
        key = tl.load(window_rows_ptr + row * WINDOW + place, mask=place < WINDOW, other=-1).to(tl.int64)
        in_ring = key < num_ring_rows
        rows_ptr = tl.where(
            in_ring, ring_ptr + key * WINDOW_WIDTH, chunk_ptr + (key - num_ring_rows) * WINDOW_WIDTH
        )
        even, odd = _load_window_keys(rows_ptr, key >= 0, HEAD_DIM, BLOCK_KEYS, BLOCK_HALF, IS_PACKED)
        peak, total, acc_even, acc_odd = _fold_keys(
            q_even, q_odd, even, odd, key >= 0, scale_log2, peak, total, acc_even, acc_odd, PRECISION
        )
    if NUM_SELECTED > 0:
        every = tl.arange(0, BLOCK_SELECTED)
        slots = tl.load(slots_ptr + row * NUM_SELECTED + every, mask=every < NUM_SELECTED, other=-1)
        # Tiles behind the last valid slot are left out: they would change no bit.
        end = tl.max(tl.where(slots >= 0, every + 1, 0), 0)
        for start in tl.range(0, end, BLOCK_KEYS):
            place = start + tl.arange(0, BLOCK_KEYS)
            slot = tl.load(slots_ptr + row * NUM_SELECTED + place, mask=place < NUM_SELECTED, other=-1).to(
                tl.int64
            )
            rows_ptr = entries_ptr + slot * ENTRY_WIDTH
            even, odd = _load_entries(rows_ptr, slot >= 0, HEAD_DIM, BLOCK_KEYS, BLOCK_HALF, IS_PACKED)
            peak, total, acc_even, acc_odd = _fold_keys(
                q_even, q_odd, even, odd, slot >= 0, scale_log2, peak, total, acc_even, acc_odd, PRECISION
            )

    acc_even = acc_even / total[:, None]
    acc_odd = acc_odd / total[:, None]
    angle = pair - (HEAD_DIM // 2 - ROPE_HALF)
    is_rotated = (angle >= 0) & (angle < ROPE_HALF)
    cos = tl.load(cos_ptr + row * ROPE_HALF + angle, mask=is_rotated, other=1.0)[None, :]
    sin = tl.load(sin_ptr + row * ROPE_HALF + angle, mask=is_rotated, other=0.0)[None, :]
    out_ptrs = out_ptr + row * stride_out_row + channels
    tl.store(out_ptrs, (acc_even * cos + acc_odd * sin).to(out_ptr.dtype.element_ty), mask=is_in)
    tl.store(out_ptrs + 1, (acc_odd * cos - acc_even * sin).to(out_ptr.dtype.element_ty), mask=is_in)


@triton.jit
def selection_slots_kernel(
    entries_ptr, chunks_ptr, tables_ptr, out_ptr, num_selected, num_blocks, stride_table,
    ENTRIES_PER_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Entry numbers of one row -> pool slots through its sequence's block table; -1 stays -1."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.load(chunks_ptr + row).to(tl.int64)
    for start in tl.range(0, num_selected, BLOCK):
        place = start + tl.arange(0, BLOCK)
        entry = tl.load(entries_ptr + row * num_selected + place, mask=place < num_selected, other=-1).to(
            tl.int64
        )
        block = entry // ENTRIES_PER_BLOCK
        is_known = (entry >= 0) & (block < num_blocks)
        found = tl.load(tables_ptr + chunk * stride_table + block, mask=is_known, other=0).to(tl.int64)
        slot = tl.where(is_known, found * ENTRIES_PER_BLOCK + entry % ENTRIES_PER_BLOCK, -1)
        tl.store(out_ptr + row * num_selected + place, slot.to(tl.int32), mask=place < num_selected)

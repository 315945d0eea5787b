"""Device code of attention at the release's shape on Hopper: 64 heads of 512, packed caches.

A program takes queries in turn, one at a time. Four producer warps gather packed rows and widen them to
bfloat16 tiles of 64 keys in shared memory, and beside them 0 or -inf for each key, which is all that eight
consumer warps need to know of keys besides what they multiply. A consumer holds one stage at a
time (scores, softmax and products in turn), so that producers have the other to fill. Keys come in the order
of ``kernel.py``. Its bits are not that kernel's, so which of them runs is a matter of shapes alone.

Even channels and odd channels lie in tiles of their own (see ``kernel.py``). Keys are held times 2^-64, so
that packed codes become bfloat16 by moving bits and one exact product; scores and outputs undo it.
"""

# mypy: ignore-errors
# (The bodies of kernels are another language in Python's clothes.)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.gluon_names import reinterpreted, thread_barrier

HEADS = gl.constexpr(64)
HALF = gl.constexpr(256)
KEYS = gl.constexpr(64)
STAGES = gl.constexpr(2)
WINDOW_WIDTH = gl.constexpr(528)
ENTRY_WIDTH = gl.constexpr(288)
LOG2_E = gl.constexpr(1.4426950408889634)
KEY_UNIT = gl.constexpr(2.0**64)
# The producers' view of half a tile of entries and of a quarter of a tile of window rows, as words and as
# groups of words that share a scale. A lane writes 16 bytes of a half at a time.
ENTRY_WORDS = gl.constexpr(gl.BlockedLayout([1, 2], [1, 32], [4, 1], [1, 0]))
ENTRY_GROUPS = gl.constexpr(gl.BlockedLayout([1, 1, 2], [1, 32, 1], [4, 1, 1], [2, 1, 0]))
WINDOW_WORDS = gl.constexpr(gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0]))
WINDOW_GROUPS = gl.constexpr(gl.BlockedLayout([1, 1, 4], [1, 16, 2], [4, 1, 1], [2, 1, 0]))
SLACK = gl.constexpr(8.0)
"""A running peak may lie this far (in powers of two) below the true one before sums are rescaled."""

# Eight e2m1 codes of one word -> two pairs of even and two of odd channels, times their scale. Sign and
# magnitude go to bits 15 and 8..6 of each half: that is the value times 2^-126.
WIDEN_E2M1 = gl.constexpr("""
{
    .reg .b32 a, b, t;
    prmt.b32 a, $4, 0, 0x4140;
    prmt.b32 b, $4, 0, 0x4342;
    and.b32 t, a, 0x000F000F;
    mul.lo.u32 t, t, 0x1040;
    and.b32 t, t, 0x81C081C0;
    mul.rn.bf16x2 $0, t, $5;
    and.b32 t, b, 0x000F000F;
    mul.lo.u32 t, t, 0x1040;
    and.b32 t, t, 0x81C081C0;
    mul.rn.bf16x2 $1, t, $5;
    and.b32 t, a, 0x00F000F0;
    mul.lo.u32 t, t, 0x104;
    and.b32 t, t, 0x81C081C0;
    mul.rn.bf16x2 $2, t, $5;
    and.b32 t, b, 0x00F000F0;
    mul.lo.u32 t, t, 0x104;
    and.b32 t, t, 0x81C081C0;
    mul.rn.bf16x2 $3, t, $5;
}
""")
# An e4m3 scale -> a pair of itself times 2^62: its bits are the value times 2^-120.
WIDEN_E4M3_SCALE = gl.constexpr("""
{
    .reg .b32 t, u;
    mul.lo.u32 t, $1, 0x00100010;
    mov.b32 u, 0x7B807B80;
    mul.rn.bf16x2 t, t, u;
    mov.b32 u, 0x5E805E80;
    mul.rn.bf16x2 $0, t, u;
}
""")
# Four e4m3 codes of one word -> a pair of even and a pair of odd channels, times a power of two.
WIDEN_E4M3 = gl.constexpr("""
{
    .reg .b32 o, t, u;
    shr.u32 o, $2, 8;
    and.b32 t, $2, 0x007F007F;
    shl.b32 t, t, 4;
    shl.b32 u, $2, 8;
    lop3.b32 t, u, 0x80008000, t, 0xEA;
    mul.rn.bf16x2 $0, t, $3;
    and.b32 t, o, 0x007F007F;
    shl.b32 t, t, 4;
    and.b32 u, $2, 0x80008000;
    or.b32 t, t, u;
    mul.rn.bf16x2 $1, t, $3;
}
""")
# An e8m0 byte k -> a pair of 2^(k - 127 + 56).
WIDEN_E8M0 = gl.constexpr("""
{
    .reg .b32 t;
    add.u32 t, $1, 56;
    mul.lo.u32 $0, t, 0x00800080;
}
""")
# An even and an odd channel in fp32 -> one word of bfloat16.
NARROW_PAIR = gl.constexpr("cvt.rn.bf16x2.f32 $0, $2, $1;")


@gluon.jit
def _load_slots(slots_ptr, first, num_selected):
    """Slots of half a tile of entries, held where its words are loaded."""
    place = first + gl.arange(0, KEYS // 2, gl.SliceLayout(1, ENTRY_WORDS))
    return gl.load(slots_ptr + place, mask=place < num_selected, other=-1)


@gluon.jit
def _load_entries(slots, entries_ptr):
    """Packed words [32, 64] and scales [32, 32] of half a tile of entries; zeros where there is none."""
    scales: gl.constexpr = gl.SliceLayout(2, ENTRY_GROUPS)
    rows = entries_ptr + gl.maximum(slots, 0).to(gl.int64) * ENTRY_WIDTH
    word = gl.arange(0, 64, gl.SliceLayout(0, ENTRY_WORDS))
    packed_ptrs = rows.to(gl.pointer_type(gl.int32), bitcast=True)[:, None] + word[None, :]
    packed = gl.load(packed_ptrs, mask=(slots >= 0)[:, None], other=0)
    rows = gl.convert_layout(rows, gl.SliceLayout(1, scales), assert_trivial=True)
    is_valid = gl.convert_layout(slots, gl.SliceLayout(1, scales), assert_trivial=True) >= 0
    group = gl.arange(0, 32, gl.SliceLayout(0, scales))
    return packed, gl.load(rows[:, None] + 256 + group[None, :], mask=is_valid[:, None], other=0)


@gluon.jit
def _widen_entries(packed, scale, even_smem, odd_smem):
    """Write half a tile of entries as two bfloat16 halves (seen as pairs, 32 bits each)."""
    packed = gl.convert_layout(packed.reshape([KEYS // 2, 32, 2]), ENTRY_GROUPS, assert_trivial=True)
    factor = gl.inline_asm_elementwise(WIDEN_E4M3_SCALE, "=r,r", [scale.to(gl.int32)], gl.int32, True, 1)
    factor = gl.expand_dims(factor, 2)
    e0, e1, o0, o1 = gl.inline_asm_elementwise(
        WIDEN_E2M1, "=&r,=&r,=&r,=&r,r,r", [packed, factor], (gl.int32, gl.int32, gl.int32, gl.int32), True, 1
    )
    even_smem.store(gl.join(e0, e1).reshape([KEYS // 2, HALF // 2]))
    odd_smem.store(gl.join(o0, o1).reshape([KEYS // 2, HALF // 2]))


@gluon.jit
def _load_keys(window_rows_ptr, first):
    """Window rows of a quarter of a tile, held where their words are loaded."""
    return gl.load(window_rows_ptr + first + gl.arange(0, KEYS // 4, gl.SliceLayout(1, WINDOW_WORDS)))


@gluon.jit
def _load_window(keys, ring_ptr, chunk_ptr, num_ring_rows):
    """Packed words [16, 128] and scales [16, 16] of a quarter of a tile of window rows; zeros where none."""
    scales: gl.constexpr = gl.SliceLayout(2, WINDOW_GROUPS)
    in_ring = ring_ptr + gl.maximum(keys, 0).to(gl.int64) * WINDOW_WIDTH
    in_chunk = chunk_ptr + (keys.to(gl.int64) - num_ring_rows) * WINDOW_WIDTH
    rows = gl.where(keys < num_ring_rows, in_ring, in_chunk)
    word = gl.arange(0, 128, gl.SliceLayout(0, WINDOW_WORDS))
    packed_ptrs = rows.to(gl.pointer_type(gl.int32), bitcast=True)[:, None] + word[None, :]
    packed = gl.load(packed_ptrs, mask=(keys >= 0)[:, None], other=0)
    rows = gl.convert_layout(rows, gl.SliceLayout(1, scales), assert_trivial=True)
    is_valid = gl.convert_layout(keys, gl.SliceLayout(1, scales), assert_trivial=True) >= 0
    group = gl.arange(0, 16, gl.SliceLayout(0, scales))
    return packed, gl.load(rows[:, None] + 512 + group[None, :], mask=is_valid[:, None], other=0)


@gluon.jit
def _widen_window(packed, scale, even_smem, odd_smem):
    """Write a quarter of a tile of window rows as two bfloat16 halves (seen as pairs)."""
    packed = gl.convert_layout(packed.reshape([KEYS // 4, 16, 8]), WINDOW_GROUPS, assert_trivial=True)
    factor = gl.inline_asm_elementwise(WIDEN_E8M0, "=r,r", [scale.to(gl.int32)], gl.int32, True, 1)
    factor = gl.expand_dims(factor, 2)
    even, odd = gl.inline_asm_elementwise(
        WIDEN_E4M3, "=&r,=&r,r,r", [packed, factor], (gl.int32, gl.int32), True, 1
    )
    even_smem.store(even.reshape([KEYS // 4, HALF // 2]))
    odd_smem.store(odd.reshape([KEYS // 4, HALF // 2]))


@gluon.jit
def _stage_as_pairs(keys_smem, stage):
    """The even and the odd half of a stage, two neighbouring channels of a half in one 32-bit element."""
    pairs: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    even = reinterpreted(keys_smem.index(2 * stage), gl.int32, [KEYS, HALF // 2], pairs)
    odd = reinterpreted(keys_smem.index(2 * stage + 1), gl.int32, [KEYS, HALF // 2], pairs)
    return even, odd


@gluon.jit
def _load_query(q_ptr, first):
    """Words of eight heads."""
    words: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    head = first + gl.arange(0, 8, gl.SliceLayout(1, words))
    pair = gl.arange(0, HALF, gl.SliceLayout(0, words))
    return gl.load(q_ptr + head[:, None] * HALF + pair[None, :])


@gluon.jit
def _store_query(q_ptr, q_smem):
    """The query's even and odd channels, eight heads at a time, the next sixteen under way."""
    both = _load_query(q_ptr, 0)
    next_both = _load_query(q_ptr, 8)
    for first in gl.static_range(0, HEADS, 8):
        if first + 16 < HEADS:
            later_both = _load_query(q_ptr, first + 16)
        q_smem.index(0).slice(first, 8).store((both & 0xFFFF).to(gl.int16).to(gl.bfloat16, bitcast=True))
        q_smem.index(1).slice(first, 8).store((both >> 16).to(gl.int16).to(gl.bfloat16, bitcast=True))
        both = next_both
        if first + 16 < HEADS:
            next_both = later_both


@gluon.jit
def _num_entry_tiles(slots_ptr, num_selected, BLOCK_SELECTED: gl.constexpr, layout: gl.constexpr):
    """Tiles up to the last valid slot; the others would change no bit.

    Producers and consumers each count, at the head of their loop over queries. No loop may carry the count
    to its next turn: Triton 3.6 takes an inner loop's bound for a constant if the outer loop carries it.
    """
    place = gl.arange(0, BLOCK_SELECTED, layout)
    slots = gl.load(slots_ptr + place, mask=place < num_selected, other=-1)
    return gl.cdiv(gl.max(gl.where(slots >= 0, place + 1, 0), 0), KEYS)


@gluon.jit
def _load_tile_keys(ptr, first, limit):
    """Rows or slots of a tile, one a lane; below 0 where there is none."""
    place = first + gl.arange(0, KEYS, gl.BlockedLayout([1], [32], [4], [0]))
    return gl.load(ptr + place, mask=place < limit, other=-1)


@gluon.jit
def _produce(
    q_ptr, ring_ptr, chunk_ptr, window_rows_ptr, entries_ptr, slots_ptr, num_rows, num_ring_rows,
    stride_q_row, q_smem, keys_smem, bias_smem, full, empty, q_full, q_empty,
    NUM_SELECTED: gl.constexpr, BLOCK_SELECTED: gl.constexpr, WINDOW_TILES: gl.constexpr,
):  # fmt: skip
    """Fill the stages in turn; addresses are two pieces ahead of what is widened, and words one piece."""
    every_lane: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    count = 0
    query_phase = 1
    for row in range(gl.program_id(0), num_rows, gl.num_programs(0)):
        row_slots_ptr = slots_ptr + row.to(gl.int64) * NUM_SELECTED
        row_window_ptr = window_rows_ptr + row.to(gl.int64) * (WINDOW_TILES * KEYS)
        keys = _load_keys(row_window_ptr, 0)
        next_keys = _load_keys(row_window_ptr, KEYS // 4)
        num_tiles = 0
        if NUM_SELECTED > 0:
            num_tiles = _num_entry_tiles(row_slots_ptr, NUM_SELECTED, BLOCK_SELECTED, every_lane)
        mbarrier.wait(q_empty, query_phase)
        _store_query(q_ptr + row.to(gl.int64) * stride_q_row, q_smem)
        fence_async_shared()
        mbarrier.arrive(q_full, count=1)
        query_phase ^= 1
        packed, scale = _load_window(keys, ring_ptr, chunk_ptr, num_ring_rows)
        slots = _load_slots(row_slots_ptr, 0, NUM_SELECTED)
        next_slots = _load_slots(row_slots_ptr, KEYS // 2, NUM_SELECTED)
        for quarter in gl.static_range(4 * WINDOW_TILES):
            stage = count % STAGES
            even, odd = _stage_as_pairs(keys_smem, stage)
            if quarter % 4 == 0:
                tile_keys = _load_tile_keys(row_window_ptr, quarter // 4 * KEYS, WINDOW_TILES * KEYS)
                mbarrier.wait(empty.index(stage), ((count // STAGES) & 1) ^ 1)
            if quarter + 1 < 4 * WINDOW_TILES:
                next_packed, next_scale = _load_window(next_keys, ring_ptr, chunk_ptr, num_ring_rows)
            if quarter + 2 < 4 * WINDOW_TILES:
                next_keys = _load_keys(row_window_ptr, (quarter + 2) * (KEYS // 4))
            _widen_window(
                packed,
                scale,
                even.slice(quarter % 4 * (KEYS // 4), KEYS // 4),
                odd.slice(quarter % 4 * (KEYS // 4), KEYS // 4),
            )
            if quarter + 1 < 4 * WINDOW_TILES:
                packed = next_packed
                scale = next_scale
            if quarter % 4 == 3:
                bias_smem.index(stage).store(gl.where(tile_keys >= 0, 0.0, float("-inf")))
                fence_async_shared()
                mbarrier.arrive(full.index(stage), count=1)
                count += 1
        entry_packed, entry_scale = _load_entries(slots, entries_ptr)
        for n in range(num_tiles):
            stage = count % STAGES
            even, odd = _stage_as_pairs(keys_smem, stage)
            tile_keys = _load_tile_keys(row_slots_ptr, n * KEYS, NUM_SELECTED)
            mbarrier.wait(empty.index(stage), ((count // STAGES) & 1) ^ 1)
            for half in gl.static_range(2):
                ahead_packed, ahead_scale = _load_entries(next_slots, entries_ptr)
                first = n * KEYS + (half + 2) * (KEYS // 2)
                next_slots = _load_slots(row_slots_ptr, first, NUM_SELECTED)
                _widen_entries(
                    entry_packed,
                    entry_scale,
                    even.slice(half * (KEYS // 2), KEYS // 2),
                    odd.slice(half * (KEYS // 2), KEYS // 2),
                )
                entry_packed = ahead_packed
                entry_scale = ahead_scale
            bias_smem.index(stage).store(gl.where(tile_keys >= 0, 0.0, float("-inf")))
            fence_async_shared()
            mbarrier.arrive(full.index(stage), count=1)
            count += 1


@gluon.jit
def _issue_scores(q_smem, keys_smem, full, count, scores_layout: gl.constexpr):
    """Start ``q . key`` of a tile once it is there."""
    stage = count % STAGES
    mbarrier.wait(full.index(stage), (count // STAGES) & 1)
    zero = gl.zeros([HEADS, KEYS], gl.float32, scores_layout)
    even, odd = keys_smem.index(2 * stage).permute((1, 0)), keys_smem.index(2 * stage + 1).permute((1, 0))
    scores = warpgroup_mma(q_smem.index(0), even, zero, use_acc=False, is_async=True)
    return warpgroup_mma(q_smem.index(1), odd, scores, is_async=True)


@gluon.jit
def _thread_sums(weights):
    """[64, 64] -> [64, 2, 4]: the sums of what one thread holds of each row, without an exchange."""
    split = weights.reshape([HEADS, 2, KEYS // 16, 4, 2])
    return gl.sum(gl.sum(split, 4), 2)


@gluon.jit
def _warp_peaks(x):
    """[64, 64] -> the largest of what each of the eight warps holds: an exchange between lanes only."""
    split = x.reshape([4, HEADS // 4, 2, KEYS // 2])
    return gl.max(gl.max(split, 3), 1).reshape([8])


@gluon.jit
def _consume(
    slots_ptr, sink_ptr, cos_ptr, sin_ptr, out_ptr, num_rows, scale_log2, stride_out_row,
    q_smem, keys_smem, bias_smem, weights_smem, peaks_smem, full, empty, q_full, q_empty,
    NUM_SELECTED: gl.constexpr, BLOCK_SELECTED: gl.constexpr, WINDOW_TILES: gl.constexpr,
    ROPE_HALF: gl.constexpr,
):  # fmt: skip
    """Scores, softmax, weighted sums; then the division, the inverse rotation and the store."""
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 128, 16])
    head_layout: gl.constexpr = gl.SliceLayout(1, scores_layout)
    key_layout: gl.constexpr = gl.SliceLayout(0, scores_layout)
    every_thread: gl.constexpr = gl.BlockedLayout([1], [32], [8], [0])
    every_peak: gl.constexpr = gl.BlockedLayout([8], [32], [8], [0])
    sink = gl.load(sink_ptr + gl.arange(0, HEADS, head_layout)) * LOG2_E
    count = 0
    query_phase = 0
    for row in range(gl.program_id(0), num_rows, gl.num_programs(0)):
        row_slots_ptr = slots_ptr + row.to(gl.int64) * NUM_SELECTED
        num_tiles = WINDOW_TILES
        if NUM_SELECTED > 0:
            num_tiles += _num_entry_tiles(row_slots_ptr, NUM_SELECTED, BLOCK_SELECTED, every_thread)
        peak = sink
        sums = _thread_sums(gl.zeros([HEADS, KEYS], gl.float32, scores_layout))
        acc_even = gl.zeros([HEADS, HALF], gl.float32, acc_layout)
        acc_odd = gl.zeros([HEADS, HALF], gl.float32, acc_layout)
        mbarrier.wait(q_full, query_phase)
        query_phase ^= 1
        for _ in range(num_tiles):
            stage = count % STAGES
            pending = _issue_scores(q_smem, keys_smem, full, count, scores_layout)
            bias = bias_smem.index(stage).load(key_layout)
            scores = warpgroup_mma_wait(0, deps=[pending])
            scores = gl.fma(scores, scale_log2 + gl.zeros_like(scores), bias[None, :] + gl.zeros_like(scores))
            # Weights are relative to the running peak, which moves only when it lies SLACK too low: seldom.
            # So they are stored before that is known, and one barrier serves both.
            weights = gl.exp2(scores - peak[:, None])
            tile_weights = weights_smem.index(stage)
            tile_weights.store(weights.to(gl.bfloat16))
            peaks_smem.store(_warp_peaks(scores - peak[:, None]))
            fence_async_shared()
            if gl.max(peaks_smem.load(every_peak), 0) > SLACK:
                new_peak = gl.maximum(peak, gl.max(scores, 1))
                shrink = gl.exp2(peak - new_peak)
                sums = sums * _thread_sums(gl.zeros_like(scores) + shrink[:, None]) * (8.0 / KEYS)
                peak = new_peak
                weights = gl.exp2(scores - peak[:, None])
                tile_weights.store(weights.to(gl.bfloat16))
                factor = gl.convert_layout(shrink, gl.SliceLayout(1, acc_layout))[:, None]
                acc_even = acc_even * factor
                acc_odd = acc_odd * factor
                fence_async_shared()
                thread_barrier()  # here, so that the other way has none to wait at
            next_even = warpgroup_mma(tile_weights, keys_smem.index(2 * stage), acc_even, is_async=True)
            next_odd = warpgroup_mma(tile_weights, keys_smem.index(2 * stage + 1), acc_odd, is_async=True)
            sums = sums + _thread_sums(weights)
            acc_even, acc_odd = warpgroup_mma_wait(0, deps=[next_even, next_odd])
            mbarrier.arrive(empty.index(stage), count=1)
            count += 1

        mbarrier.arrive(q_empty, count=1)
        total = gl.convert_layout(gl.sum(gl.sum(sums, 2), 1), head_layout) + gl.exp2(sink - peak)
        factor = gl.convert_layout(KEY_UNIT / total, gl.SliceLayout(1, acc_layout))[:, None]
        channel = gl.arange(0, HALF, gl.SliceLayout(0, acc_layout))
        angle = channel - (HALF - ROPE_HALF)
        at_angle = row.to(gl.int64) * ROPE_HALF + angle
        cos = gl.load(cos_ptr + at_angle, mask=angle >= 0, other=1.0)[None, :]
        sin = gl.load(sin_ptr + at_angle, mask=angle >= 0, other=0.0)[None, :]
        acc_even = acc_even * factor
        acc_odd = acc_odd * factor
        turned = [acc_even * cos + acc_odd * sin, acc_odd * cos - acc_even * sin]
        both = gl.inline_asm_elementwise(NARROW_PAIR, "=r,r,r", turned, gl.int32, True, 1)
        head = gl.arange(0, HEADS, gl.SliceLayout(1, acc_layout))
        out_ptrs = out_ptr + row.to(gl.int64) * stride_out_row + head[:, None] * HALF + channel[None, :]
        gl.store(out_ptrs, both)


@gluon.jit
def hopper_attention_kernel(
    q_ptr, ring_ptr, chunk_ptr, window_rows_ptr, entries_ptr, slots_ptr, sink_ptr, cos_ptr, sin_ptr, out_ptr,
    num_rows, num_ring_rows, scale_log2, stride_q_row, stride_out_row,
    NUM_SELECTED: gl.constexpr, BLOCK_SELECTED: gl.constexpr, WINDOW_TILES: gl.constexpr,
    ROPE_HALF: gl.constexpr,
):  # fmt: skip
    """``q`` and ``out`` as 32-bit words, two channels each; strides in words. Programs take rows in turn."""
    half_tile: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    q_smem = gl.allocate_shared_memory(gl.bfloat16, [2, HEADS, HALF], half_tile)
    keys_smem = gl.allocate_shared_memory(gl.bfloat16, [2 * STAGES, KEYS, HALF], half_tile)
    bias_smem = gl.allocate_shared_memory(gl.float32, [STAGES, KEYS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    weights_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES, HEADS, KEYS], half_tile)
    peaks_smem = gl.allocate_shared_memory(gl.float32, [8], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    q_full = gl.allocate_shared_memory(gl.int64, [1], barrier)
    q_empty = gl.allocate_shared_memory(gl.int64, [1], barrier)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=1)
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    slots_ptr, sink_ptr, cos_ptr, sin_ptr, out_ptr, num_rows, scale_log2 * KEY_UNIT,
                    stride_out_row, q_smem, keys_smem, bias_smem, weights_smem, peaks_smem,
                    full, empty, q_full, q_empty,
                    NUM_SELECTED, BLOCK_SELECTED, WINDOW_TILES, ROPE_HALF,
                ),
            ),
            (
                _produce,
                (
                    q_ptr, ring_ptr, chunk_ptr, window_rows_ptr, entries_ptr, slots_ptr, num_rows,
                    num_ring_rows, stride_q_row, q_smem, keys_smem, bias_smem,
                    full, empty, q_full, q_empty,
                    NUM_SELECTED, BLOCK_SELECTED, WINDOW_TILES,
                ),
            ),
        ],
        [4],
        [120],
    )  # fmt: skip

"""Device code of routing: gate products, the choice of experts, the order in which slots are computed.

A slot is one (row, choice) pair. Slots are sorted by expert, stably, by counting; nothing here depends on the
order in which programs run.
"""

# mypy: ignore-errors
# (The bodies of kernels are another language in Python's clothes.)

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_rows"])
def gate_product_kernel(
    x_ptr, gate_ptr, partial_ptr, num_rows, stride_x_row,
    WIDTH: tl.constexpr, NUM_EXPERTS: tl.constexpr, NUM_PIECES: tl.constexpr, PART: tl.constexpr,
    ROWS: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A tile of rows and experts, a part of the depth: ``partial`` [parts, rows, experts].

    Rows of bfloat16 are exact, and so are the pieces of a gate: the products are those of fp32. The smallest
    piece is added first. A gate in fp32 has one piece and rows are widened to it.
    """
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    expert = tl.program_id(2) * EXPERTS + tl.arange(0, EXPERTS)
    is_row = (row < num_rows)[:, None]
    is_expert = (expert < NUM_EXPERTS)[:, None]
    z = tl.zeros([ROWS, EXPERTS], tl.float32)
    for start in tl.range(part * PART, part * PART + PART, BLOCK):
        column = start + tl.arange(0, BLOCK)[None, :]
        x = tl.load(x_ptr + row[:, None] * stride_x_row + column, mask=is_row & (column < WIDTH), other=0.0)
        x = x.to(gate_ptr.dtype.element_ty)
        for n in tl.static_range(NUM_PIECES):
            piece_ptr = gate_ptr + (NUM_PIECES - 1 - n) * NUM_EXPERTS * WIDTH
            weight_ptrs = piece_ptr + expert[:, None] * WIDTH + column
            weight = tl.load(weight_ptrs, mask=is_expert & (column < WIDTH), other=0.0)
            z = tl.dot(x, tl.trans(weight), acc=z, input_precision="ieee")
    partial_ptrs = partial_ptr + (part.to(tl.int64) * num_rows + row[:, None]) * NUM_EXPERTS + expert[None, :]
    tl.store(partial_ptrs, z, mask=is_row & (expert < NUM_EXPERTS)[None, :])


@triton.jit
def _sqrt_softplus(z):
    """``sqrt(log(1 + exp(z)))``; the logarithm by the series of its inverse hyperbolic tangent."""
    u = tl.exp(-tl.abs(z))
    s = u / (2.0 + u)
    square = s * s
    series = tl.full(z.shape, 1.0 / 15.0, tl.float32)
    series = tl.fma(series, square, 1.0 / 13.0)
    series = tl.fma(series, square, 1.0 / 11.0)
    series = tl.fma(series, square, 1.0 / 9.0)
    series = tl.fma(series, square, 1.0 / 7.0)
    series = tl.fma(series, square, 1.0 / 5.0)
    series = tl.fma(series, square, 1.0 / 3.0)
    series = tl.fma(series, square, 1.0)
    return tl.sqrt_rn(tl.maximum(z, 0.0) + 2.0 * s * series)


@triton.jit(do_not_specialize=["num_rows"])
def choose_experts_kernel(
    partial_ptr, bias_ptr, ids_ptr, weights_ptr, num_rows, routed_scale,
    NUM_EXPERTS: tl.constexpr, NUM_PARTS: tl.constexpr, TOP_K: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One row: add the parts in order, score, take the best biased scores; of equal ones the lowest id."""
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    is_expert = expert < NUM_EXPERTS
    z = tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(NUM_PARTS):
        partial_ptrs = partial_ptr + (part * tl.cast(num_rows, tl.int64) + row) * NUM_EXPERTS + expert
        z += tl.load(partial_ptrs, mask=is_expert, other=0.0)
    scores = _sqrt_softplus(z)
    biased = scores + tl.load(bias_ptr + expert, mask=is_expert, other=0.0)
    biased = tl.where(is_expert, biased, float("-inf"))
    place = tl.arange(0, BLOCK_K)
    ids = tl.zeros([BLOCK_K], tl.int32)
    chosen = tl.zeros([BLOCK_K], tl.float32)
    for k in tl.static_range(TOP_K):
        best = tl.max(biased, 0)
        # Within the experts even where every score is NaN.
        one = tl.minimum(tl.min(tl.where(biased == best, expert, BLOCK), 0), NUM_EXPERTS - 1)
        score = tl.sum(tl.where(expert == one, scores, 0.0), 0)
        ids = tl.where(place == k, one, ids)
        chosen = tl.where(place == k, score, chosen)
        biased = tl.where(expert == one, float("-inf"), biased)
    total = tl.sum(chosen, 0) + 1e-20
    weights = tl.div_rn(chosen, tl.zeros([BLOCK_K], tl.float32) + total) * routed_scale
    tl.store(ids_ptr + row * TOP_K + place, ids.to(tl.int64), mask=place < TOP_K)
    tl.store(weights_ptr + row * TOP_K + place, weights, mask=place < TOP_K)


@triton.jit(do_not_specialize=["num_slots"])
def count_slots_kernel(
    ids_ptr, counts_ptr, ranks_ptr, num_slots,
    NUM_EXPERTS: tl.constexpr, BLOCK: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """One block of slots: how many of each expert [blocks, experts], and each slot's rank among its own."""
    first = tl.program_id(0).to(tl.int64) * BLOCK
    place = tl.arange(0, BLOCK)
    ids = tl.load(ids_ptr + first + place, mask=first + place < num_slots, other=-1).to(tl.int32)
    others = tl.load(ids_ptr + first + place, mask=first + place < num_slots, other=-1).to(tl.int32)
    is_before = (ids[:, None] == others[None, :]) & (place[None, :] < place[:, None])
    tl.store(ranks_ptr + first + place, tl.sum(is_before.to(tl.int32), 1), mask=first + place < num_slots)
    for start in tl.static_range(0, NUM_EXPERTS, EXPERTS):
        expert = start + tl.arange(0, EXPERTS)
        count = tl.sum((ids[:, None] == expert[None, :]).to(tl.int32), 0)
        counts_ptrs = counts_ptr + tl.program_id(0).to(tl.int64) * NUM_EXPERTS + expert
        tl.store(counts_ptrs, count, mask=expert < NUM_EXPERTS)


@triton.jit
def _count_up_to(counts_ptr, last, num_blocks, NUM_EXPERTS: tl.constexpr, BLOCK: tl.constexpr):
    """Each expert's slots in the blocks before ``last``, and in all of them."""
    expert = tl.arange(0, BLOCK)
    before = tl.zeros([BLOCK], tl.int32)
    total = tl.zeros([BLOCK], tl.int32)
    for block in tl.range(0, num_blocks):
        counts_ptrs = counts_ptr + tl.cast(block, tl.int64) * NUM_EXPERTS + expert
        count = tl.load(counts_ptrs, mask=expert < NUM_EXPERTS, other=0)
        before += tl.where(block < last, count, 0)
        total += count
    return before, total


@triton.jit(do_not_specialize=["num_slots", "num_blocks", "max_tiles"])
def place_slots_kernel(
    ids_ptr, counts_ptr, ranks_ptr, order_ptr, position_ptr, tiles_ptr, num_slots, num_blocks, max_tiles,
    NUM_EXPERTS: tl.constexpr, BLOCK: tl.constexpr, ALL_EXPERTS: tl.constexpr,
    TILE: tl.constexpr, EXTRA: tl.constexpr, FILL: tl.constexpr,
):  # fmt: skip
    """Programs of blocks: the sorted position of each slot (-1 without an expert), the slot at each position.

    Programs of experts behind them: the expert's tiles in ``tiles`` [max_tiles, 3] (expert, first position,
    end of the tile's rows). The last expert's program marks the tiles that nobody needs with expert -1.
    """
    pid = tl.program_id(0)
    expert = tl.arange(0, ALL_EXPERTS)
    before, total = _count_up_to(counts_ptr, pid, num_blocks, NUM_EXPERTS, ALL_EXPERTS)
    start = tl.cumsum(total, 0) - total
    if pid < num_blocks:
        first = pid.to(tl.int64) * BLOCK
        place = tl.arange(0, BLOCK)
        is_slot = first + place < num_slots
        ids = tl.load(ids_ptr + first + place, mask=is_slot, other=-1).to(tl.int32)
        position = tl.load(ranks_ptr + first + place, mask=is_slot, other=0)
        offset = start + before
        position += tl.sum(tl.where(ids[:, None] == expert[None, :], offset[None, :], 0), 1)
        is_placed = is_slot & (ids >= 0) & (position < num_slots)
        tl.store(position_ptr + first + place, tl.where(ids >= 0, position, -1), mask=is_slot)
        tl.store(order_ptr + position, (first + place).to(tl.int32), mask=is_placed)
    else:
        one = pid - num_blocks
        num_tiles = tl.maximum((total - EXTRA + TILE - 1) // TILE, (total > 0).to(tl.int32))
        mine = tl.sum(tl.where(expert == one, num_tiles, 0), 0)
        first_tile = tl.sum(tl.where(expert < one, num_tiles, 0), 0)
        first_row = tl.sum(tl.where(expert == one, start, 0), 0)
        end = first_row + tl.sum(tl.where(expert == one, total, 0), 0)
        for n in tl.range(0, mine):
            tile_ptr = tiles_ptr + (first_tile + n) * 3
            tl.store(tile_ptr, one)
            tl.store(tile_ptr + 1, first_row + n * TILE)
            tl.store(tile_ptr + 2, tl.where(n == mine - 1, end, first_row + (n + 1) * TILE))
        if one == NUM_EXPERTS - 1:
            for n in tl.range(first_tile + mine, max_tiles, FILL):
                tile = n + tl.arange(0, FILL)
                tl.store(tiles_ptr + tile * 3, tl.full([FILL], -1, tl.int32), mask=tile < max_tiles)

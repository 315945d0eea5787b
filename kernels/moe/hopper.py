"""Device code of the grouped products on Hopper, for weights prepared by ``prepare_experts``.

Persistent programs take tiles of 128 weight rows and up to 4 * BOX of an expert's rows in turn. One producer
warp brings rows and packed weights to shared memory; two consumer warpgroups, 64 weight rows each, widen
weights in registers while the tensor cores run. Weights are the left operand, so any number of rows uses one
instruction family with one order of the depth: a row's bits do not depend on how many rows its expert has.

``hopper_sums.py`` has the sums: to e4m3 not every weight can be widened, so tiles with a row of too many
exponents are multiplied in bfloat16.
"""

# mypy: ignore-errors
# ruff: noqa: RUF005
# (The bodies of kernels are another language in Python's clothes.)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from kernels.gluon_names import reinterpreted, tma_load
from kernels.moe.hopper_sums import ROW_PAIRS, TAIL, multiply, multiply_in_parts

LOG2_E = gl.constexpr(1.4426950408889634)
NARROW = gl.constexpr("cvt.rn.bf16x2.f32 $0, $2, $1;")


@gluon.jit
def _halves(acc):
    """The left and the right half of the columns; both lie in each thread's registers."""
    rows: gl.constexpr = acc.shape[0]
    columns: gl.constexpr = acc.shape[1]
    return acc.reshape([rows, 2, columns // 2]).permute((0, 2, 1)).split()


@gluon.jit
def _quarters(low, high):
    first, second = _halves(low)
    third, fourth = _halves(high)
    return first, second, third, fourth


@gluon.jit
def _narrowed(x):
    """To bfloat16, two at a time: a lone conversion runs at a quarter of the rate."""
    return gl.inline_asm_elementwise(NARROW, "=r,r,r", [x], gl.bfloat16, True, 2)


@gluon.jit
def _row_vector(ptr, first, end, layout: gl.constexpr, COLUMNS: gl.constexpr):
    position = first + gl.arange(0, COLUMNS, layout)
    return gl.load(ptr + position, mask=position < end, other=0)


@gluon.jit
def _store_hidden(
    acc, factor, row_scale_ptr, order_ptr, route_ptr, out_ptr, first, end, channel, limit,
    WIDTH: gl.constexpr, HAS_ROW_SCALE: gl.constexpr,
):  # fmt: skip
    """[64, COLUMNS] sums, gate and up row beside each other -> activated, weighed rows [COLUMNS, 32]."""
    COLUMNS: gl.constexpr = acc.shape[1]
    gate, up = acc.reshape([4, 2, 8, COLUMNS]).permute((0, 2, 3, 1)).split()
    gate = gate.reshape([32, COLUMNS])
    up = up.reshape([32, COLUMNS])
    columns: gl.constexpr = gl.SliceLayout(0, gate.type.layout)
    rows: gl.constexpr = gl.SliceLayout(1, gate.type.layout)
    slot = _row_vector(order_ptr, first, end, columns, COLUMNS)
    route = gl.load(route_ptr + slot)
    gate_factor, up_factor = factor.split()
    gate = gate * gl.convert_layout(gate_factor, rows)[:, None]
    up = up * gl.convert_layout(up_factor, rows)[:, None]
    if HAS_ROW_SCALE:
        scale = _row_vector(row_scale_ptr, first, end, columns, COLUMNS)
        gate = gate * scale[None, :]
        up = up * scale[None, :]
    gate = gl.minimum(_narrowed(gate).to(gl.float32), limit)
    up = gl.minimum(gl.maximum(_narrowed(up).to(gl.float32), -limit), limit)
    hidden = gate / (1.0 + gl.exp2(gate * -LOG2_E)) * up * route[None, :]
    wide: gl.constexpr = gl.BlockedLayout([8, 1], [4, 8], [1, 4], [0, 1])
    hidden = gl.convert_layout(_narrowed(hidden), wide)
    position = first + gl.arange(0, COLUMNS, gl.SliceLayout(0, wide))
    channel = channel + gl.arange(0, 32, gl.SliceLayout(1, wide))
    out_ptrs = out_ptr + position.to(gl.int64)[None, :] * WIDTH + channel[:, None]
    gl.store(out_ptrs, hidden, mask=(position < end)[None, :])


@gluon.jit
def _store_slots(
    acc, factor, row_scale_ptr, order_ptr, out_ptr, homes_ptr, slots_per_home, first, end, channel,
    WIDTH: gl.constexpr, HAS_ROW_SCALE: gl.constexpr, HAS_HOMES: gl.constexpr,
):  # fmt: skip
    """[64, COLUMNS] sums -> their slots' rows [COLUMNS, 64], each in its home where there are several."""
    COLUMNS: gl.constexpr = acc.shape[1]
    columns: gl.constexpr = gl.SliceLayout(0, acc.type.layout)
    rows: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    factor = factor.reshape([4, 8, 2]).permute((0, 2, 1)).reshape([64])
    acc = acc * gl.convert_layout(factor, rows)[:, None]
    if HAS_ROW_SCALE:
        acc = acc * _row_vector(row_scale_ptr, first, end, columns, COLUMNS)[None, :]
    wide: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
    narrow = gl.convert_layout(_narrowed(acc), wide)
    position = first + gl.arange(0, COLUMNS, gl.SliceLayout(0, wide))
    slot = gl.load(order_ptr + position, mask=position < end, other=0)
    channel = channel + gl.arange(0, 64, gl.SliceLayout(1, wide))
    if HAS_HOMES:
        home = slot // slots_per_home
        slot = slot - home * slots_per_home
        address = gl.load(homes_ptr + home).to(gl.pointer_type(gl.bfloat16))
        row_ptrs = gl.multiple_of(address, [16]) + slot.to(gl.int64) * WIDTH
    else:
        row_ptrs = out_ptr + slot.to(gl.int64) * WIDTH
    gl.store(row_ptrs[None, :] + channel[:, None], narrow, mask=(position < end)[None, :])


@gluon.jit
def _store_piece(
    acc, factor, row_scale_ptr, order_ptr, route_ptr, out_ptr, homes_ptr, slots_per_home,
    first, end, column, limit,
    GROUP: gl.constexpr, WIDTH: gl.constexpr, IS_GATED: gl.constexpr, HAS_ROW_SCALE: gl.constexpr,
    HAS_HOMES: gl.constexpr,
):  # fmt: skip
    """A piece of at most 64 columns of a tile."""
    if IS_GATED:
        channel = column * 64 + GROUP * 32
        _store_hidden(
            acc, factor, row_scale_ptr, order_ptr, route_ptr, out_ptr, first, end, channel, limit, WIDTH,
            HAS_ROW_SCALE,
        )  # fmt: skip
    else:
        channel = column * 128 + GROUP * 64
        _store_slots(
            acc, factor, row_scale_ptr, order_ptr, out_ptr, homes_ptr, slots_per_home, first, end, channel,
            WIDTH, HAS_ROW_SCALE, HAS_HOMES,
        )  # fmt: skip


@gluon.jit
def _store(
    pieces, factor, row_scale_ptr, order_ptr, route_ptr, out_ptr, homes_ptr, slots_per_home,
    first, end, column, limit,
    GROUP: gl.constexpr, WIDTH: gl.constexpr, IS_GATED: gl.constexpr, HAS_ROW_SCALE: gl.constexpr,
    HAS_HOMES: gl.constexpr,
):  # fmt: skip
    """A tile's sums, piece by piece."""
    for n in gl.static_range(len(pieces)):
        _store_piece(
            pieces[n], factor, row_scale_ptr, order_ptr, route_ptr, out_ptr, homes_ptr, slots_per_home,
            first, end, column, limit, GROUP, WIDTH, IS_GATED, HAS_ROW_SCALE, HAS_HOMES,
        )  # fmt: skip
        first += pieces[n].shape[1]


@gluon.jit
def _tile_of(
    tiles_ptr, wide_ptr, item, NUM_COLUMNS: gl.constexpr, HAS_WIDE: gl.constexpr, WANT_WIDE: gl.constexpr
):
    """(expert, first position, end, column) of an item; no rows where it is not this launch's."""
    tile_ptr = tiles_ptr + (item // NUM_COLUMNS) * 3
    column = item % NUM_COLUMNS
    expert = gl.load(tile_ptr)
    first = gl.load(tile_ptr + 1)
    end = gl.load(tile_ptr + 2)
    if HAS_WIDE:
        is_wide = gl.load(wide_ptr + gl.maximum(expert, 0) * NUM_COLUMNS + column) != 0
        expert = gl.where(is_wide == WANT_WIDE, expert, -1)
    end = gl.where(expert >= 0, end, first)
    return expert, first, end, column


@gluon.jit
def _consume(
    tiles_ptr, wide_ptr, base_ptr, row_scale_ptr, order_ptr, route_ptr, out_ptr, homes_ptr, slots_per_home,
    num_items, limit, x_smem, tail_smem, packed_smem, scale_smem, full, empty,
    GROUP: gl.constexpr, WIDTH: gl.constexpr, NUM_COLUMNS: gl.constexpr, NUM_BLOCKS: gl.constexpr,
    STAGES: gl.constexpr, BOX: gl.constexpr, IS_GATED: gl.constexpr, IS_FP8: gl.constexpr,
    HAS_ROW_SCALE: gl.constexpr, HAS_HOMES: gl.constexpr, HAS_WIDE: gl.constexpr, WANT_WIDE: gl.constexpr,
    HAS_TAIL: gl.constexpr,
):  # fmt: skip
    """One warpgroup's half of each tile."""
    count = 0
    for item in range(gl.program_id(0), num_items, gl.num_programs(0)):
        expert, first, end, column = _tile_of(tiles_ptr, wide_ptr, item, NUM_COLUMNS, HAS_WIDE, WANT_WIDE)
        pair = gl.arange(0, 32, gl.SliceLayout(1, ROW_PAIRS))
        of_pair = gl.arange(0, 2, gl.SliceLayout(0, ROW_PAIRS))
        base_row = ((gl.maximum(expert, 0) * NUM_COLUMNS + column) * 2 + GROUP) * 64
        base = gl.load(base_ptr + base_row + pair[:, None] + 32 * of_pair[None, :]).to(gl.int32)
        factor = gl.full([32, 2], 1.0, gl.float32, ROW_PAIRS)
        if IS_FP8:
            factor = gl.exp2((base - 122).to(gl.float32))
        base = base * 0x01010101
        num_rows = end - first
        if HAS_TAIL and num_rows > 4 * BOX:
            low, high, tail = multiply_in_parts(
                x_smem, tail_smem, packed_smem, scale_smem, full, empty, count, base, num_items < 0,
                GROUP, NUM_BLOCKS, STAGES, 256 + TAIL,
            )  # fmt: skip
            _store(
                _quarters(low, high) + (tail,), factor, row_scale_ptr, order_ptr, route_ptr, out_ptr,
                homes_ptr, slots_per_home, first, end, column, limit, GROUP, WIDTH, IS_GATED, HAS_ROW_SCALE,
                HAS_HOMES,
            )  # fmt: skip
            count += NUM_BLOCKS
        elif HAS_TAIL and (num_rows > 2 * BOX and num_rows <= 3 * BOX):
            low, _, tail = multiply_in_parts(
                x_smem, tail_smem, packed_smem, scale_smem, full, empty, count, base, num_items < 0,
                GROUP, NUM_BLOCKS, STAGES, 192,
            )  # fmt: skip
            _store(
                _halves(low) + (tail,), factor, row_scale_ptr, order_ptr, route_ptr, out_ptr,
                homes_ptr, slots_per_home, first, end, column, limit, GROUP, WIDTH, IS_GATED, HAS_ROW_SCALE,
                HAS_HOMES,
            )  # fmt: skip
            count += NUM_BLOCKS
        elif num_rows > 2 * BOX:
            if HAS_TAIL:
                low, high, _ = multiply_in_parts(
                    x_smem, tail_smem, packed_smem, scale_smem, full, empty, count, base, num_items < 0,
                    GROUP, NUM_BLOCKS, STAGES, 256,
                )  # fmt: skip
            else:
                acc = multiply(
                    x_smem, packed_smem, scale_smem, full, empty, count, base,
                    GROUP, NUM_BLOCKS, STAGES, 4 * BOX, IS_FP8,
                )  # fmt: skip
                low, high = _halves(acc)
            _store(
                _quarters(low, high), factor, row_scale_ptr, order_ptr, route_ptr, out_ptr, homes_ptr,
                slots_per_home, first, end, column, limit, GROUP, WIDTH, IS_GATED, HAS_ROW_SCALE, HAS_HOMES,
            )  # fmt: skip
            count += NUM_BLOCKS
        elif num_rows > BOX:
            acc = multiply(
                x_smem, packed_smem, scale_smem, full, empty, count, base,
                GROUP, NUM_BLOCKS, STAGES, 2 * BOX, IS_FP8,
            )  # fmt: skip
            _store(
                _halves(acc), factor, row_scale_ptr, order_ptr, route_ptr, out_ptr, homes_ptr, slots_per_home,
                first, end, column, limit, GROUP, WIDTH, IS_GATED, HAS_ROW_SCALE, HAS_HOMES,
            )  # fmt: skip
            count += NUM_BLOCKS
        elif num_rows > 0:
            acc = multiply(
                x_smem, packed_smem, scale_smem, full, empty, count, base,
                GROUP, NUM_BLOCKS, STAGES, BOX, IS_FP8,
            )  # fmt: skip
            _store(
                (acc,), factor, row_scale_ptr, order_ptr, route_ptr, out_ptr, homes_ptr, slots_per_home,
                first, end, column, limit, GROUP, WIDTH, IS_GATED, HAS_ROW_SCALE, HAS_HOMES,
            )  # fmt: skip
            count += NUM_BLOCKS


@gluon.jit
def _fill(
    x_desc, tail_desc, packed_desc, scale_desc, x_boxes, tail_smem, packed_smem, scale_smem, full, empty,
    count, first, tile,
    NUM_BLOCKS: gl.constexpr, STAGES: gl.constexpr, BOX: gl.constexpr, BOXES: gl.constexpr,
    IS_FP8: gl.constexpr, HAS_TAIL: gl.constexpr,
):  # fmt: skip
    """Bring one tile's blocks, as stages come free."""
    HALVES: gl.constexpr = 1 if IS_FP8 else 2
    BOX_COLUMNS: gl.constexpr = 128 // HALVES
    ROW_BYTES: gl.constexpr = (BOXES * BOX + (TAIL if HAS_TAIL else 0)) * HALVES * 128
    NUM_BYTES: gl.constexpr = ROW_BYTES + 2 * (32 * 128 + 2 * 32 * 4)
    for n in range(NUM_BLOCKS):
        stage = count % STAGES
        mbarrier.wait(empty.index(stage), ((count // STAGES) & 1) ^ 1)
        barrier = full.index(stage)
        mbarrier.expect(barrier, NUM_BYTES)
        for group in gl.static_range(2):
            row = (tile * NUM_BLOCKS + n) * 2 + group
            part = 2 * stage + group
            tma_load(packed_desc, [row * 32, 0], barrier, packed_smem.index(part))
            tma_load(scale_desc, [row * 8, 0], barrier, scale_smem.index(part))
        for half in gl.static_range(HALVES):
            for box in gl.static_range(BOXES):
                tma_load(
                    x_desc, [first + box * BOX, n * 128 + half * BOX_COLUMNS], barrier,
                    x_boxes.index((HALVES * stage + half) * 4 + box),
                )  # fmt: skip
        if HAS_TAIL:
            tma_load(tail_desc, [first + BOXES * BOX, n * 128], barrier, tail_smem.index(stage))
        count += 1


@gluon.jit
def _produce(
    tiles_ptr, wide_ptr, num_items, x_desc, tail_desc, packed_desc, scale_desc, x_boxes, tail_smem,
    packed_smem, scale_smem, full, empty,
    NUM_COLUMNS: gl.constexpr, NUM_BLOCKS: gl.constexpr, STAGES: gl.constexpr, BOX: gl.constexpr,
    IS_FP8: gl.constexpr, HAS_WIDE: gl.constexpr, WANT_WIDE: gl.constexpr, HAS_TAIL: gl.constexpr,
):  # fmt: skip
    """Runs ahead of the consumers, from one tile into the next."""
    count = 0
    for item in range(gl.program_id(0), num_items, gl.num_programs(0)):
        expert, first, end, column = _tile_of(tiles_ptr, wide_ptr, item, NUM_COLUMNS, HAS_WIDE, WANT_WIDE)
        tile = expert * NUM_COLUMNS + column
        num_rows = end - first
        if HAS_TAIL and num_rows > 4 * BOX:
            _fill(
                x_desc, tail_desc, packed_desc, scale_desc, x_boxes, tail_smem, packed_smem, scale_smem, full,
                empty, count, first, tile, NUM_BLOCKS, STAGES, BOX, 4, IS_FP8, True,
            )  # fmt: skip
            count += NUM_BLOCKS
        elif HAS_TAIL and (num_rows > 2 * BOX and num_rows <= 3 * BOX):
            _fill(
                x_desc, tail_desc, packed_desc, scale_desc, x_boxes, tail_smem, packed_smem, scale_smem, full,
                empty, count, first, tile, NUM_BLOCKS, STAGES, BOX, 3, IS_FP8, False,
            )  # fmt: skip
            count += NUM_BLOCKS
        elif num_rows > 2 * BOX:
            _fill(
                x_desc, tail_desc, packed_desc, scale_desc, x_boxes, tail_smem, packed_smem, scale_smem, full,
                empty, count, first, tile, NUM_BLOCKS, STAGES, BOX, 4, IS_FP8, False,
            )  # fmt: skip
            count += NUM_BLOCKS
        elif num_rows > BOX:
            _fill(
                x_desc, tail_desc, packed_desc, scale_desc, x_boxes, tail_smem, packed_smem, scale_smem, full,
                empty, count, first, tile, NUM_BLOCKS, STAGES, BOX, 2, IS_FP8, False,
            )  # fmt: skip
            count += NUM_BLOCKS
        elif num_rows > 0:
            _fill(
                x_desc, tail_desc, packed_desc, scale_desc, x_boxes, tail_smem, packed_smem, scale_smem, full,
                empty, count, first, tile, NUM_BLOCKS, STAGES, BOX, 1, IS_FP8, False,
            )  # fmt: skip
            count += NUM_BLOCKS


@gluon.jit(do_not_specialize=["slots_per_home"])
def hopper_expert_kernel(
    x_desc, tail_desc, packed_desc, scale_desc, base_ptr, wide_ptr, row_scale_ptr, order_ptr, tiles_ptr,
    route_ptr, out_ptr, homes_ptr, slots_per_home, num_items, limit,
    WIDTH: gl.constexpr, NUM_COLUMNS: gl.constexpr, NUM_BLOCKS: gl.constexpr, STAGES: gl.constexpr,
    BOX: gl.constexpr, IS_GATED: gl.constexpr, IS_FP8: gl.constexpr, HAS_ROW_SCALE: gl.constexpr,
    HAS_HOMES: gl.constexpr, HAS_WIDE: gl.constexpr, WANT_WIDE: gl.constexpr,
):  # fmt: skip
    """``x`` [num_slots, depth] in sorted order, columns in that of ``prepare_experts``, e4m3 or bfloat16.

    Tiles have up to 4 * BOX rows and cost as if they had one, two or four times BOX. In e4m3 and with BOX 64
    some have up to ``TAIL`` rows more, and three boxes cost less than four.
    Gated: activated hidden rows [num_slots, WIDTH] in sorted order; else slots' rows [num_slots, WIDTH] in
    ``out`` or, with homes, at the address of the home of every ``slots_per_home`` slots.
    """
    HALVES: gl.constexpr = 1 if IS_FP8 else 2
    dtype: gl.constexpr = gl.float8e4nv if IS_FP8 else gl.bfloat16
    x_layout: gl.constexpr = gl.NVMMASharedLayout(128, 8 if IS_FP8 else 16, 2)
    packed_layout: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    scale_layout: gl.constexpr = gl.NVMMASharedLayout(32, 32, 2)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    x_smem = gl.allocate_shared_memory(dtype, [HALVES * STAGES, 4 * BOX, 128 // HALVES], x_layout)
    x_boxes = reinterpreted(x_smem, dtype, [HALVES * STAGES * 4, BOX, 128 // HALVES], x_layout)
    HAS_TAIL: gl.constexpr = IS_FP8 and BOX == 64
    tail_smem = x_smem
    if HAS_TAIL:
        tail_smem = gl.allocate_shared_memory(dtype, [STAGES, TAIL, 128], x_layout)
    packed_smem = gl.allocate_shared_memory(gl.uint8, [2 * STAGES, 32, 128], packed_layout)
    scale_smem = gl.allocate_shared_memory(gl.int32, [2 * STAGES, 8, 8], scale_layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    tiles_ptr, wide_ptr, base_ptr, row_scale_ptr, order_ptr, route_ptr, out_ptr, homes_ptr,
                    slots_per_home, num_items, limit, x_smem, tail_smem, packed_smem, scale_smem, full, empty,
                    0, WIDTH, NUM_COLUMNS, NUM_BLOCKS, STAGES, BOX, IS_GATED, IS_FP8, HAS_ROW_SCALE,
                    HAS_HOMES, HAS_WIDE, WANT_WIDE, HAS_TAIL,
                ),
            ),
            (
                _consume,
                (
                    tiles_ptr, wide_ptr, base_ptr, row_scale_ptr, order_ptr, route_ptr, out_ptr, homes_ptr,
                    slots_per_home, num_items, limit, x_smem, tail_smem, packed_smem, scale_smem, full, empty,
                    1, WIDTH, NUM_COLUMNS, NUM_BLOCKS, STAGES, BOX, IS_GATED, IS_FP8, HAS_ROW_SCALE,
                    HAS_HOMES, HAS_WIDE, WANT_WIDE, HAS_TAIL,
                ),
            ),
            (
                _produce,
                (
                    tiles_ptr, wide_ptr, num_items, x_desc, tail_desc, packed_desc, scale_desc, x_boxes,
                    tail_smem, packed_smem, scale_smem, full, empty, NUM_COLUMNS, NUM_BLOCKS, STAGES, BOX,
                    IS_FP8, HAS_WIDE, WANT_WIDE, HAS_TAIL,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip

"""Device code of the grouped products on Hopper, for weights prepared by ``prepare_experts``.

Persistent programs take tiles of 128 weight rows and up to 4 * BOX of an expert's rows in turn. One producer
warp brings rows and packed weights to shared memory; two consumer warpgroups, 64 weight rows each, widen
weights in registers while the tensor cores run. Weights are the left operand, so any number of rows uses one
instruction family with one order of the depth: a row's bits do not depend on how many rows its expert has.

The tensor cores cut a running fp8 sum to about 14 bits, so every 128 products are added in fp32.

Widening is exact. To e4m3, a group's exponent, relative to its row's base, goes into the number's own
exponent (12 of them fit); to bfloat16, any exponent fits. Tiles with a wider row take the second way.
"""

# mypy: ignore-errors
# (The bodies of kernels are another language in Python's clothes.)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

IS_TRITON_3_6 = gl.constexpr(hasattr(gl.shared_memory_descriptor, "_reinterpret"))
"""Later versions gave the method a public name."""
LOG2_E = gl.constexpr(1.4426950408889634)
# A warpgroup's packed words as loaded, and as [row pair, lane of four, group, row of the pair, code].
WORDS = gl.constexpr(gl.BlockedLayout([1, 32], [8, 4], [4, 1], [1, 0]))
UNITS = gl.constexpr(gl.BlockedLayout([1, 1, 4, 2, 4], [8, 4, 1, 1, 1], [4, 1, 1, 1, 1], [4, 3, 2, 1, 0]))
ROW_PAIRS = gl.constexpr(gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(4, UNITS.value))))
# Scale words, [4 * (row of the pair) + warp, lane / 4].
SCALES = gl.constexpr(
    gl.DistributedLinearLayout(
        [[4, 0]], [[0, 0], [0, 0], [0, 1], [0, 2], [0, 4]], [[1, 0], [2, 0]], [], [8, 8]
    )
)
GROUPS = gl.constexpr(gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, gl.SliceLayout(4, UNITS.value)))))

# Widening comes in two parts, because the compiler runs products one by one when anything writes a register
# that a product reads while another product is under way. The first part does the work beside a product, the
# second writes such registers. Eight e2m1 codes -> twice four magnitudes in e4m3, looked up among the eight
# of their group, and twice four bytes whose top bits are the signs.
LOOK_UP_E4M3 = gl.constexpr("""{
    .reg .b32 s, x;
    and.b32 s, $4, 0x77777777;
    prmt.b32 $0, $5, $9, s;
    shr.b32 s, s, 16;
    prmt.b32 $1, $5, $9, s;
    shl.b32 x, $4, 4;
    prmt.b32 $2, $4, x, 0x9D8C;
    prmt.b32 $3, $4, x, 0xBFAE;
}""")
SIGN_E4M3 = gl.constexpr("lop3.b32 $0, $1, $2, 0x80808080, 0xF8;")
# Eight e2m1 codes -> twice four bfloat16 numbers: high and low bytes are looked up apart.
LOOK_UP_BF16 = gl.constexpr("""{
    .reg .b32 s, h, l, p, x, t, u, v, y;
    and.b32 s, $4, 0x77777777;
    shl.b32 x, $4, 4;
    mov.b32 t, 0x3F3F3F00;
    mov.b32 u, 0x40404040;
    mov.b32 v, 0xC0800000;
    mov.b32 y, 0xC0804000;
    prmt.b32 h, t, u, s;
    prmt.b32 p, $4, x, 0x9D8C;
    lop3.b32 h, h, p, 0x80808080, 0xF8;
    prmt.b32 l, v, y, s;
    prmt.b32 $0, l, h, 0x5140;
    prmt.b32 $1, l, h, 0x7362;
    shr.b32 s, s, 16;
    prmt.b32 h, t, u, s;
    prmt.b32 p, $4, x, 0xBFAE;
    lop3.b32 h, h, p, 0x80808080, 0xF8;
    prmt.b32 l, v, y, s;
    prmt.b32 $2, l, h, 0x5140;
    prmt.b32 $3, l, h, 0x7362;
}""")
SCALE_BF16 = gl.constexpr("""{
    mul.rn.bf16x2 $0, $2, $4;
    mul.rn.bf16x2 $1, $3, $4;
}""")
NARROW = gl.constexpr("cvt.rn.bf16x2.f32 $0, $2, $1;")


@gluon.jit
def _reinterpreted(smem, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
    if IS_TRITON_3_6:
        return smem._reinterpret(dtype, shape, layout)
    else:
        return smem.reinterpret(dtype, shape, layout)


@gluon.jit
def _load_units(packed_smem, scale_smem):
    """A warpgroup's codes [32, 4, 4, 2, 4], and the scale bytes of its rows' four groups as words [32, 2]."""
    packed = packed_smem.load(WORDS).reshape([32, 4, 4, 2, 4])
    packed = gl.convert_layout(packed, UNITS, assert_trivial=True)
    scales = scale_smem.load(SCALES).reshape([2, 4, 8]).permute((1, 2, 0)).reshape([32, 2])
    return packed, gl.convert_layout(scales, ROW_PAIRS, assert_trivial=True)


@gluon.jit
def _group_bytes(words):
    """[32, 2] words -> [32, 1, 4, 2, 1]: the byte of each group."""
    words = gl.expand_dims(gl.expand_dims(gl.expand_dims(words, 1), 2), 4)
    shift = 8 * gl.arange(0, 4, GROUPS)
    shift = gl.expand_dims(gl.expand_dims(gl.expand_dims(gl.expand_dims(shift, 0), 1), 3), 4)
    return (words >> shift) & 0xFF


@gluon.jit
def _look_up_e4m3(packed_smem, scale_smem, base):
    """Magnitudes and signs of the first and the second four codes of each word."""
    packed, scales = _load_units(packed_smem, scale_smem)
    exponent = _group_bytes(scales - base)
    small = exponent * 0x08080800 + 0x14100800
    large = exponent * 0x08080808 + 0x24201C18
    types: gl.constexpr = (gl.uint8, gl.uint8, gl.uint8, gl.uint8)
    return gl.inline_asm_elementwise(
        LOOK_UP_E4M3, "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r", [packed, small, large], types, False, 4
    )


@gluon.jit
def _finish_e4m3(first, second, first_sign, second_sign, mma_layout: gl.constexpr):
    """[64, 128] e4m3, columns in the order of ``prepare_experts``."""
    first = gl.inline_asm_elementwise(SIGN_E4M3, "=r,r,r", [first, first_sign], gl.float8e4nv, False, 4)
    second = gl.inline_asm_elementwise(SIGN_E4M3, "=r,r,r", [second, second_sign], gl.float8e4nv, False, 4)
    both = gl.join(first, second).reshape([4, 8, 4, 4, 2, 4, 2]).permute((0, 4, 1, 6, 3, 2, 5))
    return gl.convert_layout(both.reshape([64, 128]), gl.DotOperandLayout(0, mma_layout, 4))


@gluon.jit
def _look_up_bf16(packed_smem, scale_smem):
    """Unscaled numbers of the first and the second four codes of each word, and pairs of their scale."""
    packed, scales = _load_units(packed_smem, scale_smem)
    first, second = gl.inline_asm_elementwise(
        LOOK_UP_BF16, "=&r,=&r,=&r,=&r,r", [packed], (gl.bfloat16, gl.bfloat16), False, 4
    )
    byte = _group_bytes(scales)
    return first, second, gl.where(byte == 0, 0x00400040, byte * 0x00800080)


@gluon.jit
def _finish_bf16(numbers, factor, mma_layout: gl.constexpr):
    """[64, 64] bfloat16: the left or the right half of what ``_finish_e4m3`` gives."""
    scaled = gl.inline_asm_elementwise(
        SCALE_BF16, "=&r,=&r,r,r,r,r,r,r", [numbers, factor], gl.bfloat16, False, 4
    )
    scaled = scaled.reshape([4, 8, 4, 4, 2, 2, 2]).permute((0, 4, 1, 3, 5, 2, 6)).reshape([64, 64])
    return gl.convert_layout(scaled, gl.DotOperandLayout(0, mma_layout, 2))


@gluon.jit
def _advance(
    x_smem, packed_smem, scale_smem, full, empty, count, base, total, pending,
    GROUP: gl.constexpr, STAGES: gl.constexpr, ROWS: gl.constexpr, IS_FIRST: gl.constexpr,
    IS_FP8: gl.constexpr,
):  # fmt: skip
    """Widen a block while the one before is multiplied, wait for that one, start this one.

    bfloat16 products go on adding to ``pending``; fp8 ones are parts of 128 each, added to ``total``.
    """
    mma_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 32 if IS_FP8 else 16])
    stage = count % STAGES
    mbarrier.wait(full.index(stage), (count // STAGES) & 1)
    packed = packed_smem.index(2 * stage + GROUP)
    scales = scale_smem.index(2 * stage + GROUP)
    if IS_FP8:
        first, second, first_sign, second_sign = _look_up_e4m3(packed, scales, base)
    else:
        first, second, factor = _look_up_bf16(packed, scales)
    if not IS_FIRST:
        # Over at once. Its loop keeps the compiler from moving the look-up behind the wait for the product.
        mbarrier.wait(full.index(stage), (count // STAGES) & 1)
        pending = warpgroup_mma_wait(0, deps=[pending])
        mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES), count=1)
    if IS_FP8:
        if not IS_FIRST:
            total = total + pending
        x = x_smem.index(stage).slice(0, ROWS).permute((1, 0))
        left = _finish_e4m3(first, second, first_sign, second_sign, mma_layout)
        return total, warpgroup_mma(left, x, pending, use_acc=False, is_async=True)
    else:
        left = _finish_bf16(first, factor, mma_layout)
        right = _finish_bf16(second, factor, mma_layout)
        x = x_smem.index(2 * stage).slice(0, ROWS).permute((1, 0))
        pending = warpgroup_mma(left, x, pending, use_acc=not IS_FIRST, is_async=True)
        x = x_smem.index(2 * stage + 1).slice(0, ROWS).permute((1, 0))
        return total, warpgroup_mma(right, x, pending, is_async=True)


@gluon.jit
def _multiply(
    x_smem, packed_smem, scale_smem, full, empty, count, base,
    GROUP: gl.constexpr, NUM_BLOCKS: gl.constexpr, STAGES: gl.constexpr, ROWS: gl.constexpr,
    IS_FP8: gl.constexpr,
):  # fmt: skip
    """[64, ROWS] of one tile over the whole depth.

    Two blocks a round, so that a block is widened into other registers than those that are being read.
    """
    gl.static_assert(NUM_BLOCKS % 2 == 0)
    mma_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 32 if IS_FP8 else 16])
    acc = gl.zeros([64, ROWS], gl.float32, mma_layout)
    total = gl.zeros([64, ROWS], gl.float32, mma_layout) if IS_FP8 else 0.0
    total, acc = _advance(
        x_smem, packed_smem, scale_smem, full, empty, count, base, total, acc,
        GROUP, STAGES, ROWS, True, IS_FP8,
    )  # fmt: skip
    for _ in range(NUM_BLOCKS // 2 - 1):
        total, acc = _advance(
            x_smem, packed_smem, scale_smem, full, empty, count + 1, base, total, acc,
            GROUP, STAGES, ROWS, False, IS_FP8,
        )  # fmt: skip
        total, acc = _advance(
            x_smem, packed_smem, scale_smem, full, empty, count + 2, base, total, acc,
            GROUP, STAGES, ROWS, False, IS_FP8,
        )  # fmt: skip
        count += 2
    total, acc = _advance(
        x_smem, packed_smem, scale_smem, full, empty, count + 1, base, total, acc,
        GROUP, STAGES, ROWS, False, IS_FP8,
    )  # fmt: skip
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(empty.index((count + 1) % STAGES), count=1)
    if IS_FP8:
        acc = total + acc
    return acc


@gluon.jit
def _multiply_halves(
    x_smem, packed_smem, scale_smem, full, empty, count, base, never,
    GROUP: gl.constexpr, NUM_BLOCKS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Twice [64, 128] in e4m3: beside two totals, registers hold one part at a time.

    Nothing is under way while a block is widened: the other warpgroup's products fill that time. ``never``
    is false, but the compiler does not know it: else it gives every part registers of its own.
    """
    mma_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    low = gl.zeros([64, 128], gl.float32, mma_layout)
    high = gl.zeros([64, 128], gl.float32, mma_layout)
    part = gl.zeros([64, 128], gl.float32, mma_layout)
    for _ in range(NUM_BLOCKS):
        stage = count % STAGES
        mbarrier.wait(full.index(stage), (count // STAGES) & 1)
        first, second, first_sign, second_sign = _look_up_e4m3(
            packed_smem.index(2 * stage + GROUP), scale_smem.index(2 * stage + GROUP), base
        )
        left = _finish_e4m3(first, second, first_sign, second_sign, mma_layout)
        x = x_smem.index(stage)
        part = warpgroup_mma(left, x.slice(0, 128).permute((1, 0)), part, use_acc=never)
        low = low + part
        part = warpgroup_mma(left, x.slice(128, 128).permute((1, 0)), part, use_acc=never)
        mbarrier.arrive(empty.index(stage), count=1)
        high = high + part
        count += 1
    return low, high


@gluon.jit
def _halves(acc):
    """The left and the right half of the columns; both lie in each thread's registers."""
    rows: gl.constexpr = acc.shape[0]
    columns: gl.constexpr = acc.shape[1]
    return acc.reshape([rows, 2, columns // 2]).permute((0, 2, 1)).split()


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
def _store(
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
    num_items, limit, x_smem, packed_smem, scale_smem, full, empty,
    GROUP: gl.constexpr, WIDTH: gl.constexpr, NUM_COLUMNS: gl.constexpr, NUM_BLOCKS: gl.constexpr,
    STAGES: gl.constexpr, BOX: gl.constexpr, IS_GATED: gl.constexpr, IS_FP8: gl.constexpr,
    HAS_ROW_SCALE: gl.constexpr, HAS_HOMES: gl.constexpr, HAS_WIDE: gl.constexpr, WANT_WIDE: gl.constexpr,
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
        if num_rows > 2 * BOX:
            if IS_FP8 and BOX == 64:
                left, right = _multiply_halves(
                    x_smem, packed_smem, scale_smem, full, empty, count, base, num_items < 0,
                    GROUP, NUM_BLOCKS, STAGES,
                )  # fmt: skip
            else:
                acc = _multiply(
                    x_smem, packed_smem, scale_smem, full, empty, count, base,
                    GROUP, NUM_BLOCKS, STAGES, 4 * BOX, IS_FP8,
                )  # fmt: skip
                left, right = _halves(acc)
            q0, q1 = _halves(left)
            q2, q3 = _halves(right)
            _store(
                q0, factor, row_scale_ptr, order_ptr, route_ptr, out_ptr, homes_ptr, slots_per_home,
                first, end, column, limit, GROUP, WIDTH, IS_GATED, HAS_ROW_SCALE, HAS_HOMES,
            )  # fmt: skip
            _store(
                q1, factor, row_scale_ptr, order_ptr, route_ptr, out_ptr, homes_ptr, slots_per_home,
                first + BOX, end, column, limit, GROUP, WIDTH, IS_GATED, HAS_ROW_SCALE, HAS_HOMES,
            )  # fmt: skip
            _store(
                q2, factor, row_scale_ptr, order_ptr, route_ptr, out_ptr, homes_ptr, slots_per_home,
                first + 2 * BOX, end, column, limit, GROUP, WIDTH, IS_GATED, HAS_ROW_SCALE, HAS_HOMES,
            )  # fmt: skip
            _store(
                q3, factor, row_scale_ptr, order_ptr, route_ptr, out_ptr, homes_ptr, slots_per_home,
                first + 3 * BOX, end, column, limit, GROUP, WIDTH, IS_GATED, HAS_ROW_SCALE, HAS_HOMES,
            )  # fmt: skip
            count += NUM_BLOCKS
        elif num_rows > BOX:
            acc = _multiply(
                x_smem, packed_smem, scale_smem, full, empty, count, base,
                GROUP, NUM_BLOCKS, STAGES, 2 * BOX, IS_FP8,
            )  # fmt: skip
            left, right = _halves(acc)
            _store(
                left, factor, row_scale_ptr, order_ptr, route_ptr, out_ptr, homes_ptr, slots_per_home,
                first, end, column, limit, GROUP, WIDTH, IS_GATED, HAS_ROW_SCALE, HAS_HOMES,
            )  # fmt: skip
            _store(
                right, factor, row_scale_ptr, order_ptr, route_ptr, out_ptr, homes_ptr, slots_per_home,
                first + BOX, end, column, limit, GROUP, WIDTH, IS_GATED, HAS_ROW_SCALE, HAS_HOMES,
            )  # fmt: skip
            count += NUM_BLOCKS
        elif num_rows > 0:
            acc = _multiply(
                x_smem, packed_smem, scale_smem, full, empty, count, base,
                GROUP, NUM_BLOCKS, STAGES, BOX, IS_FP8,
            )  # fmt: skip
            _store(
                acc, factor, row_scale_ptr, order_ptr, route_ptr, out_ptr, homes_ptr, slots_per_home,
                first, end, column, limit, GROUP, WIDTH, IS_GATED, HAS_ROW_SCALE, HAS_HOMES,
            )  # fmt: skip
            count += NUM_BLOCKS


@gluon.jit
def _fill(
    x_desc, packed_desc, scale_desc, x_boxes, packed_smem, scale_smem, full, empty, count, first, tile,
    NUM_BLOCKS: gl.constexpr, STAGES: gl.constexpr, BOX: gl.constexpr, BOXES: gl.constexpr,
    IS_FP8: gl.constexpr,
):  # fmt: skip
    """Bring one tile's blocks, as stages come free."""
    HALVES: gl.constexpr = 1 if IS_FP8 else 2
    BOX_COLUMNS: gl.constexpr = 128 // HALVES
    NUM_BYTES: gl.constexpr = HALVES * BOXES * BOX * 128 + 2 * (32 * 128 + 2 * 32 * 4)
    for n in range(NUM_BLOCKS):
        stage = count % STAGES
        mbarrier.wait(empty.index(stage), ((count // STAGES) & 1) ^ 1)
        barrier = full.index(stage)
        mbarrier.expect(barrier, NUM_BYTES)
        for group in gl.static_range(2):
            row = (tile * NUM_BLOCKS + n) * 2 + group
            part = 2 * stage + group
            tma.async_copy_global_to_shared(packed_desc, [row * 32, 0], barrier, packed_smem.index(part))
            tma.async_copy_global_to_shared(scale_desc, [row * 8, 0], barrier, scale_smem.index(part))
        for half in gl.static_range(HALVES):
            for box in gl.static_range(BOXES):
                tma.async_copy_global_to_shared(
                    x_desc, [first + box * BOX, n * 128 + half * BOX_COLUMNS], barrier,
                    x_boxes.index((HALVES * stage + half) * 4 + box),
                )  # fmt: skip
        count += 1


@gluon.jit
def _produce(
    tiles_ptr, wide_ptr, num_items, x_desc, packed_desc, scale_desc, x_boxes, packed_smem, scale_smem, full,
    empty,
    NUM_COLUMNS: gl.constexpr, NUM_BLOCKS: gl.constexpr, STAGES: gl.constexpr, BOX: gl.constexpr,
    IS_FP8: gl.constexpr,
    HAS_WIDE: gl.constexpr, WANT_WIDE: gl.constexpr,
):  # fmt: skip
    """Runs ahead of the consumers, from one tile into the next."""
    count = 0
    for item in range(gl.program_id(0), num_items, gl.num_programs(0)):
        expert, first, end, column = _tile_of(tiles_ptr, wide_ptr, item, NUM_COLUMNS, HAS_WIDE, WANT_WIDE)
        tile = expert * NUM_COLUMNS + column
        num_rows = end - first
        if num_rows > 2 * BOX:
            _fill(
                x_desc, packed_desc, scale_desc, x_boxes, packed_smem, scale_smem, full, empty, count,
                first, tile, NUM_BLOCKS, STAGES, BOX, 4, IS_FP8,
            )  # fmt: skip
            count += NUM_BLOCKS
        elif num_rows > BOX:
            _fill(
                x_desc, packed_desc, scale_desc, x_boxes, packed_smem, scale_smem, full, empty, count,
                first, tile, NUM_BLOCKS, STAGES, BOX, 2, IS_FP8,
            )  # fmt: skip
            count += NUM_BLOCKS
        elif num_rows > 0:
            _fill(
                x_desc, packed_desc, scale_desc, x_boxes, packed_smem, scale_smem, full, empty, count,
                first, tile, NUM_BLOCKS, STAGES, BOX, 1, IS_FP8,
            )  # fmt: skip
            count += NUM_BLOCKS


@gluon.jit(do_not_specialize=["slots_per_home"])
def hopper_expert_kernel(
    x_desc, packed_desc, scale_desc, base_ptr, wide_ptr, row_scale_ptr, order_ptr, tiles_ptr, route_ptr,
    out_ptr, homes_ptr, slots_per_home, num_items, limit,
    WIDTH: gl.constexpr, NUM_COLUMNS: gl.constexpr, NUM_BLOCKS: gl.constexpr, STAGES: gl.constexpr,
    BOX: gl.constexpr, IS_GATED: gl.constexpr, IS_FP8: gl.constexpr, HAS_ROW_SCALE: gl.constexpr,
    HAS_HOMES: gl.constexpr, HAS_WIDE: gl.constexpr, WANT_WIDE: gl.constexpr,
):  # fmt: skip
    """``x`` [num_slots, depth] in sorted order, columns in that of ``prepare_experts``, e4m3 or bfloat16.

    Tiles have up to 4 * BOX rows and cost as if they had one, two or four times BOX.
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
    x_boxes = _reinterpreted(x_smem, dtype, [HALVES * STAGES * 4, BOX, 128 // HALVES], x_layout)
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
                    slots_per_home, num_items, limit, x_smem, packed_smem, scale_smem, full, empty,
                    0, WIDTH, NUM_COLUMNS, NUM_BLOCKS, STAGES, BOX, IS_GATED, IS_FP8, HAS_ROW_SCALE,
                    HAS_HOMES, HAS_WIDE, WANT_WIDE,
                ),
            ),
            (
                _consume,
                (
                    tiles_ptr, wide_ptr, base_ptr, row_scale_ptr, order_ptr, route_ptr, out_ptr, homes_ptr,
                    slots_per_home, num_items, limit, x_smem, packed_smem, scale_smem, full, empty,
                    1, WIDTH, NUM_COLUMNS, NUM_BLOCKS, STAGES, BOX, IS_GATED, IS_FP8, HAS_ROW_SCALE,
                    HAS_HOMES, HAS_WIDE, WANT_WIDE,
                ),
            ),
            (
                _produce,
                (
                    tiles_ptr, wide_ptr, num_items, x_desc, packed_desc, scale_desc, x_boxes, packed_smem,
                    scale_smem, full, empty, NUM_COLUMNS, NUM_BLOCKS, STAGES, BOX, IS_FP8, HAS_WIDE,
                    WANT_WIDE,
                ),
            ),
        ],
        [4, 1],
        [232, 24],
    )  # fmt: skip

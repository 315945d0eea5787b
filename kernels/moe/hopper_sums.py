"""Device code of what Hopper's grouped products add up: weights widened in registers, times an expert's rows.

The tensor cores cut a running fp8 sum to about 14 bits, so every 128 products are added in fp32.

Widening is exact. To e4m3, a group's exponent, relative to its row's base, goes into the number's own
exponent (12 of them fit); to bfloat16, any exponent fits. It knows stages, not who fills them.
"""

# mypy: ignore-errors
# (The bodies of kernels are another language in Python's clothes.)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

TAIL = gl.constexpr(32)
"""Rows beyond four boxes of 64 that an fp8 tile may have: so few are not worth widening a weight again."""
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
    return gl.inline_asm_elementwise(
        LOOK_UP_E4M3, "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r", [packed, small, large],
        (gl.uint8, gl.uint8, gl.uint8, gl.uint8), False, 4,
    )  # fmt: skip


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
def multiply(
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
def multiply_in_parts(
    x_smem, tail_smem, packed_smem, scale_smem, full, empty, count, base, never,
    GROUP: gl.constexpr, NUM_BLOCKS: gl.constexpr, STAGES: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """In e4m3, 192, 256 or 256 + TAIL rows: the first 128, the second, where there are, and the rest.

    Beside the totals registers hold one part at a time. Nothing is under way while a block is widened: the
    other warpgroup's products fill that time. ``never`` is false, but the compiler does not know it: else it
    gives every part registers of its own.
    """
    HAS_HIGH: gl.constexpr = ROWS >= 256
    REST: gl.constexpr = ROWS % 128
    mma_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    low = gl.zeros([64, 128], gl.float32, mma_layout)
    high = gl.zeros([64, 128], gl.float32, mma_layout)
    part = gl.zeros([64, 128], gl.float32, mma_layout)
    rest = 0.0
    if REST:
        rest_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, REST, 32])
        rest = gl.zeros([64, REST], gl.float32, rest_layout)
        rest_part = gl.zeros([64, REST], gl.float32, rest_layout)
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
        if HAS_HIGH:
            part = warpgroup_mma(left, x.slice(128, 128).permute((1, 0)), part, use_acc=never)
            if REST:
                high = high + part
        if REST:
            left = gl.convert_layout(left, gl.DotOperandLayout(0, rest_layout, 4), assert_trivial=True)
            right = tail_smem.index(stage) if HAS_HIGH else x.slice(128, REST)
            rest_part = warpgroup_mma(left, right.permute((1, 0)), rest_part, use_acc=never)
            mbarrier.arrive(empty.index(stage), count=1)
            rest = rest + rest_part
        else:
            mbarrier.arrive(empty.index(stage), count=1)
            high = high + part
        count += 1
    return low, high, rest

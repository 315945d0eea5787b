"""Device code of the sums of wide linear layers on Hopper: 64 outputs of one warpgroup over all inputs.

The tensor cores keep about 14 bits of a running fp8 sum and cut the rest off, so a sum is made of parts of
at most 128 inputs, added in fp32 in their order. An fp8 weight's scale belongs to 32 x 32 values: a part is
multiplied by it when it is added, and ends where the next scale differs. In an even weight none does within
a part, and no step has to be looked at before it is multiplied. It knows stages, not who fills them.
"""

# mypy: ignore-errors
# (The bodies of kernels are another language in Python's clothes.)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

WARPGROUP_OUT = gl.constexpr(64)


@gluon.jit
def power(exponent):
    """2^exponent in fp32; below the smallest normal number, that number."""
    return ((gl.maximum(exponent, -126) + 127) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def _load_words(words_0, words_1, step, K_TILES: gl.constexpr):
    step = gl.minimum(step, K_TILES - 1)
    return gl.load(words_0 + step), gl.load(words_1 + step)


@gluon.jit
def _add(total, part, unit_0, unit_1, IS_FUSED: gl.constexpr = False):
    """Move a finished part to fp32. A product with a power of two is exact, so both ways give the same bits.

    Two branches that end alike get one common end, for which the compiler moves every part to other
    registers; so each branch has a way of its own.
    """
    upper = gl.arange(0, WARPGROUP_OUT, gl.SliceLayout(1, total.type.layout)) >= 32
    factor = gl.where(upper, power(unit_1 - 127), power(unit_0 - 127))[:, None]
    if IS_FUSED:
        return gl.fma(part, factor.broadcast_to(part.shape), total)
    else:
        return total + part * factor


@gluon.jit
def _is_even(word_0, word_1):
    """One scale for all four slices of a step."""
    return (word_0 == (word_0 & 255) * 0x01010101) & (word_1 == (word_1 & 255) * 0x01010101)


@gluon.jit
def _uneven_step(total, part, weight, x, word_0, word_1, never):
    """A step of several scales: each run of one scale is a part of its own. Right for one scale, but slow."""
    unit_0 = word_0 & 255
    unit_1 = word_1 & 255
    part = warpgroup_mma(weight.slice(0, 32, 1), x.slice(0, 32, 0), part, use_acc=never)
    for number in gl.static_range(1, 4):
        next_0 = (word_0 >> (8 * number)) & 255
        next_1 = (word_1 >> (8 * number)) & 255
        is_same = (next_0 == unit_0) & (next_1 == unit_1)
        if not is_same:
            total = _add(total, part, unit_0, unit_1, True)
        left = weight.slice(number * 32, 32, 1)
        part = warpgroup_mma(left, x.slice(number * 32, 32, 0), part, use_acc=is_same)
        unit_0 = next_0
        unit_1 = next_1
    return _add(total, part, unit_0, unit_1, True), part


@gluon.jit
def _lone_step(total, part, weight, x, word_0, word_1, never, IS_EVEN: gl.constexpr):
    """A step's part, and nothing beside it: the other warpgroup's products fill the wait.

    ``never`` is false, but the compiler does not know it: else it gives every part registers of its own.
    """
    if IS_EVEN or _is_even(word_0, word_1):
        part = warpgroup_mma(weight, x, part, use_acc=never)
        total = _add(total, part, word_0 & 255, word_1 & 255)
    else:
        total, part = _uneven_step(total, part, weight, x, word_0, word_1, never)
    return total, part


@gluon.jit
def _operands(x_smem, weight_smem, full, count, FIRST: gl.constexpr):
    stages: gl.constexpr = x_smem.shape[0]
    stage = count % stages
    mbarrier.wait(full.index(stage), (count // stages) & 1)
    return weight_smem.index(stage).slice(FIRST, WARPGROUP_OUT), x_smem.index(stage).permute((1, 0))


@gluon.jit
def sum_pairs(
    x_smem, weight_smem, full, empty, count, words_0, words_1, never,
    K_TILES: gl.constexpr, FIRST: gl.constexpr, IS_EVEN: gl.constexpr,
):  # fmt: skip
    """[64, rows] over all inputs, for up to 128 rows: two steps are under way together.

    Neither outlives the branch that started it, or the compiler would run all products one by one. No
    branch within the other branch multiplies a whole step: ptxas 12.8 gave that the descriptors of this one.
    """
    stages: gl.constexpr = x_smem.shape[0]
    block_rows: gl.constexpr = x_smem.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, block_rows, 32])
    total = gl.zeros([WARPGROUP_OUT, block_rows], gl.float32, layout)
    part = gl.zeros([WARPGROUP_OUT, block_rows], gl.float32, layout)
    other = gl.zeros([WARPGROUP_OUT, block_rows], gl.float32, layout)
    # Words are asked for two pairs ahead.
    word_0, word_1 = _load_words(words_0, words_1, 0, K_TILES)
    other_0, other_1 = _load_words(words_0, words_1, 1, K_TILES)
    later_0, later_1 = _load_words(words_0, words_1, 2, K_TILES)
    later_other_0, later_other_1 = _load_words(words_0, words_1, 3, K_TILES)
    for pair in range(K_TILES // 2):
        last_0, last_1 = _load_words(words_0, words_1, 2 * pair + 4, K_TILES)
        last_other_0, last_other_1 = _load_words(words_0, words_1, 2 * pair + 5, K_TILES)
        weight, x = _operands(x_smem, weight_smem, full, count, FIRST)
        other_weight, other_x = _operands(x_smem, weight_smem, full, count + 1, FIRST)
        if IS_EVEN or _is_even(word_0, word_1) & _is_even(other_0, other_1):
            first = warpgroup_mma(weight, x, part, use_acc=never, is_async=True)
            second = warpgroup_mma(other_weight, other_x, other, use_acc=never, is_async=True)
            part, second = warpgroup_mma_wait(1, deps=[first, second])
            mbarrier.arrive(empty.index(count % stages), count=1)
            total = _add(total, part, word_0 & 255, word_1 & 255)
            other = warpgroup_mma_wait(0, deps=[second])
            mbarrier.arrive(empty.index((count + 1) % stages), count=1)
            total = _add(total, other, other_0 & 255, other_1 & 255)
        else:
            total, part = _uneven_step(total, part, weight, x, word_0, word_1, never)
            mbarrier.arrive(empty.index(count % stages), count=1)
            total, other = _uneven_step(total, other, other_weight, other_x, other_0, other_1, never)
            mbarrier.arrive(empty.index((count + 1) % stages), count=1)
        count += 2
        word_0 = later_0
        word_1 = later_1
        other_0 = later_other_0
        other_1 = later_other_1
        later_0 = last_0
        later_1 = last_1
        later_other_0 = last_other_0
        later_other_1 = last_other_1
    if K_TILES % 2 == 1:
        weight, x = _operands(x_smem, weight_smem, full, count, FIRST)
        total, part = _lone_step(total, part, weight, x, word_0, word_1, never, IS_EVEN)
        mbarrier.arrive(empty.index(count % stages), count=1)
    return total


@gluon.jit
def sum_halves(
    x_smem, weight_smem, full, empty, count, words_0, words_1, never,
    K_TILES: gl.constexpr, FIRST: gl.constexpr,
):  # fmt: skip
    """Twice [64, 128] over all inputs, for 256 rows, of which registers hold one part's half at a time.

    Of an even weight ``sum_quarters`` does the same faster.
    """
    stages: gl.constexpr = x_smem.shape[0]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    low = gl.zeros([WARPGROUP_OUT, 128], gl.float32, layout)
    high = gl.zeros([WARPGROUP_OUT, 128], gl.float32, layout)
    part = gl.zeros([WARPGROUP_OUT, 128], gl.float32, layout)
    # Words are asked for three steps ahead.
    word_0, word_1 = _load_words(words_0, words_1, 0, K_TILES)
    later_0, later_1 = _load_words(words_0, words_1, 1, K_TILES)
    last_0, last_1 = _load_words(words_0, words_1, 2, K_TILES)
    for step in range(K_TILES):
        new_0, new_1 = _load_words(words_0, words_1, step + 3, K_TILES)
        stage = count % stages
        mbarrier.wait(full.index(stage), (count // stages) & 1)
        weight = weight_smem.index(stage).slice(FIRST, WARPGROUP_OUT)
        x = x_smem.index(stage)
        left = x.slice(0, 128).permute((1, 0))
        low, part = _lone_step(low, part, weight, left, word_0, word_1, never, False)
        right = x.slice(128, 128).permute((1, 0))
        high, part = _lone_step(high, part, weight, right, word_0, word_1, never, False)
        mbarrier.arrive(empty.index(stage), count=1)
        count += 1
        word_0 = later_0
        word_1 = later_1
        later_0 = last_0
        later_1 = last_1
        last_0 = new_0
        last_1 = new_1
    return low, high


@gluon.jit
def _quarter(weight, x, part, never, NUMBER: gl.constexpr):
    """Start one quarter's part of a step."""
    rows: gl.constexpr = x.shape[0] // 4
    right = x.slice(NUMBER * rows, rows).permute((1, 0))
    return warpgroup_mma(weight, right, part, use_acc=never, is_async=True)


@gluon.jit
def sum_quarters(
    x_smem, weight_smem, full, empty, count, words_0, words_1, never,
    K_TILES: gl.constexpr, FIRST: gl.constexpr,
):  # fmt: skip
    """Four times [64, 64] over all inputs, for 256 rows of an even weight.

    A quarter's part is added while the next one is multiplied. Weights are brought to registers once a step,
    or each quarter would read them from shared memory anew.
    """
    stages: gl.constexpr = x_smem.shape[0]
    rows: gl.constexpr = x_smem.shape[1] // 4
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, rows, 32])
    total_0 = gl.zeros([WARPGROUP_OUT, rows], gl.float32, layout)
    total_1 = gl.zeros([WARPGROUP_OUT, rows], gl.float32, layout)
    total_2 = gl.zeros([WARPGROUP_OUT, rows], gl.float32, layout)
    total_3 = gl.zeros([WARPGROUP_OUT, rows], gl.float32, layout)
    part = gl.zeros([WARPGROUP_OUT, rows], gl.float32, layout)
    other = gl.zeros([WARPGROUP_OUT, rows], gl.float32, layout)
    # Words are asked for three steps ahead.
    word_0, word_1 = _load_words(words_0, words_1, 0, K_TILES)
    later_0, later_1 = _load_words(words_0, words_1, 1, K_TILES)
    last_0, last_1 = _load_words(words_0, words_1, 2, K_TILES)
    for step in range(K_TILES):
        new_0, new_1 = _load_words(words_0, words_1, step + 3, K_TILES)
        stage = count % stages
        mbarrier.wait(full.index(stage), (count // stages) & 1)
        weight = weight_smem.index(stage).slice(FIRST, WARPGROUP_OUT).load(gl.DotOperandLayout(0, layout, 4))
        x = x_smem.index(stage)
        unit_0 = word_0 & 255
        unit_1 = word_1 & 255
        first = _quarter(weight, x, part, never, 0)
        second = _quarter(weight, x, other, never, 1)
        part, second = warpgroup_mma_wait(1, deps=[first, second])
        total_0 = _add(total_0, part, unit_0, unit_1)
        third = _quarter(weight, x, part, never, 2)
        other, third = warpgroup_mma_wait(1, deps=[second, third])
        total_1 = _add(total_1, other, unit_0, unit_1)
        fourth = _quarter(weight, x, other, never, 3)
        part, fourth = warpgroup_mma_wait(1, deps=[third, fourth])
        total_2 = _add(total_2, part, unit_0, unit_1)
        other = warpgroup_mma_wait(0, deps=[fourth])
        mbarrier.arrive(empty.index(stage), count=1)
        total_3 = _add(total_3, other, unit_0, unit_1)
        count += 1
        word_0 = later_0
        word_1 = later_1
        later_0 = last_0
        later_1 = last_1
        last_0 = new_0
        last_1 = new_1
    return total_0, total_1, total_2, total_3


@gluon.jit
def sum_wide(x_smem, weight_smem, full, empty, count, K_TILES: gl.constexpr, FIRST: gl.constexpr):
    """[64, rows] of bfloat16 operands, whose sums are fp32: one chain."""
    stages: gl.constexpr = x_smem.shape[0]
    block_rows: gl.constexpr = x_smem.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, block_rows, 16])
    acc = gl.zeros([WARPGROUP_OUT, block_rows], gl.float32, layout)
    for step in range(K_TILES):
        stage = count % stages
        mbarrier.wait(full.index(stage), (count // stages) & 1)
        weight = weight_smem.index(stage).slice(FIRST, WARPGROUP_OUT)
        pending = warpgroup_mma(weight, x_smem.index(stage).permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=[pending])
        # One step's products may still be under way: the stage before is free.
        if step > 0:
            mbarrier.arrive(empty.index((count + stages - 1) % stages), count=1)
        count += 1
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(empty.index((count + stages - 1) % stages), count=1)
    return acc

"""Device code of wide linear layers on Hopper: fp8 or bfloat16 operands, each tile of them copied whole.

Programs take tiles in turn. One producer warp asks for tiles of both operands ahead of time; each group of
four consumer warps multiplies 64 outputs, one chain over all inputs. Weights are the left operand, so that
few rows make a narrow tile of the same instruction.

An fp8 weight's scale belongs to 32 x 32 values and one instruction reads 32 inputs, so the running sum is
kept in units of the current scale and moved, which is exact, where the next scale differs.
"""

# mypy: ignore-errors
# ruff: noqa: RUF005
# (The bodies of kernels are another language in Python's clothes.)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

WARPGROUP_OUT = gl.constexpr(64)
MAX_FALL = gl.constexpr(64)
"""A scale this many powers of two below the running one adds nothing that a sum could hold."""


@gluon.jit
def _place(tile, num_row_tiles, OUT_TILES: gl.constexpr, BAND: gl.constexpr):
    """Tiles that run together share operands: bands of output tiles, rows within."""
    band = tile // (BAND * num_row_tiles)
    size = gl.minimum(BAND, OUT_TILES - band * BAND)
    within = tile - band * BAND * num_row_tiles
    return band * BAND + within % size, within // size


@gluon.jit
def _produce(
    x_desc, weight_desc, x_smem, weight_smem, full, empty, num_row_tiles,
    OUT_TILES: gl.constexpr, K_TILES: gl.constexpr, GROUP_OUT: gl.constexpr, BAND: gl.constexpr,
):  # fmt: skip
    """Ask for the operands of every step of every tile, as far ahead as there are stages."""
    stages: gl.constexpr = x_smem.shape[0]
    block_k: gl.constexpr = x_smem.shape[2]
    num_bytes: gl.constexpr = x_desc.block_type.nbytes + weight_desc.block_type.nbytes
    count = 0
    for tile in range(gl.program_id(0), num_row_tiles * OUT_TILES, gl.num_programs(0)):
        out_tile, row_tile = _place(tile, num_row_tiles, OUT_TILES, BAND)
        first_out = out_tile * weight_smem.shape[1]
        first_row = row_tile * x_smem.shape[1]
        first_in = first_out // GROUP_OUT * (K_TILES * block_k)
        for step in range(K_TILES):
            stage = count % stages
            ready = full.index(stage)
            mbarrier.wait(empty.index(stage), ((count // stages) & 1) ^ 1)
            mbarrier.expect(ready, num_bytes)
            tma.async_copy_global_to_shared(
                x_desc, [first_row, first_in + step * block_k], ready, x_smem.index(stage)
            )
            tma.async_copy_global_to_shared(
                weight_desc, [first_out, step * block_k], ready, weight_smem.index(stage)
            )
            count += 1


@gluon.jit
def _power(exponent):
    """2^exponent in fp32; below the smallest normal number, that number."""
    return ((gl.maximum(exponent, -126) + 127) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def _load_words(words_0, words_1, step, K_TILES: gl.constexpr):
    step = gl.minimum(step, K_TILES - 1)
    return gl.load(words_0 + step), gl.load(words_1 + step)


@gluon.jit
def _scaled_step(acc, weight, x, word_0, word_1, unit_0, unit_1):
    """A step whose scales differ from the running units: instruction by instruction."""
    acc = warpgroup_mma_wait(0, deps=[acc])
    upper = gl.arange(0, WARPGROUP_OUT, gl.SliceLayout(1, acc.type.layout)) >= 32
    for part in gl.static_range(4):
        next_0 = gl.maximum((word_0 >> (8 * part)) & 255, unit_0 - MAX_FALL)
        next_1 = gl.maximum((word_1 >> (8 * part)) & 255, unit_1 - MAX_FALL)
        if (next_0 != unit_0) | (next_1 != unit_1):
            acc = acc * gl.where(upper, _power(unit_1 - next_1), _power(unit_0 - next_0))[:, None]
        acc = warpgroup_mma(weight.slice(part * 32, 32, 1), x.slice(part * 32, 32, 0), acc)
        unit_0 = next_0
        unit_1 = next_1
    return acc, unit_0, unit_1


@gluon.jit
def _multiply(
    out_desc, scale_ptr, row_scale_ptr, x_smem, weight_smem, out_smem, full, empty, num_rows, num_row_tiles,
    OUT_TILES: gl.constexpr, K_TILES: gl.constexpr, OUT: gl.constexpr, BAND: gl.constexpr,
    WARPGROUP: gl.constexpr,
):  # fmt: skip
    """Multiply, scale, round and store 64 outputs of each tile. Scales come as words of four, one a step."""
    stages: gl.constexpr = x_smem.shape[0]
    block_rows: gl.constexpr = x_smem.shape[1]
    is_fp8: gl.constexpr = x_smem.dtype == gl.float8e4nv
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, block_rows, 32 if is_fp8 else 16])
    count = 0
    for tile in range(gl.program_id(0), num_row_tiles * OUT_TILES, gl.num_programs(0)):
        out_tile, row_tile = _place(tile, num_row_tiles, OUT_TILES, BAND)
        first_out = out_tile * weight_smem.shape[1] + WARPGROUP * WARPGROUP_OUT
        first_row = row_tile * block_rows
        acc = gl.zeros([WARPGROUP_OUT, block_rows], gl.float32, layout)
        if is_fp8:
            # A tile may reach past the last output; there any scale will do.
            # Words are asked for three steps ahead.
            words_0 = scale_ptr + gl.minimum(first_out // 32, OUT // 32 - 1) * K_TILES
            words_1 = scale_ptr + gl.minimum(first_out // 32 + 1, OUT // 32 - 1) * K_TILES
            word_0, word_1 = _load_words(words_0, words_1, 0, K_TILES)
            later_0, later_1 = _load_words(words_0, words_1, 1, K_TILES)
            last_0, last_1 = _load_words(words_0, words_1, 2, K_TILES)
            unit_0 = word_0 & 255
            unit_1 = word_1 & 255
        for step in range(K_TILES):
            stage = count % stages
            if is_fp8:
                new_0, new_1 = _load_words(words_0, words_1, step + 3, K_TILES)
            mbarrier.wait(full.index(stage), (count // stages) & 1)
            weight = weight_smem.index(stage).slice(WARPGROUP * WARPGROUP_OUT, WARPGROUP_OUT)
            x = x_smem.index(stage).permute((1, 0))
            if is_fp8:
                if (word_0 == unit_0 * 0x01010101) & (word_1 == unit_1 * 0x01010101):
                    pending = warpgroup_mma(weight, x, acc, is_async=True)
                    acc = warpgroup_mma_wait(1, deps=[pending])
                else:
                    acc, unit_0, unit_1 = _scaled_step(acc, weight, x, word_0, word_1, unit_0, unit_1)
                word_0 = later_0
                word_1 = later_1
                later_0 = last_0
                later_1 = last_1
                last_0 = new_0
                last_1 = new_1
            else:
                pending = warpgroup_mma(weight, x, acc, is_async=True)
                acc = warpgroup_mma_wait(1, deps=[pending])
            # One step's products may still be under way: the stage before is free.
            if step > 0:
                mbarrier.arrive(empty.index((count - 1) % stages), count=1)
            count += 1
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(empty.index((count - 1) % stages), count=1)
        if is_fp8:
            upper = gl.arange(0, WARPGROUP_OUT, gl.SliceLayout(1, layout)) >= 32
            row = first_row + gl.arange(0, block_rows, gl.SliceLayout(0, layout))
            row_scale = gl.load(row_scale_ptr + row, mask=row < num_rows, other=127).to(gl.int32)
            acc = acc * gl.where(upper, _power(unit_1 - 127), _power(unit_0 - 127))[:, None]
            acc = acc * _power(row_scale - 127)[None, :]
        tma.store_wait(0)
        out_smem.store(acc.to(gl.bfloat16).permute((1, 0)))
        fence_async_shared()
        tma.async_copy_shared_to_global(out_desc, [first_row, first_out], out_smem)
    tma.store_wait(0)


@gluon.jit
def hopper_linear_kernel(
    x_desc, weight_desc, out_desc, scale_ptr, row_scale_ptr, num_rows,
    OUT: gl.constexpr, K_TILES: gl.constexpr, GROUP_OUT: gl.constexpr, STAGES: gl.constexpr,
    BAND: gl.constexpr,
):  # fmt: skip
    """One warpgroup of consumers for each 64 outputs of a tile: one or two."""
    x_block: gl.constexpr = x_desc.block_type.shape
    weight_block: gl.constexpr = weight_desc.block_type.shape
    warpgroups: gl.constexpr = weight_block[0] // WARPGROUP_OUT
    out_tiles: gl.constexpr = (OUT + weight_block[0] - 1) // weight_block[0]
    num_row_tiles = gl.cdiv(num_rows, x_block[0])
    x_smem = gl.allocate_shared_memory(x_desc.dtype, [STAGES] + x_block, x_desc.layout)
    weight_smem = gl.allocate_shared_memory(weight_desc.dtype, [STAGES] + weight_block, weight_desc.layout)
    out_smem = gl.allocate_shared_memory(
        gl.bfloat16, [warpgroups, x_block[0], WARPGROUP_OUT], out_desc.layout
    )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=warpgroups)
    fence_async_shared()
    if warpgroups == 2:
        gl.warp_specialize(
            [
                (
                    _multiply,
                    (
                        out_desc, scale_ptr, row_scale_ptr, x_smem, weight_smem, out_smem.index(0),
                        full, empty, num_rows, num_row_tiles, out_tiles, K_TILES, OUT, BAND, 0,
                    ),
                ),
                (
                    _multiply,
                    (
                        out_desc, scale_ptr, row_scale_ptr, x_smem, weight_smem, out_smem.index(1),
                        full, empty, num_rows, num_row_tiles, out_tiles, K_TILES, OUT, BAND, 1,
                    ),
                ),
                (
                    _produce,
                    (
                        x_desc, weight_desc, x_smem, weight_smem, full, empty, num_row_tiles,
                        out_tiles, K_TILES, GROUP_OUT, BAND,
                    ),
                ),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (
                    _multiply,
                    (
                        out_desc, scale_ptr, row_scale_ptr, x_smem, weight_smem, out_smem.index(0),
                        full, empty, num_rows, num_row_tiles, out_tiles, K_TILES, OUT, BAND, 0,
                    ),
                ),
                (
                    _produce,
                    (
                        x_desc, weight_desc, x_smem, weight_smem, full, empty, num_row_tiles,
                        out_tiles, K_TILES, GROUP_OUT, BAND,
                    ),
                ),
            ],
            [1],
            [24],
        )  # fmt: skip

"""Device code of wide linear layers on Hopper: fp8 or bfloat16 operands, each tile of them copied whole.

Programs take tiles in turn. One producer warp asks for tiles of both operands ahead of time; each group of
four consumer warps multiplies 64 outputs over all inputs. Weights are the left operand, so that
few rows make a narrow tile of the same instruction. ``hopper_sums.py`` has the sums.
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
)

from kernels.gluon_names import tma_load, tma_store
from kernels.linear.hopper_sums import (
    WARPGROUP_OUT,
    power,
    sum_halves,
    sum_pairs,
    sum_quarters,
    sum_wide,
)

STORE_ROWS = gl.constexpr(64)
"""Rows of a box: of what is stored together. Where a tile has several, two are on their way at a time."""
PREFETCH = gl.constexpr("prefetch.global.L1 [$1]; mov.b32 $0, 0;")


@gluon.jit
def _place(tile, num_row_tiles, OUT_TILES: gl.constexpr, BAND: gl.constexpr):
    """Tiles that run together share operands: bands of output tiles, rows within."""
    band = tile // (BAND * num_row_tiles)
    size = gl.minimum(BAND, OUT_TILES - band * BAND)
    within = tile - band * BAND * num_row_tiles
    return band * BAND + within % size, within // size


@gluon.jit
def _prefetch_scales(scale_ptr, first, LENGTH: gl.constexpr, END: gl.constexpr):
    """Words of a tile into the cache, 32 bytes a lane: consumers ask for them one step after another."""
    lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    word = gl.minimum(first + gl.minimum(8 * lane, LENGTH - 1), END - 1)
    gl.inline_asm_elementwise(PREFETCH, "=r,l", [(scale_ptr + word).to(gl.int64)], gl.int32, False, 1)


@gluon.jit
def _produce(
    x_desc, weight_desc, scale_ptr, x_smem, weight_smem, full, empty, num_row_tiles,
    OUT_TILES: gl.constexpr, K_TILES: gl.constexpr, OUT: gl.constexpr, GROUP_OUT: gl.constexpr,
    BAND: gl.constexpr,
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
        if x_smem.dtype == gl.float8e4nv:
            length: gl.constexpr = weight_smem.shape[1] // 32 * K_TILES
            _prefetch_scales(scale_ptr, first_out // 32 * K_TILES, length, OUT // 32 * K_TILES)
        for step in range(K_TILES):
            stage = count % stages
            ready = full.index(stage)
            mbarrier.wait(empty.index(stage), ((count // stages) & 1) ^ 1)
            mbarrier.expect(ready, num_bytes)
            tma_load(x_desc, [first_row, first_in + step * block_k], ready, x_smem.index(stage))
            tma_load(weight_desc, [first_out, step * block_k], ready, weight_smem.index(stage))
            count += 1


@gluon.jit
def _halves(acc):
    """The left and the right half of the columns; both lie in each thread's registers."""
    return acc.reshape([acc.shape[0], 2, acc.shape[1] // 2]).permute((0, 2, 1)).split()


@gluon.jit
def _store(acc, out_desc, out_smem, row_scale_ptr, first_row, num_rows, first_out, PENDING: gl.constexpr = 1):
    """Scale, round and store a box of rows, while ``PENDING`` boxes before it are still on their way."""
    if row_scale_ptr is not None:
        row = first_row + gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout))
        row_scale = gl.load(row_scale_ptr + row, mask=row < num_rows, other=127).to(gl.int32)
        acc = acc * power(row_scale - 127)[None, :]
    tma.store_wait(PENDING)
    out_smem.store(acc.to(gl.bfloat16).permute((1, 0)))
    fence_async_shared()
    tma_store(out_desc, [first_row, first_out], out_smem)


@gluon.jit
def _multiply(
    out_desc, scale_ptr, row_scale_ptr, x_smem, weight_smem, out_smem, full, empty, num_rows, num_row_tiles,
    OUT_TILES: gl.constexpr, K_TILES: gl.constexpr, OUT: gl.constexpr, BAND: gl.constexpr,
    IS_EVEN: gl.constexpr, WARPGROUP: gl.constexpr,
):  # fmt: skip
    """Multiply and store 64 outputs of each tile. Scales come as words of four, one a step."""
    block_rows: gl.constexpr = x_smem.shape[1]
    is_fp8: gl.constexpr = x_smem.dtype == gl.float8e4nv
    FIRST: gl.constexpr = WARPGROUP * WARPGROUP_OUT
    box_0 = out_smem.index(WARPGROUP * 2 if block_rows > STORE_ROWS else WARPGROUP)
    box_1 = out_smem.index(WARPGROUP * 2 + 1 if block_rows > STORE_ROWS else WARPGROUP)
    count = 0
    for tile in range(gl.program_id(0), num_row_tiles * OUT_TILES, gl.num_programs(0)):
        out_tile, row_tile = _place(tile, num_row_tiles, OUT_TILES, BAND)
        first_out = out_tile * weight_smem.shape[1] + FIRST
        first_row = row_tile * block_rows
        if is_fp8:
            # A tile may reach past the last output; there any scale will do.
            words_0 = scale_ptr + gl.minimum(first_out // 32, OUT // 32 - 1) * K_TILES
            words_1 = scale_ptr + gl.minimum(first_out // 32 + 1, OUT // 32 - 1) * K_TILES
        if block_rows == 256:
            if is_fp8 and IS_EVEN:
                q0, q1, q2, q3 = sum_quarters(
                    x_smem, weight_smem, full, empty, count, words_0, words_1, num_rows < 0, K_TILES, FIRST
                )
            else:
                if is_fp8:
                    low, high = sum_halves(
                        x_smem, weight_smem, full, empty, count, words_0, words_1, num_rows < 0, K_TILES,
                        FIRST,
                    )  # fmt: skip
                else:
                    acc = sum_wide(x_smem, weight_smem, full, empty, count, K_TILES, FIRST)
                    low, high = _halves(acc)
                q0, q1 = _halves(low)
                q2, q3 = _halves(high)
            _store(q0, out_desc, box_0, row_scale_ptr, first_row, num_rows, first_out)
            _store(q1, out_desc, box_1, row_scale_ptr, first_row + 64, num_rows, first_out)
            _store(q2, out_desc, box_0, row_scale_ptr, first_row + 128, num_rows, first_out)
            _store(q3, out_desc, box_1, row_scale_ptr, first_row + 192, num_rows, first_out)
        else:
            if is_fp8:
                acc = sum_pairs(
                    x_smem, weight_smem, full, empty, count, words_0, words_1, num_rows < 0, K_TILES, FIRST,
                    IS_EVEN,
                )  # fmt: skip
            else:
                acc = sum_wide(x_smem, weight_smem, full, empty, count, K_TILES, FIRST)
            if block_rows == 128:
                low, high = _halves(acc)
                _store(low, out_desc, box_0, row_scale_ptr, first_row, num_rows, first_out)
                _store(high, out_desc, box_1, row_scale_ptr, first_row + 64, num_rows, first_out)
            else:
                _store(acc, out_desc, box_0, row_scale_ptr, first_row, num_rows, first_out, 0)
        count += K_TILES
    tma.store_wait(0)


@gluon.jit
def hopper_linear_kernel(
    x_desc, weight_desc, out_desc, scale_ptr, row_scale_ptr, num_rows,
    OUT: gl.constexpr, K_TILES: gl.constexpr, GROUP_OUT: gl.constexpr, STAGES: gl.constexpr,
    BAND: gl.constexpr, IS_EVEN: gl.constexpr,
):  # fmt: skip
    """One warpgroup of consumers for each 64 outputs of a tile: one or two."""
    x_block: gl.constexpr = x_desc.block_type.shape
    weight_block: gl.constexpr = weight_desc.block_type.shape
    warpgroups: gl.constexpr = weight_block[0] // WARPGROUP_OUT
    out_tiles: gl.constexpr = (OUT + weight_block[0] - 1) // weight_block[0]
    num_row_tiles = gl.cdiv(num_rows, x_block[0])
    x_smem = gl.allocate_shared_memory(x_desc.dtype, [STAGES] + x_block, x_desc.layout)
    weight_smem = gl.allocate_shared_memory(weight_desc.dtype, [STAGES] + weight_block, weight_desc.layout)
    boxes: gl.constexpr = 2 if x_block[0] > STORE_ROWS else 1
    out_smem = gl.allocate_shared_memory(
        gl.bfloat16, [warpgroups * boxes] + out_desc.block_type.shape, out_desc.layout
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
                        out_desc, scale_ptr, row_scale_ptr, x_smem, weight_smem, out_smem,
                        full, empty, num_rows, num_row_tiles, out_tiles, K_TILES, OUT, BAND, IS_EVEN, 0,
                    ),
                ),
                (
                    _multiply,
                    (
                        out_desc, scale_ptr, row_scale_ptr, x_smem, weight_smem, out_smem,
                        full, empty, num_rows, num_row_tiles, out_tiles, K_TILES, OUT, BAND, IS_EVEN, 1,
                    ),
                ),
                (
                    _produce,
                    (
                        x_desc, weight_desc, scale_ptr, x_smem, weight_smem, full, empty, num_row_tiles,
                        out_tiles, K_TILES, OUT, GROUP_OUT, BAND,
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
                        out_desc, scale_ptr, row_scale_ptr, x_smem, weight_smem, out_smem,
                        full, empty, num_rows, num_row_tiles, out_tiles, K_TILES, OUT, BAND, IS_EVEN, 0,
                    ),
                ),
                (
                    _produce,
                    (
                        x_desc, weight_desc, scale_ptr, x_smem, weight_smem, full, empty, num_row_tiles,
                        out_tiles, K_TILES, OUT, GROUP_OUT, BAND,
                    ),
                ),
            ],
            [1],
            [24],
        )  # fmt: skip

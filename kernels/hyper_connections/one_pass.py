"""Device code of the hyper-connections' pass over bfloat16 streams, with the mix's product inside.

A warp holds sixteen rows of the four streams in the tensor cores' layout: what it reads (16 bytes a lane),
expands, rounds and stores is what it multiplies. The product adds up 32 columns in an order of its own, the
same for streams and weights. Streams and weights of the next 32 columns are on their way to shared memory
meanwhile. Needs widths that are multiples of 32; ``kernel.py`` has the rest.
"""

# mypy: ignore-errors
# (The bodies of kernels are another language in Python's clothes.)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from kernels.gluon_names import copy_to_shared, thread_barrier

ROWS = gl.constexpr(64)
STEP = gl.constexpr(32)
NUM_OUTPUTS = gl.constexpr(24)
PARTIAL_WIDTH = gl.constexpr(32)
# A lane holds 8 neighbouring columns of rows r and r + 8; four lanes hold the 32 columns of a step.
TILE = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [8, 0]],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 32],
    )
)
WEIGHT_TILE = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4]],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[0, 0], [0, 0]],
        block_bases=[],
        shape=[8, 32],
    )
)
PRODUCT = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8]))
LEFT = gl.constexpr(gl.DotOperandLayout(0, PRODUCT, 2))
RIGHT = gl.constexpr(gl.DotOperandLayout(1, PRODUCT, 2))
ROW = gl.constexpr(gl.SliceLayout(1, TILE))
# Sixteen bytes a thread of what is copied: 32 rows of 32 columns at once.
COPY = gl.constexpr(gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0]))
SHARED = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 1, [1, 0]))
STAGES = gl.constexpr(2)
"""Of shared memory, so that two programs fit on a multiprocessor."""
# Two at a time: a lone conversion runs at a quarter of the rate.
NARROW = gl.constexpr("cvt.rn.bf16x2.f32 $0, $2, $1;")


@gluon.jit
def _left_operand(x):
    """A tile of streams as it lies in registers, its columns renamed."""
    split = x.reshape([ROWS, 2, 2, 2, 2, 2]).permute((0, 3, 4, 1, 2, 5)).reshape([ROWS, STEP])
    return gl.convert_layout(split, LEFT, assert_trivial=True)


@gluon.jit
def _right_operand(weight):
    """Eight outputs' weights, with the columns renamed alike."""
    split = weight.reshape([8, 2, 2, 2, 2, 2]).permute((3, 4, 1, 2, 5, 0)).reshape([STEP, 8])
    return gl.convert_layout(split, RIGHT, assert_trivial=True)


@gluon.jit
def _add_products(z, x, high, middle, low, first: gl.constexpr):
    """Products with three pieces of eight outputs' weights, the smallest piece first."""
    z = mma_v2(x, _right_operand(low.slice(first, 8).load(WEIGHT_TILE)), z)
    z = mma_v2(x, _right_operand(middle.slice(first, 8).load(WEIGHT_TILE)), z)
    return mma_v2(x, _right_operand(high.slice(first, 8).load(WEIGHT_TILE)), z)


@gluon.jit
def _copy_step(
    y_ptr, x_ptr, fn_ptr, y_smem, x_smem, high_smem, middle_smem, low_smem, start, row0, num_rows,
    stride_y_row, WIDTH: gl.constexpr, HAS_EXPAND: gl.constexpr,
):  # fmt: skip
    """Start the copies of 32 columns of the streams, the sublayer's output and the weights.

    Streams lie one below the other, and so do the outputs of each.
    """
    DEPTH: gl.constexpr = 4 * WIDTH
    column = start + gl.arange(0, STEP, gl.SliceLayout(0, COPY))
    place = gl.arange(0, 4 * ROWS, gl.SliceLayout(1, COPY))
    row = row0 + place % ROWS
    is_in = (row < num_rows)[:, None] & (column >= 0)[None, :]
    x_ptrs = x_ptr + (row.to(gl.int64) * DEPTH + place // ROWS * WIDTH)[:, None] + column[None, :]
    copy_to_shared(x_smem, x_ptrs, mask=is_in)
    if HAS_EXPAND:
        y_row = row0 + gl.arange(0, ROWS, gl.SliceLayout(1, COPY))
        y_ptrs = y_ptr + (y_row.to(gl.int64) * stride_y_row)[:, None] + column[None, :]
        is_y = (y_row < num_rows)[:, None] & (column >= 0)[None, :]
        copy_to_shared(y_smem, y_ptrs, mask=is_y)
    place = gl.arange(0, 4 * PARTIAL_WIDTH, gl.SliceLayout(1, COPY))
    output = place % PARTIAL_WIDTH
    is_output = (output < NUM_OUTPUTS)[:, None] & (column >= 0)[None, :]
    fn_ptrs = fn_ptr + (output * DEPTH + place // PARTIAL_WIDTH * WIDTH)[:, None] + column[None, :]
    copy_to_shared(high_smem, fn_ptrs, mask=is_output)
    copy_to_shared(middle_smem, fn_ptrs + NUM_OUTPUTS * DEPTH, mask=is_output)
    copy_to_shared(low_smem, fn_ptrs + 2 * NUM_OUTPUTS * DEPTH, mask=is_output)
    async_copy.commit_group()


@gluon.jit
def _rounded(x):
    """To bfloat16 and back."""
    narrow = gl.inline_asm_elementwise(NARROW, "=r,r,r", [x], gl.bfloat16, True, 2)
    return narrow, narrow.to(gl.float32)


@gluon.jit
def _load_column(ptr, row, is_row, stride: gl.constexpr):
    """One coefficient a row, [rows, 1]."""
    return gl.load(ptr + row * stride, mask=is_row, other=0.0)[:, None]


@gluon.jit
def _load_expansion(post_ptr, comb_ptr, row, is_row, k: gl.constexpr):
    """What makes stream k: its share of the sublayer's output, and of each old stream."""
    post = _load_column(post_ptr + k, row, is_row, 4)
    c0 = _load_column(comb_ptr + k, row, is_row, 16)
    c1 = _load_column(comb_ptr + 4 + k, row, is_row, 16)
    c2 = _load_column(comb_ptr + 8 + k, row, is_row, 16)
    return post, c0, c1, c2, _load_column(comb_ptr + 12 + k, row, is_row, 16)


@gluon.jit
def _expanded(y, x0, x1, x2, x3, expansion):
    """One stream after the sublayer: the arithmetic of ``expand_streams``."""
    post, c0, c1, c2, c3 = expansion
    return gl.fma(post, y, gl.fma(c3, x3, gl.fma(c2, x2, gl.fma(c1, x1, c0 * x0))))


@gluon.jit
def _lane_sums(x):
    """[rows, 32] -> [rows, 4]: the sums of what one lane holds of each row, without an exchange."""
    return gl.sum(x.reshape([ROWS, 4, 8]), 2)


@gluon.jit
def one_pass_kernel(
    y_ptr, x_ptr, post_ptr, comb_ptr, pre_ptr, fn_ptr, out_ptr, collapsed_ptr, squares_ptr, partial_ptr,
    num_rows, y_stride_units,
    WIDTH: gl.constexpr, PART: gl.constexpr,
    HAS_EXPAND: gl.constexpr, HAS_COLLAPSE: gl.constexpr,
):  # fmt: skip
    """A tile of rows and a part of the width: expand, store, collapse; partial products and sums of squares.

    Rows of ``y`` begin at 16 bytes and lie ``8 * y_stride_units`` elements apart.
    """
    DEPTH: gl.constexpr = 4 * WIDTH
    part = gl.program_id(0)
    row = gl.program_id(1).to(gl.int64) * ROWS + gl.arange(0, ROWS, ROW)
    is_row = row < num_rows
    lane_column = gl.arange(0, STEP, gl.SliceLayout(0, TILE))
    is_in = is_row[:, None] & (lane_column >= 0)[None, :]
    x_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 4 * ROWS, STEP], SHARED)
    y_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES, ROWS, STEP], SHARED)
    high_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 4 * PARTIAL_WIDTH, STEP], SHARED)
    middle_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 4 * PARTIAL_WIDTH, STEP], SHARED)
    low_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 4 * PARTIAL_WIDTH, STEP], SHARED)
    row0 = gl.program_id(1) * ROWS
    stride_y_row = 8 * y_stride_units
    first = part * PART
    end = gl.minimum(first + PART, WIDTH)
    _copy_step(
        y_ptr, x_ptr, fn_ptr, y_smem.index(0), x_smem.index(0), high_smem.index(0), middle_smem.index(0),
        low_smem.index(0), first, row0, num_rows, stride_y_row, WIDTH, HAS_EXPAND,
    )  # fmt: skip
    out_ptrs = out_ptr + row[:, None] * DEPTH + lane_column[None, :]
    if HAS_EXPAND:
        to_0 = _load_expansion(post_ptr, comb_ptr, row, is_row, 0)
        to_1 = _load_expansion(post_ptr, comb_ptr, row, is_row, 1)
        to_2 = _load_expansion(post_ptr, comb_ptr, row, is_row, 2)
        to_3 = _load_expansion(post_ptr, comb_ptr, row, is_row, 3)
    if HAS_COLLAPSE:
        p0 = _load_column(pre_ptr, row, is_row, 4)
        p1 = _load_column(pre_ptr + 1, row, is_row, 4)
        p2 = _load_column(pre_ptr + 2, row, is_row, 4)
        p3 = _load_column(pre_ptr + 3, row, is_row, 4)
        collapsed_ptrs = collapsed_ptr + row[:, None] * WIDTH + lane_column[None, :]
    z0 = gl.zeros([ROWS, 8], gl.float32, PRODUCT)
    z1 = gl.zeros([ROWS, 8], gl.float32, PRODUCT)
    z2 = gl.zeros([ROWS, 8], gl.float32, PRODUCT)
    squares = _lane_sums(gl.zeros([ROWS, STEP], gl.float32, TILE))
    collapsed_squares = squares
    stage = 0
    for start in range(first, end, STEP):
        async_copy.wait_group(0)
        thread_barrier()
        # After the barrier nobody reads what this overwrites. At the end the last columns are copied again.
        following = gl.minimum(start + STEP, end - STEP)
        _copy_step(
            y_ptr, x_ptr, fn_ptr, y_smem.index(1 - stage), x_smem.index(1 - stage),
            high_smem.index(1 - stage), middle_smem.index(1 - stage), low_smem.index(1 - stage),
            following, row0, num_rows, stride_y_row, WIDTH, HAS_EXPAND,
        )  # fmt: skip
        streams = x_smem.index(stage)
        n0 = streams.slice(0, ROWS).load(TILE)
        n1 = streams.slice(ROWS, ROWS).load(TILE)
        n2 = streams.slice(2 * ROWS, ROWS).load(TILE)
        n3 = streams.slice(3 * ROWS, ROWS).load(TILE)
        x0 = n0.to(gl.float32)
        x1 = n1.to(gl.float32)
        x2 = n2.to(gl.float32)
        x3 = n3.to(gl.float32)
        if HAS_EXPAND:
            y = y_smem.index(stage).load(TILE).to(gl.float32)
            n0, new0 = _rounded(_expanded(y, x0, x1, x2, x3, to_0))
            n1, new1 = _rounded(_expanded(y, x0, x1, x2, x3, to_1))
            n2, new2 = _rounded(_expanded(y, x0, x1, x2, x3, to_2))
            n3, new3 = _rounded(_expanded(y, x0, x1, x2, x3, to_3))
            gl.store(out_ptrs + start, n0, mask=is_in)
            gl.store(out_ptrs + start + WIDTH, n1, mask=is_in)
            gl.store(out_ptrs + start + 2 * WIDTH, n2, mask=is_in)
            gl.store(out_ptrs + start + 3 * WIDTH, n3, mask=is_in)
            x0 = new0
            x1 = new1
            x2 = new2
            x3 = new3
        squares += _lane_sums(gl.fma(x3, x3, gl.fma(x2, x2, gl.fma(x1, x1, x0 * x0))))
        if HAS_COLLAPSE:
            total = gl.fma(p3, x3, gl.fma(p2, x2, gl.fma(p1, x1, p0 * x0)))
            collapsed, wide = _rounded(total)
            gl.store(collapsed_ptrs + start, collapsed, mask=is_in)
            collapsed_squares += _lane_sums(wide * wide)
        high = high_smem.index(stage)
        middle = middle_smem.index(stage)
        low = low_smem.index(stage)
        for stream in gl.static_range(4):
            if stream == 0:
                x = _left_operand(n0)
            elif stream == 1:
                x = _left_operand(n1)
            elif stream == 2:
                x = _left_operand(n2)
            else:
                x = _left_operand(n3)
            z0 = _add_products(z0, x, high, middle, low, stream * PARTIAL_WIDTH)
            z1 = _add_products(z1, x, high, middle, low, stream * PARTIAL_WIDTH + 8)
            z2 = _add_products(z2, x, high, middle, low, stream * PARTIAL_WIDTH + 16)
        stage = 1 - stage
    async_copy.wait_group(0)
    squares_ptrs = squares_ptr + (part.to(gl.int64) * num_rows + row) * 2
    gl.store(squares_ptrs, gl.convert_layout(gl.sum(squares, 1), ROW), mask=is_row)
    if HAS_COLLAPSE:
        gl.store(squares_ptrs + 1, gl.convert_layout(gl.sum(collapsed_squares, 1), ROW), mask=is_row)
    product_row = gl.program_id(1).to(gl.int64) * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, PRODUCT))
    output = gl.arange(0, 8, gl.SliceLayout(0, PRODUCT))
    is_product = (product_row < num_rows)[:, None] & (output >= 0)[None, :]
    partial_ptrs = partial_ptr + (part.to(gl.int64) * num_rows + product_row[:, None]) * PARTIAL_WIDTH
    partial_ptrs += output[None, :]
    gl.store(partial_ptrs, z0, mask=is_product)
    gl.store(partial_ptrs + 8, z1, mask=is_product)
    gl.store(partial_ptrs + 16, z2, mask=is_product)

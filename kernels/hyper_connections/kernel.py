"""Device code of the hyper-connections, for four streams.

One pass over the streams expands them and collapses them for the next sublayer; a thin matrix product makes
the mixing weights' logits; a last kernel does the rest for a row. Sums over the width are cut into parts of
fixed size that the last kernel adds in order, so a row's bits depend on the weight's shape alone.

Shapes: streams [rows, 4, width]; partial products [num_parts, rows, 32], of which 24 are used; partial sums
of squares [num_squares, rows, 2], of the streams and of the collapsed row.
"""

from __future__ import annotations

import triton
import triton.language as tl

NUM_OUTPUTS = tl.constexpr(24)
PARTIAL_WIDTH = tl.constexpr(32)


@triton.jit
def _load_streams(x_ptr, row, column, is_in, WIDTH: tl.constexpr):
    """The four streams of a tile, fp32."""
    ptrs = x_ptr + row[:, None] * (4 * WIDTH) + column[None, :]
    x0 = tl.load(ptrs, mask=is_in, other=0.0).to(tl.float32)
    x1 = tl.load(ptrs + WIDTH, mask=is_in, other=0.0).to(tl.float32)
    x2 = tl.load(ptrs + 2 * WIDTH, mask=is_in, other=0.0).to(tl.float32)
    x3 = tl.load(ptrs + 3 * WIDTH, mask=is_in, other=0.0).to(tl.float32)
    return x0, x1, x2, x3


@triton.jit
def _rounded(x, IS_BF16: tl.constexpr):
    """To the streams' dtype and back to fp32.

    Two at a time: a lone conversion runs at a quarter of the rate. Called impure, because the compiler would
    otherwise compute everything again in the layout that the product wants.
    """
    if IS_BF16:
        narrow = tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=tl.bfloat16, is_pure=False, pack=2
        )
        return narrow, narrow.to(tl.float32)
    else:
        return x, x


@triton.jit
def _load_column(ptr, row, is_row, stride: tl.constexpr):
    """One coefficient a row, [rows, 1]."""
    return tl.load(ptr + row * stride, mask=is_row, other=0.0)[:, None]


@triton.jit
def _load_expansion(post_ptr, comb_ptr, row, is_row, k: tl.constexpr):
    """What makes stream k: its share of the sublayer's output, and of each old stream."""
    post = _load_column(post_ptr + k, row, is_row, 4)
    c0 = _load_column(comb_ptr + k, row, is_row, 16)
    c1 = _load_column(comb_ptr + 4 + k, row, is_row, 16)
    c2 = _load_column(comb_ptr + 8 + k, row, is_row, 16)
    return post, c0, c1, c2, _load_column(comb_ptr + 12 + k, row, is_row, 16)


@triton.jit
def _expanded(y, x0, x1, x2, x3, expansion):
    """One stream after the sublayer: ``post y + sum_j comb[j] x[j]``, one rounding a step."""
    post, c0, c1, c2, c3 = expansion
    return tl.fma(post, y, tl.fma(c3, x3, tl.fma(c2, x2, tl.fma(c1, x1, c0 * x0))))


@triton.jit
def mix_product_kernel(
    x_ptr, fn_ptr, partial_ptr, num_rows,
    DEPTH: tl.constexpr, PART: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, IS_BF16: tl.constexpr,
):  # fmt: skip
    """Products of flat streams [rows, DEPTH] with the mixing weights: a tile of rows, a part of the depth.

    A bfloat16 stream is exact; the fp32 weight comes as three bfloat16 pieces [3, 24, DEPTH], which hold its
    24 bits, so the tensor cores' products are those of fp32. The smallest piece is added first.
    """
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_row = (row < num_rows)[:, None]
    output = tl.arange(0, PARTIAL_WIDTH)
    is_output = (output < NUM_OUTPUTS)[:, None]
    x_ptrs = x_ptr + row[:, None] * DEPTH
    fn_ptrs = fn_ptr + output[:, None] * DEPTH
    z = tl.zeros([ROWS, PARTIAL_WIDTH], tl.float32)
    for start in tl.range(part * PART, part * PART + PART, BLOCK):
        column = start + tl.arange(0, BLOCK)[None, :]
        x = tl.load(x_ptrs + column, mask=is_row & (column < DEPTH), other=0.0)
        is_weight = is_output & (column < DEPTH)
        if IS_BF16:
            low = tl.load(fn_ptrs + 2 * NUM_OUTPUTS * DEPTH + column, mask=is_weight, other=0.0)
            middle = tl.load(fn_ptrs + NUM_OUTPUTS * DEPTH + column, mask=is_weight, other=0.0)
            high = tl.load(fn_ptrs + column, mask=is_weight, other=0.0)
            z = tl.dot(x, tl.trans(low), acc=z)
            z = tl.dot(x, tl.trans(middle), acc=z)
            z = tl.dot(x, tl.trans(high), acc=z)
        else:
            weight = tl.load(fn_ptrs + column, mask=is_weight, other=0.0)
            z = tl.dot(x, tl.trans(weight), acc=z, input_precision="ieee")
    partial_ptrs = partial_ptr + (part.to(tl.int64) * num_rows + row[:, None]) * PARTIAL_WIDTH
    tl.store(partial_ptrs + output[None, :], z, mask=is_row & (output < NUM_OUTPUTS)[None, :])


@triton.jit
def stream_pass_kernel(
    y_ptr, x_ptr, post_ptr, comb_ptr, pre_ptr, out_ptr, collapsed_ptr, squares_ptr,
    num_rows, stride_y_row,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    HAS_EXPAND: tl.constexpr, HAS_COLLAPSE: tl.constexpr, IS_BF16: tl.constexpr,
):  # fmt: skip
    """One tile of rows and columns: expand, collapse, and the squares' sums [num_parts, num_rows, 2]."""
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_row = row < num_rows
    column = part * BLOCK + tl.arange(0, BLOCK)
    is_in = is_row[:, None] & (column < WIDTH)[None, :]
    ptrs = row[:, None] * (4 * WIDTH) + column[None, :]
    x0, x1, x2, x3 = _load_streams(x_ptr, row, column, is_in, WIDTH)
    if HAS_EXPAND:
        y_ptrs = y_ptr + row[:, None] * stride_y_row + column[None, :]
        y = tl.load(y_ptrs, mask=is_in, other=0.0).to(tl.float32)
        n0, new0 = _rounded(
            _expanded(y, x0, x1, x2, x3, _load_expansion(post_ptr, comb_ptr, row, is_row, 0)), IS_BF16
        )
        n1, new1 = _rounded(
            _expanded(y, x0, x1, x2, x3, _load_expansion(post_ptr, comb_ptr, row, is_row, 1)), IS_BF16
        )
        n2, new2 = _rounded(
            _expanded(y, x0, x1, x2, x3, _load_expansion(post_ptr, comb_ptr, row, is_row, 2)), IS_BF16
        )
        n3, new3 = _rounded(
            _expanded(y, x0, x1, x2, x3, _load_expansion(post_ptr, comb_ptr, row, is_row, 3)), IS_BF16
        )
        tl.store(out_ptr + ptrs, n0, mask=is_in)
        tl.store(out_ptr + ptrs + WIDTH, n1, mask=is_in)
        tl.store(out_ptr + ptrs + 2 * WIDTH, n2, mask=is_in)
        tl.store(out_ptr + ptrs + 3 * WIDTH, n3, mask=is_in)
        x0, x1, x2, x3 = new0, new1, new2, new3
    squares = tl.sum(tl.fma(x3, x3, tl.fma(x2, x2, tl.fma(x1, x1, x0 * x0))), 1)
    squares_ptrs = squares_ptr + (part.to(tl.int64) * num_rows + row) * 2
    tl.store(squares_ptrs, squares, mask=is_row)
    if HAS_COLLAPSE:
        p0 = _load_column(pre_ptr, row, is_row, 4)
        p1 = _load_column(pre_ptr + 1, row, is_row, 4)
        p2 = _load_column(pre_ptr + 2, row, is_row, 4)
        p3 = _load_column(pre_ptr + 3, row, is_row, 4)
        total = tl.fma(p3, x3, tl.fma(p2, x2, tl.fma(p1, x1, p0 * x0)))
        collapsed, wide = _rounded(total, IS_BF16)
        tl.store(collapsed_ptr + row[:, None] * WIDTH + column[None, :], collapsed, mask=is_in)
        tl.store(squares_ptrs + 1, tl.sum(wide * wide, 1), mask=is_row)


@triton.jit
def _finish_mix(
    first_row, partial_ptr, squares_ptr, base_ptr, scale_ptr, pre_ptr, post_ptr, comb_ptr,
    num_rows, eps, norm_eps,
    WIDTH: tl.constexpr, NUM_PARTS: tl.constexpr, NUM_SQUARES: tl.constexpr, NUM_ITERATIONS: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Add the parts in order, then sigmoids and Sinkhorn."""
    row = first_row.to(tl.int64) + tl.arange(0, ROWS)
    is_row = row < num_rows
    stride_part = tl.cast(num_rows, tl.int64) * PARTIAL_WIDTH
    k = tl.arange(0, 4)
    vector = row[:, None] * PARTIAL_WIDTH + k[None, :]
    matrix = row[:, None, None] * PARTIAL_WIDTH + 8 + 4 * k[None, :, None] + k[None, None, :]
    is_vector = is_row[:, None] & (k >= 0)[None, :]
    is_matrix = is_vector[:, :, None] & (k >= 0)[None, None, :]
    pre = tl.zeros([ROWS, 4], tl.float32)
    post = tl.zeros([ROWS, 4], tl.float32)
    comb = tl.zeros([ROWS, 4, 4], tl.float32)
    squares = tl.zeros([ROWS], tl.float32)
    for part in tl.static_range(NUM_PARTS):
        ptr = partial_ptr + part * stride_part
        pre += tl.load(ptr + vector, mask=is_vector, other=0.0)
        post += tl.load(ptr + vector + 4, mask=is_vector, other=0.0)
        comb += tl.load(ptr + matrix, mask=is_matrix, other=0.0)
    for part in tl.static_range(NUM_SQUARES):
        squares += tl.load(
            squares_ptr + (part * tl.cast(num_rows, tl.int64) + row) * 2, mask=is_row, other=1.0
        )
    inverse_rms = tl.rsqrt(squares / (4 * WIDTH) + norm_eps)
    pre = tl.sigmoid(pre * inverse_rms[:, None] * tl.load(scale_ptr) + tl.load(base_ptr + k)[None, :]) + eps
    post = 2 * tl.sigmoid(
        post * inverse_rms[:, None] * tl.load(scale_ptr + 1) + tl.load(base_ptr + 4 + k)[None, :]
    )
    base = tl.load(base_ptr + 8 + 4 * k[:, None] + k[None, :])
    comb = comb * inverse_rms[:, None, None] * tl.load(scale_ptr + 2) + base[None, :, :]
    comb = tl.exp(comb - tl.max(comb, 2)[:, :, None])
    comb = comb / tl.sum(comb, 2)[:, :, None] + eps
    comb = comb / (tl.sum(comb, 1)[:, None, :] + eps)
    for _ in range(NUM_ITERATIONS - 1):
        comb = comb / (tl.sum(comb, 2)[:, :, None] + eps)
        comb = comb / (tl.sum(comb, 1)[:, None, :] + eps)
    tl.store(pre_ptr + row[:, None] * 4 + k[None, :], pre, mask=is_vector)
    tl.store(post_ptr + row[:, None] * 4 + k[None, :], post, mask=is_vector)
    comb_ptrs = comb_ptr + row[:, None, None] * 16 + 4 * k[None, :, None] + k[None, None, :]
    tl.store(comb_ptrs, comb, mask=is_matrix)


@triton.jit
def _norm_collapsed(
    first_row, collapsed_ptr, squares_ptr, weight_ptr, num_rows, eps,
    WIDTH: tl.constexpr, NUM_SQUARES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """RMSNorm of collapsed rows, in place, by the sums of squares of their parts."""
    row = first_row.to(tl.int64) + tl.arange(0, ROWS)
    is_row = row < num_rows
    column = tl.arange(0, BLOCK)
    is_in = is_row[:, None] & (column < WIDTH)[None, :]
    x_ptrs = collapsed_ptr + row[:, None] * WIDTH + column[None, :]
    x = tl.load(x_ptrs, mask=is_in, other=0.0)
    total = tl.zeros([ROWS], tl.float32)
    for part in tl.static_range(NUM_SQUARES):
        ptr = squares_ptr + (part * tl.cast(num_rows, tl.int64) + row) * 2 + 1
        total += tl.load(ptr, mask=is_row, other=1.0)
    weight = tl.load(weight_ptr + column, mask=column < WIDTH, other=0.0)
    normed = x.to(tl.float32) * tl.rsqrt(total / WIDTH + eps)[:, None] * weight[None, :]
    tl.store(x_ptrs, normed.to(x.dtype), mask=is_in)


@triton.jit
def finish_mix_kernel(
    partial_ptr, squares_ptr, base_ptr, scale_ptr, norm_weight_ptr, pre_ptr, post_ptr, comb_ptr,
    collapsed_ptr,
    num_rows, eps, norm_eps,
    WIDTH: tl.constexpr, NUM_PARTS: tl.constexpr, NUM_SQUARES: tl.constexpr, NUM_ITERATIONS: tl.constexpr,
    MIX_ROWS: tl.constexpr, NORM_ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The first programs finish the mix, which waits and moves little; the others norm the collapsed rows."""
    program = tl.program_id(0)
    num_mix_programs = tl.cdiv(num_rows, MIX_ROWS)
    if program < num_mix_programs:
        _finish_mix(
            program * MIX_ROWS, partial_ptr, squares_ptr, base_ptr, scale_ptr, pre_ptr, post_ptr, comb_ptr,
            num_rows, eps, norm_eps, WIDTH, NUM_PARTS, NUM_SQUARES, NUM_ITERATIONS, MIX_ROWS,
        )  # fmt: skip
    else:
        _norm_collapsed(
            (program - num_mix_programs) * NORM_ROWS, collapsed_ptr, squares_ptr, norm_weight_ptr,
            num_rows, norm_eps, WIDTH, NUM_SQUARES, NORM_ROWS, BLOCK,
        )  # fmt: skip


@triton.jit
def expand_streams_kernel(
    y_ptr, x_ptr, post_ptr, comb_ptr, out_ptr, num_rows, stride_y_row, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A tile of rows and columns; the arithmetic of ``stream_pass_kernel``."""
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_row = row < num_rows
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_in = is_row[:, None] & (column < WIDTH)[None, :]
    x0, x1, x2, x3 = _load_streams(x_ptr, row, column, is_in, WIDTH)
    y = tl.load(y_ptr + row[:, None] * stride_y_row + column[None, :], mask=is_in, other=0.0).to(tl.float32)
    out_ptrs = out_ptr + row[:, None] * (4 * WIDTH) + column[None, :]
    for k in tl.static_range(4):
        mixed = _expanded(y, x0, x1, x2, x3, _load_expansion(post_ptr, comb_ptr, row, is_row, k))
        tl.store(out_ptrs + k * WIDTH, mixed.to(out_ptr.dtype.element_ty), mask=is_in)


@triton.jit
def collapse_norm_kernel(
    x_ptr, pre_ptr, weight_ptr, out_ptr, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, HAS_NORM: tl.constexpr
):
    """One row: collapse its streams, round, and normalise where asked."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    is_in = column < WIDTH
    x_ptrs = x_ptr + row * (4 * WIDTH) + column
    total = tl.load(pre_ptr + row * 4) * tl.load(x_ptrs, mask=is_in, other=0.0).to(tl.float32)
    for k in tl.static_range(1, 4):
        stream = tl.load(x_ptrs + k * WIDTH, mask=is_in, other=0.0).to(tl.float32)
        total = tl.fma(tl.load(pre_ptr + row * 4 + k), stream, total)
    collapsed = total.to(x_ptr.dtype.element_ty)
    if HAS_NORM:
        wide = collapsed.to(tl.float32)
        inverse_rms = tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
        weight = tl.load(weight_ptr + column, mask=is_in, other=0.0)
        collapsed = (wide * inverse_rms * weight).to(collapsed.dtype)
    tl.store(out_ptr + row * WIDTH + column, collapsed, mask=is_in)

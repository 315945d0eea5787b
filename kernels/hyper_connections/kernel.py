"""Device code of the hyper-connections, for four streams.

A tile of rows passes over its streams once: expand them, collapse them for the next sublayer, and multiply
them with the mixing weights. Columns are split into parts of fixed width whose sums a second kernel adds
in order, so a row's bits depend on the weight's shape alone.

Shapes: X streams [rows, 4, width]; partial sums [num_parts, rows, 32]: 24 products, then the squares' sums
of the streams and of the collapsed row.
"""

from __future__ import annotations

import triton
import triton.language as tl

SQUARES = tl.constexpr(24)
COLLAPSED_SQUARES = tl.constexpr(25)
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
def _top_bits(x):
    """The 8 leading bits of an fp32 number, in bfloat16 and in fp32; what is cut off stays exact."""
    bits = x.to(tl.int32, bitcast=True)
    narrow = (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return narrow, (bits & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _multiply(z, narrow, fn_ptr, column, k: tl.constexpr, WIDTH: tl.constexpr, IS_BF16: tl.constexpr):
    """Add a stream's product with its slice of the mixing weights: [rows, block] -> z [rows, 32].

    A bfloat16 stream is exact; the fp32 weight is cut into three bfloat16 pieces, which hold its 24 bits, so
    the tensor cores' products are those of fp32.
    """
    output = tl.arange(0, PARTIAL_WIDTH)
    is_weight = (output < SQUARES)[:, None] & (column < WIDTH)[None, :]
    weight_ptrs = fn_ptr + output[:, None] * (4 * WIDTH) + k * WIDTH + column[None, :]
    weight = tl.load(weight_ptrs, mask=is_weight, other=0.0)
    if IS_BF16:
        high, cut = _top_bits(weight)
        rest = weight - cut
        middle, cut = _top_bits(rest)
        low, _ = _top_bits(rest - cut)
        z = tl.dot(narrow, tl.trans(low), acc=z)
        z = tl.dot(narrow, tl.trans(middle), acc=z)
        return tl.dot(narrow, tl.trans(high), acc=z)
    else:
        return tl.dot(narrow, tl.trans(weight), acc=z, input_precision="ieee")


@triton.jit
def stream_pass_kernel(
    y_ptr, x_ptr, post_ptr, comb_ptr, pre_ptr, fn_ptr, out_ptr, collapsed_ptr, partial_ptr,
    num_rows, stride_y_row,
    WIDTH: tl.constexpr, PART: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    HAS_EXPAND: tl.constexpr, HAS_COLLAPSE: tl.constexpr, IS_BF16: tl.constexpr,
):  # fmt: skip
    """One tile of rows and one part of the columns."""
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_row = row < num_rows
    z = tl.zeros([ROWS, PARTIAL_WIDTH], tl.float32)
    squares = tl.zeros([ROWS], tl.float32)
    collapsed_squares = tl.zeros([ROWS], tl.float32)
    if HAS_EXPAND:
        expansion0 = _load_expansion(post_ptr, comb_ptr, row, is_row, 0)
        expansion1 = _load_expansion(post_ptr, comb_ptr, row, is_row, 1)
        expansion2 = _load_expansion(post_ptr, comb_ptr, row, is_row, 2)
        expansion3 = _load_expansion(post_ptr, comb_ptr, row, is_row, 3)
    if HAS_COLLAPSE:
        p0 = _load_column(pre_ptr, row, is_row, 4)
        p1 = _load_column(pre_ptr + 1, row, is_row, 4)
        p2 = _load_column(pre_ptr + 2, row, is_row, 4)
        p3 = _load_column(pre_ptr + 3, row, is_row, 4)
    for start in tl.range(part * PART, part * PART + PART, BLOCK, loop_unroll_factor=1):
        column = start + tl.arange(0, BLOCK)
        is_in = is_row[:, None] & (column < WIDTH)[None, :]
        ptrs = row[:, None] * (4 * WIDTH) + column[None, :]
        n0 = tl.load(x_ptr + ptrs, mask=is_in, other=0.0)
        n1 = tl.load(x_ptr + ptrs + WIDTH, mask=is_in, other=0.0)
        n2 = tl.load(x_ptr + ptrs + 2 * WIDTH, mask=is_in, other=0.0)
        n3 = tl.load(x_ptr + ptrs + 3 * WIDTH, mask=is_in, other=0.0)
        x0, x1, x2, x3 = n0.to(tl.float32), n1.to(tl.float32), n2.to(tl.float32), n3.to(tl.float32)
        if HAS_EXPAND:
            y_ptrs = y_ptr + row[:, None] * stride_y_row + column[None, :]
            y = tl.load(y_ptrs, mask=is_in, other=0.0).to(tl.float32)
            n0, new0 = _rounded(_expanded(y, x0, x1, x2, x3, expansion0), IS_BF16)
            n1, new1 = _rounded(_expanded(y, x0, x1, x2, x3, expansion1), IS_BF16)
            n2, new2 = _rounded(_expanded(y, x0, x1, x2, x3, expansion2), IS_BF16)
            n3, new3 = _rounded(_expanded(y, x0, x1, x2, x3, expansion3), IS_BF16)
            tl.store(out_ptr + ptrs, n0, mask=is_in)
            tl.store(out_ptr + ptrs + WIDTH, n1, mask=is_in)
            tl.store(out_ptr + ptrs + 2 * WIDTH, n2, mask=is_in)
            tl.store(out_ptr + ptrs + 3 * WIDTH, n3, mask=is_in)
            x0, x1, x2, x3 = new0, new1, new2, new3
        if HAS_COLLAPSE:
            total = tl.fma(p3, x3, tl.fma(p2, x2, tl.fma(p1, x1, p0 * x0)))
            collapsed, wide = _rounded(total, IS_BF16)
            tl.store(collapsed_ptr + row[:, None] * WIDTH + column[None, :], collapsed, mask=is_in)
            collapsed_squares += tl.sum(wide * wide, 1)
        squares += tl.sum(tl.fma(x3, x3, tl.fma(x2, x2, tl.fma(x1, x1, x0 * x0))), 1)
        z = _multiply(z, n0, fn_ptr, column, 0, WIDTH, IS_BF16)
        z = _multiply(z, n1, fn_ptr, column, 1, WIDTH, IS_BF16)
        z = _multiply(z, n2, fn_ptr, column, 2, WIDTH, IS_BF16)
        z = _multiply(z, n3, fn_ptr, column, 3, WIDTH, IS_BF16)
    output = tl.arange(0, PARTIAL_WIDTH)[None, :]
    z = tl.where(output == SQUARES, squares[:, None], z)
    z = tl.where(output == COLLAPSED_SQUARES, collapsed_squares[:, None], z)
    partial_ptrs = partial_ptr + (part.to(tl.int64) * num_rows + row[:, None]) * PARTIAL_WIDTH + output
    tl.store(partial_ptrs, z, mask=is_row[:, None])


@triton.jit
def finish_mix_kernel(
    partial_ptr, base_ptr, scale_ptr, norm_weight_ptr, pre_ptr, post_ptr, comb_ptr, collapsed_ptr,
    num_rows, eps, norm_eps,
    WIDTH: tl.constexpr, NUM_PARTS: tl.constexpr, NUM_ITERATIONS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, HAS_COLLAPSE: tl.constexpr,
):  # fmt: skip
    """Add the parts in order, then sigmoids and Sinkhorn; and the norm of the collapsed rows, in place."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
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
        squares += tl.load(ptr + row * PARTIAL_WIDTH + SQUARES, mask=is_row, other=1.0)
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
    if HAS_COLLAPSE:
        column = tl.arange(0, BLOCK)
        is_in = column < WIDTH
        weight = tl.load(norm_weight_ptr + column, mask=is_in, other=0.0)
        for n in tl.static_range(ROWS):
            one = tl.program_id(0).to(tl.int64) * ROWS + n
            if one < num_rows:
                total = 0.0
                for part in tl.static_range(NUM_PARTS):
                    ptr = partial_ptr + part * stride_part + one * PARTIAL_WIDTH
                    total += tl.load(ptr + COLLAPSED_SQUARES)
                x_ptrs = collapsed_ptr + one * WIDTH + column
                x = tl.load(x_ptrs, mask=is_in, other=0.0)
                normed = x.to(tl.float32) * tl.rsqrt(total / WIDTH + norm_eps) * weight
                tl.store(x_ptrs, normed.to(x.dtype), mask=is_in)


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

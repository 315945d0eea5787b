"""Device code of rotary embedding: the rotary tail of some heads of one row a program, in place."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rotate_queries_kernel(
    x_ptr, cos_ptr, sin_ptr, stride_row, stride_head,
    NUM_HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    """Pairs (2i, 2i + 1) of the last 2 * HALF channels are complex numbers times e^(ia)."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    channel = tl.arange(0, 2 * BLOCK_HALF)
    pair = tl.arange(0, BLOCK_HALF)
    is_there = (head < NUM_HEADS)[:, None] & (channel < 2 * HALF)[None, :]
    ptrs = x_ptr + row * stride_row + head[:, None] * stride_head + (DIM - 2 * HALF) + channel[None, :]
    x = tl.load(ptrs, mask=is_there, other=0.0).to(tl.float32)
    even, odd = tl.split(tl.reshape(x, [BLOCK_HEADS, BLOCK_HALF, 2]))
    cos = tl.load(cos_ptr + row * HALF + pair, mask=pair < HALF, other=1.0)[None, :]
    sin = tl.load(sin_ptr + row * HALF + pair, mask=pair < HALF, other=0.0)[None, :]
    turned = tl.join(even * cos - odd * sin, even * sin + odd * cos)
    turned = tl.reshape(turned, [BLOCK_HEADS, 2 * BLOCK_HALF])
    tl.store(ptrs, turned.to(x_ptr.dtype.element_ty), mask=is_there)

"""Device code of RMSNorm: one row a program, the whole row in registers."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rms_norm_kernel(
    x_ptr, weight_ptr, out_ptr, stride_x_row, stride_out_row, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    is_in = column < WIDTH
    x = tl.load(x_ptr + row * stride_x_row + column, mask=is_in, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=is_in, other=0.0).to(tl.float32)
    inverse_rms = tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps)
    out = x * inverse_rms * weight
    tl.store(out_ptr + row * stride_out_row + column, out.to(out_ptr.dtype.element_ty), mask=is_in)

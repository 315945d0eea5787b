"""Rotary embedding of queries on the device: checks, tile choice, launch."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from kernels.argument_checks import FLOATS, expect_tensor
from kernels.rope.kernel import rotate_queries_kernel


class RotateConfig(NamedTuple):
    """Heads and pairs of one program, and its warps."""

    block_heads: int
    block_half: int
    num_warps: int


def choose_rotate_config(num_heads: int, half: int) -> RotateConfig:
    """About 8 channels a thread."""
    block_heads = min(32, triton.next_power_of_2(num_heads))
    block_half = triton.next_power_of_2(half)
    return RotateConfig(block_heads, block_half, min(8, max(1, 2 * block_heads * block_half // 256)))


def rotate_queries(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the last ``2 * cos.shape[1]`` channels of every head, in place; no other byte is touched.

    Args:
        x: [num_rows, num_heads, head_dim], float32 or bfloat16; rows and heads may lie apart.
        cos, sin: [num_rows, rope_dim / 2] fp32.

    Returns:
        ``x``. The model page's section 4.

    Raises:
        ValueError: an argument is not as described.
    """
    expect_tensor("x", x, (None, None, None), FLOATS, is_strided=True)
    num_rows, num_heads, dim = x.shape
    expect_tensor("cos", cos, (num_rows, None), (torch.float32,), like=x)
    expect_tensor("sin", sin, tuple(cos.shape), (torch.float32,), like=x)
    half = cos.shape[1]
    if 2 * half > dim:
        raise ValueError(f"cos: expected at most {dim // 2} angles, got {half}")
    if num_rows and num_heads and half:
        config = choose_rotate_config(num_heads, half)
        # Products and sums are rounded one by one, as the reference rounds them.
        rotate_queries_kernel[(num_rows, triton.cdiv(num_heads, config.block_heads))](
            x, cos, sin, x.stride(0), x.stride(1),
            NUM_HEADS=num_heads, DIM=dim, HALF=half, BLOCK_HEADS=config.block_heads,
            BLOCK_HALF=config.block_half, num_warps=config.num_warps, enable_fp_fusion=False,
        )  # fmt: skip
    return x

"""RMSNorm on the device: checks, tile choice, launch."""

from __future__ import annotations

from typing import NamedTuple

import triton
from torch import Tensor

from kernels.argument_checks import FLOATS, expect_output, expect_tensor
from kernels.rms_norm.kernel import rms_norm_kernel


class RowConfig(NamedTuple):
    """A row's block and its warps: a function of the width alone."""

    block: int
    num_warps: int


def choose_config(width: int) -> RowConfig:
    """About 16 elements a thread."""
    block = triton.next_power_of_2(width)
    return RowConfig(block, min(16, max(1, block // 512)))


def rms_norm(x: Tensor, weight: Tensor, *, eps: float, out: Tensor | None = None) -> Tensor:
    """``weight * x * rsqrt(mean(x^2) + eps)``, computed in fp32 and cast once at the end.

    Args:
        x: [num_rows, n], float32 or bfloat16; rows may lie apart.
        weight: [n], float32 or bfloat16.
        eps: added to the mean square.
        out: [num_rows, n], dtype of ``x``; None allocates.

    Returns:
        [num_rows, n], dtype of ``x``.

    Raises:
        ValueError: an argument is not as described.
    """
    expect_tensor("x", x, (None, None), FLOATS, is_strided=True)
    num_rows, width = x.shape
    expect_tensor("weight", weight, (width,), FLOATS, like=x)
    out = expect_output("out", out, (num_rows, width), x.dtype, x)
    if num_rows and width:
        config = choose_config(width)
        rms_norm_kernel[(num_rows,)](
            x, weight, out, x.stride(0), out.stride(0), eps,
            WIDTH=width, BLOCK=config.block, num_warps=config.num_warps,
        )  # fmt: skip
    return out

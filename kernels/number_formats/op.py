"""Quantisation of activations and of index queries on the device: checks, tile choice, launches."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from kernels.argument_checks import FLOATS, expect_dense, expect_output, expect_tensor
from kernels.number_formats.kernel import pack_index_queries_kernel, quantise_activations_kernel
from kernels.number_formats.reference import SCALE_BLOCK, ActivationMode, QuantisedRows

VECTORS_PER_PROGRAM = 16


class QuantiseConfig(NamedTuple):
    """A row's block, the channels that share a scale, and the row's warps."""

    block: int
    group: int
    num_warps: int


def choose_quantise_config(width: int, mode: ActivationMode) -> QuantiseConfig:
    """About 16 channels a thread; the whole padded row is one group where a row has one scale."""
    block = max(SCALE_BLOCK, triton.next_power_of_2(width))
    group = SCALE_BLOCK if mode == "release" else block
    return QuantiseConfig(block, group, min(16, max(1, block // 512)))


@functools.cache
def _converts_to_fp8(device: torch.device) -> bool:
    """Whether a device has the instruction, which rounds as ``e4m3_codes``; the interpreter's does not."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def quantise_activations(
    x: Tensor, *, mode: ActivationMode, out: QuantisedRows | None = None
) -> QuantisedRows:
    """What an fp8 product reads: ``x`` rounded to e4m3, power-of-two scales: the model page's section 10.

    Args:
        x: [num_rows, n], float32 or bfloat16; rows may lie apart; n a multiple of 32 under ``release``.
        mode: ``release`` gives each 32 channels a scale of their own, ``row`` one to the whole row.
        out: where to write, both contiguous; None allocates.

    Returns:
        values [num_rows, n], scales [num_rows, n / 32] or [num_rows, 1].

    Raises:
        ValueError: an argument is not as described.
    """
    expect_tensor("x", x, (None, None), FLOATS, is_strided=True)
    num_rows, width = x.shape
    if mode == "none":
        raise ValueError(f"mode: expected release or row, got {mode}")
    if mode == "release" and width % SCALE_BLOCK:
        raise ValueError(f"x: expected a width that is a multiple of {SCALE_BLOCK}, got {width}")
    num_scales = width // SCALE_BLOCK if mode == "release" else 1
    given = (None, None) if out is None else out
    values = expect_output("out.values", given[0], (num_rows, width), torch.float8_e4m3fn, x)
    scales = expect_output("out.scales", given[1], (num_rows, num_scales), torch.uint8, x)
    expect_dense("out.values", values)
    expect_dense("out.scales", scales)
    if num_rows and width:
        config = choose_quantise_config(width, mode)
        quantise_activations_kernel[(num_rows,)](
            x, values.view(torch.uint8), scales, x.stride(0),
            WIDTH=width, BLOCK=config.block, GROUP=config.group, CONVERTS=_converts_to_fp8(x.device),
            num_warps=config.num_warps,
        )  # fmt: skip
    return QuantisedRows(values, scales)


def pack_index_queries(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Index queries in the format of the index keys (Q4): e2m1 with an e8m0 scale per 32 channels.

    Args:
        x: [num_rows, num_heads, dim], float32 or bfloat16, contiguous; dim a multiple of 32.
        out: [num_rows, num_heads, dim / 2 + dim / 32] uint8, contiguous; None allocates.

    Returns:
        ``out``: nibbles, the even channel low, then scales. The model page's section 10.

    Raises:
        ValueError: an argument is not as described.
    """
    expect_tensor("x", x, (None, None, None), FLOATS)
    num_rows, num_heads, dim = x.shape
    if dim % SCALE_BLOCK:
        raise ValueError(f"x: expected a width that is a multiple of {SCALE_BLOCK}, got {dim}")
    width = dim // 2 + dim // SCALE_BLOCK
    out = expect_output("out", out, (num_rows, num_heads, width), torch.uint8, x)
    expect_dense("out", out)
    num_vectors = num_rows * num_heads
    if num_vectors and dim:
        pack_index_queries_kernel[(triton.cdiv(num_vectors, VECTORS_PER_PROGRAM),)](
            x, out, num_vectors, DIM=dim, WIDTH=width, ROWS=VECTORS_PER_PROGRAM,
            HALF=max(SCALE_BLOCK // 2, triton.next_power_of_2(dim // 2)), num_warps=4,
        )  # fmt: skip
    return out

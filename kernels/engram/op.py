"""Engram on the device: checks, tile choice and launches of the gather and the gate."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from kernels.argument_checks import (
    FLOATS,
    INDICES,
    expect_dense,
    expect_output,
    expect_reachable,
    expect_tensor,
)
from kernels.engram.kernel import engram_gate_kernel, engram_gather_kernel

GATE_ROWS = 8


def engram_gather(
    table: Tensor, scale: Tensor | None, rows: Tensor, *, dtype: torch.dtype, out: Tensor | None = None
) -> Tensor:
    """Look table rows up and widen them.

    Args:
        table: [num_table_rows, dim] float8_e4m3fn with ``scale``, else bfloat16 or float32; on the device of
            ``rows``, or page-locked in host memory.
        scale: [num_table_rows, dim / 32] uint8 e8m0, where ``table`` is, or None.
        rows: [num_rows, num_lookups] int32 or int64 rows of ``table``.
        dtype: float32 or bfloat16 of the result; exact in both.
        out: [num_rows, num_lookups * dim]; None allocates.

    Returns:
        [num_rows, num_lookups * dim] in ``dtype``.

    Raises:
        ValueError: an argument is not as described.
    """
    if dtype not in FLOATS:
        raise ValueError(f"dtype: expected {' or '.join(map(str, FLOATS))}, got {dtype}")
    expect_tensor("table", table, (None, None), FLOATS if scale is None else (torch.float8_e4m3fn,))
    dim = table.shape[1]
    expect_tensor("rows", rows, (None, None), INDICES)
    expect_reachable("table", table, rows.device)
    num_rows, num_lookups = rows.shape
    if scale is not None:
        if dim % 32:
            raise ValueError(f"table: expected a width that is a multiple of 32, got {dim}")
        expect_tensor("scale", scale, (table.shape[0], dim // 32), (torch.uint8,), like=table)
    out = expect_output("out", out, (num_rows, num_lookups * dim), dtype, rows)
    expect_dense("out", out)
    if num_rows and num_lookups:
        engram_gather_kernel[(num_rows,)](
            table, table if scale is None else scale, rows, out,
            DIM=dim, NUM_LOOKUPS=num_lookups, LOOKUPS=triton.next_power_of_2(num_lookups),
            BLOCK=max(32, triton.next_power_of_2(dim)), HAS_SCALE=scale is not None, num_warps=4,
        )  # fmt: skip
    return out


def engram_gate(
    streams: Tensor,
    keys: Tensor,
    value: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    *,
    eps: float,
    out: Tensor | None = None,
) -> Tensor:
    """Add the gated value to every stream.

    Args:
        streams: [num_rows, K, hidden], float32 or bfloat16.
        keys: [num_rows, K, hidden] and value: [num_rows, hidden], dtype of ``streams``; rows may lie apart.
        q_weight, k_weight: [K, hidden] fp32.
        eps: of both RMS norms.
        out: like ``streams``, and may be ``streams`` itself; None allocates.

    Returns:
        [num_rows, K, hidden], dtype of ``streams``: ``d = sum(X q k key) / (rms X rms key sqrt(hidden))``,
        ``g = sigmoid(sign(d) sqrt(max(|d|, 1e-6)))``, ``X + g value``; in fp32. The model page, section 8.

    Raises:
        ValueError: an argument is not as described.
    """
    expect_tensor("streams", streams, (None, None, None), FLOATS)
    num_rows, num_streams, width = streams.shape
    expect_tensor(
        "keys", keys, (num_rows, num_streams, width), (streams.dtype,), like=streams, is_strided=True
    )
    if keys.stride(1) != width and num_streams > 1:
        raise ValueError(f"keys: expected streams side by side (stride {width}), got stride {keys.stride(1)}")
    expect_tensor("value", value, (num_rows, width), (streams.dtype,), like=streams, is_strided=True)
    expect_tensor("q_weight", q_weight, (num_streams, width), (torch.float32,), like=streams)
    expect_tensor("k_weight", k_weight, (num_streams, width), (torch.float32,), like=streams)
    out = expect_output("out", out, streams.shape, streams.dtype, streams)
    expect_dense("out", out)
    if num_rows:
        block = triton.next_power_of_2(width)
        engram_gate_kernel[(num_streams, triton.cdiv(num_rows, GATE_ROWS))](
            streams, keys, value, q_weight, k_weight, out,
            num_rows, keys.stride(0), value.stride(0), eps,
            NUM_STREAMS=num_streams, WIDTH=width, ROWS=GATE_ROWS, BLOCK=block,
            num_warps=min(16, max(1, block // 512)),
        )  # fmt: skip
    return out

"""What enters the caches: window rows, compressed entries, index keys. Checks, tiles and launches.

It knows formats and slots; which slot is whose, and when a ring may be overwritten, is the caller's business.
"""

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
from kernels.cache_store.kernel import cache_store_kernel, copy_rows_kernel

ROWS_PER_PROGRAM = 4


def store_window_kv(
    kv: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    eps: float,
    is_packed: bool,
    out: Tensor | None = None,
) -> Tensor:
    """Normalise, rotate and quantise the step's window keys.

    Args:
        kv: [num_rows, head_dim], bfloat16 or float32; rows may lie apart.
        weight: [head_dim] fp32 of the norm; eps: of the norm.
        cos, sin: [num_rows, rope_dim / 2] fp32; the last channels rotate.
        is_packed: store e4m3 with an e8m0 scale per 32 channels; else the dtype of ``kv``.
        out: [num_rows, width], the step's rows; None allocates.

    Returns:
        [num_rows, width]: head_dim + head_dim / 32 bytes (uint8), or head_dim elements.

    Raises:
        ValueError: an argument is not as described.
    """
    expect_tensor("kv", kv, (None, None), FLOATS, is_strided=True)
    num_rows, dim = kv.shape
    width = dim + dim // 32 if is_packed else dim
    out = expect_output("out", out, (num_rows, width), torch.uint8 if is_packed else kv.dtype, kv)
    expect_dense("out", out)
    _launch(
        "window" if is_packed else "plain",
        kv,
        None,
        None,
        weight,
        cos,
        sin,
        None,
        None,
        out,
        None,
        eps,
        0,
    )
    return out


def compress_and_store(
    source: Tensor,
    open_groups: Tensor | None,
    group_rows: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    pool: Tensor,
    *,
    eps: float,
    dtype: torch.dtype,
    out: Tensor | None = None,
) -> Tensor:
    """Pool complete groups into latents, normalise, and store them rotated and quantised.

    Args:
        source: ratio 1: [num_source_rows, head_dim] in ``dtype``; else [num_source_rows, 2, head_dim] fp32,
            a row's key and gate.
        open_groups: [num_open_rows, 2, head_dim] fp32, tokens kept from earlier steps; None at ratio 1.
        group_rows: [num_groups, ratio] int32 or int64 rows of ``cat(open_groups, source)``, tokens ascending.
        weight: [head_dim] fp32 of the norm; eps: of the norm.
        cos, sin: [num_groups, rope_dim / 2] fp32 of each group's first token.
        slots: [num_groups] int32 or int64 slots of ``pool``, -1 = do not write.
        pool: [num_slots, width], uint8 (head_dim / 2 + head_dim / 16 bytes) or ``dtype`` (head_dim).
        dtype: bfloat16 or float32, of latents and of every rounding on the way.
        out: [num_groups, head_dim]; None allocates.

    Returns:
        The normed, unrotated latents [num_groups, head_dim] in ``dtype``, which the index keys are made from.

    Raises:
        ValueError: an argument is not as described.
    """
    expect_tensor("group_rows", group_rows, (None, None), INDICES)
    num_groups, ratio = group_rows.shape
    dim = weight.shape[0]
    if dtype not in FLOATS:
        raise ValueError(f"dtype: expected {' or '.join(map(str, FLOATS))}, got {dtype}")
    if ratio == 1:
        expect_tensor("source", source, (None, dim), (dtype,), like=group_rows, is_strided=True)
    else:
        expect_tensor("source", source, (None, 2, dim), (torch.float32,), like=group_rows)
        if open_groups is None:
            raise ValueError(f"open_groups: expected a tensor at ratio {ratio}, got None")
        expect_tensor("open_groups", open_groups, (None, 2, dim), (torch.float32,), like=group_rows)
    out = expect_output("out", out, (num_groups, dim), dtype, source)
    expect_dense("out", out)
    is_packed = pool.dtype == torch.uint8
    _launch(
        "entry" if is_packed else "plain", source, open_groups, group_rows, weight, cos, sin, slots, pool,
        None, out, eps, ratio,
    )  # fmt: skip
    return out


def store_index_keys(
    keys: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, pool: Tensor, *, eps: float
) -> None:
    """Normalise, rotate, quantise and store index keys.

    Args:
        keys: [num_groups, index_head_dim], bfloat16 or float32; rows may lie apart.
        weight: [index_head_dim] fp32 of the norm; eps: of the norm.
        cos, sin: [num_groups, rope_dim / 2] fp32.
        slots: [num_groups] int32 or int64 slots of ``pool``, -1 = do not write.
        pool: [num_slots, width], uint8 (index_head_dim / 2 + index_head_dim / 32 bytes) or as ``keys``.

    Raises:
        ValueError: an argument is not as described.
    """
    expect_tensor("keys", keys, (None, None), FLOATS, is_strided=True)
    is_packed = pool.dtype == torch.uint8
    _launch(
        "index" if is_packed else "plain", keys, None, None, weight, cos, sin, slots, pool, None, None, eps, 0
    )


def copy_rows(source: Tensor, target: Tensor, source_rows: Tensor, target_rows: Tensor) -> None:
    """``target[target_rows] = source[source_rows]`` in one launch: rings, open groups, blocks that move.

    Args:
        source, target: [n, ...] and [m, ...], contiguous, of one dtype and row shape; on the device of
            ``source_rows``, or page-locked in host memory.
        source_rows, target_rows: [num_copies] int32 or int64; no two targets are equal, -1 = do not copy.

    Raises:
        ValueError: an argument is not as described.
    """
    expect_tensor("source_rows", source_rows, (None,), INDICES)
    expect_tensor("target_rows", target_rows, source_rows.shape, INDICES, like=source_rows)
    for name, x in (("source", source), ("target", target)):
        expect_tensor(name, x, (None, *source.shape[1:]), (source.dtype,))
        expect_reachable(name, x, source_rows.device)
    num_bytes = source[:1].numel() * source.element_size()
    if source_rows.shape[0] == 0 or num_bytes == 0:
        return
    word = next(
        w for w in (torch.int64, torch.int32, torch.int16, torch.uint8) if num_bytes % w.itemsize == 0
    )
    num_words = num_bytes // word.itemsize
    block = min(512, triton.next_power_of_2(num_words))
    copy_rows_kernel[(source_rows.shape[0], triton.cdiv(num_words, 4 * block))](
        source.flatten().view(word), target.flatten().view(word), source_rows, target_rows,
        NUM_WORDS=num_words, SPAN=4 * block, BLOCK=block, num_warps=4,
    )  # fmt: skip


def _launch(
    fmt: str,
    source: Tensor,
    open_groups: Tensor | None,
    group_rows: Tensor | None,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor | None,
    pool: Tensor | None,
    packed: Tensor | None,
    normed: Tensor | None,
    eps: float,
    ratio: int,
) -> None:
    """Check what the ops share, and launch. ``packed`` and ``normed`` are dense by row, ``pool`` by slot."""
    dim = source.shape[-1]
    num_rows = source.shape[0] if group_rows is None else group_rows.shape[0]
    if dim % 32:
        raise ValueError(
            f"{'kv' if fmt == 'window' else 'source'}: expected a width that is a multiple of 32, got {dim}"
        )
    dtype = source.dtype if normed is None else normed.dtype
    store_dtype = dtype if fmt == "plain" else torch.uint8
    width = {
        "window": dim + dim // 32,
        "entry": dim // 2 + dim // 16,
        "index": dim // 2 + dim // 32,
        "plain": dim,
    }[fmt]
    expect_tensor("weight", weight, (dim,), (torch.float32,), like=source)
    expect_tensor("cos", cos, (num_rows, None), (torch.float32,), like=source)
    expect_tensor("sin", sin, cos.shape, (torch.float32,), like=source)
    if slots is not None and pool is not None:
        expect_tensor("slots", slots, (num_rows,), INDICES, like=source)
        expect_tensor("pool", pool, (None, width), (store_dtype,), like=source)
    if num_rows == 0:
        return
    cache_store_kernel[(triton.cdiv(num_rows, ROWS_PER_PROGRAM),)](
        source, source if open_groups is None else open_groups, source if group_rows is None else group_rows,
        weight, cos, sin,
        source if slots is None else slots, source if pool is None else pool,
        source if packed is None else packed, source if normed is None else normed,
        num_rows, 0 if open_groups is None else open_groups.shape[0], source.stride(0), eps,
        DIM=dim, ROPE_HALF=cos.shape[1], WIDTH=width, RATIO=ratio, FORMAT=fmt,
        HAS_POOL=pool is not None, HAS_PACKED=packed is not None, HAS_NORMED=normed is not None,
        ROWS=ROWS_PER_PROGRAM, HALF=triton.next_power_of_2(dim // 2), IS_BF16=dtype == torch.bfloat16,
        num_warps=4,
    )  # fmt: skip

"""Attention over window rows and selected entries, read from the caches as they are stored.

Owns argument checks, tile choice and launch. It knows pools, rings and row indices; not sequences.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from kernels.argument_checks import FLOATS, INDICES, expect_output, expect_tensor
from kernels.sparse_attention.hopper import HALF, HEADS, KEYS, hopper_attention_kernel
from kernels.sparse_attention.kernel import LOG2_E, paged_sparse_attention_kernel, selection_slots_kernel


class AttentionConfig(NamedTuple):
    """Tiles of one launch: a function of the head count, the head's width and the dtype alone."""

    block_heads: int
    block_keys: int
    num_warps: int
    num_stages: int


def choose_config(num_heads: int, head_dim: int, dtype: torch.dtype) -> AttentionConfig:
    """Key tiles never depend on the number of rows, nor on how many keys a row has."""
    block_heads = min(64, max(16, triton.next_power_of_2(num_heads)))
    if dtype == torch.float32:
        # Products in full fp32 hold their operands in registers.
        return AttentionConfig(16, 32, 4, 1)
    is_wide = head_dim > 128
    return AttentionConfig(block_heads, 64, 8 if is_wide else 4, 1)


def runs_on_hopper_kernel(
    num_heads: int,
    head_dim: int,
    window: int,
    dtype: torch.dtype,
    *,
    is_packed: bool,
    capability: tuple[int, int],
) -> bool:
    """Whether the shape is the release's and the device has the instructions; nothing else decides."""
    is_shape = (
        num_heads == HEADS.value and head_dim == 2 * HALF.value and window % KEYS.value == 0 and window > 0
    )
    return is_shape and is_packed and dtype == torch.bfloat16 and capability == (9, 0)


def _capability(x: Tensor) -> tuple[int, int]:
    return torch.cuda.get_device_capability(x.device) if x.is_cuda else (0, 0)


def paged_sparse_attention(
    q: Tensor,
    ring: Tensor,
    chunk: Tensor,
    window_rows: Tensor,
    entries: Tensor | None,
    slots: Tensor | None,
    sink: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    scale: float,
    out: Tensor | None = None,
) -> Tensor:
    """One softmax over each query's window rows and selected entries, which are also the values.

    Args:
        q: [num_rows, num_heads, head_dim], bfloat16 or float32, rotated; rows may lie apart.
        ring: [num_ring_rows, window_width], the layer's rings of all sequences. uint8: head_dim e4m3 values,
            then an e8m0 scale per 32; else the dtype of ``q`` and window_width = head_dim.
        chunk: [num_chunk_rows, window_width], the step's own rows in the format of ``ring``.
        window_rows: [num_rows, window] int32, rows of ``cat(ring, chunk)``, positions ascending; -1 is none.
        entries: [num_slots, entry_width], the pool. uint8: head_dim e2m1 nibbles (even channel low), then
            an e4m3 scale per 16; else the dtype of ``q`` and entry_width = head_dim. None without selection.
        slots: [num_rows, num_selected] int32 slots of ``entries``, by ascending entry; -1 is none. Or None.
        sink: [num_heads] fp32, in the denominator only.
        cos, sin: [num_rows, rope_dim / 2] fp32: the output's last channels are rotated by the negative angle.
        scale: factor on the scores.
        out: where to write; None allocates.

    Returns:
        [num_rows, num_heads, head_dim], dtype of ``q``; a row without any key gives zeros. The order
        of keys is window, then selected, in fixed tiles. The model page's section 3, steps 4 and 5.

    Raises:
        ValueError: an argument is not as described.
    """
    expect_tensor("q", q, (None, None, None), FLOATS, is_strided=True)
    num_rows, num_heads, head_dim = q.shape
    if head_dim % 32:
        raise ValueError(f"q: expected a head_dim that is a multiple of 32, got {head_dim}")
    if q.stride(0) % 8:
        raise ValueError(f"q: expected a row stride that is a multiple of 8, got {q.stride(0)}")
    if q.stride(1) != head_dim:
        raise ValueError(f"q: expected heads side by side (stride {head_dim}), got stride {q.stride(1)}")
    is_packed = ring.dtype == torch.uint8
    store_dtype = torch.uint8 if is_packed else q.dtype
    window_width = head_dim + head_dim // 32 if is_packed else head_dim
    entry_width = head_dim // 2 + head_dim // 16 if is_packed else head_dim
    expect_tensor("ring", ring, (None, window_width), (store_dtype,), like=q)
    expect_tensor("chunk", chunk, (None, window_width), (store_dtype,), like=q)
    expect_tensor("window_rows", window_rows, (num_rows, None), (torch.int32,), like=q)
    if (entries is None) != (slots is None):
        raise ValueError(
            f"slots: expected with entries, got entries {entries is not None}, slots {slots is not None}"
        )
    if entries is not None and slots is not None:
        expect_tensor("entries", entries, (None, entry_width), (store_dtype,), like=q)
        expect_tensor("slots", slots, (num_rows, None), (torch.int32,), like=q)
    expect_tensor("sink", sink, (num_heads,), (torch.float32,), like=q)
    rope_half = cos.shape[-1]
    expect_tensor("cos", cos, (num_rows, rope_half), (torch.float32,), like=q)
    expect_tensor("sin", sin, (num_rows, rope_half), (torch.float32,), like=q)
    if 2 * rope_half > head_dim:
        raise ValueError(f"cos: expected at most {head_dim // 2} angles, got {rope_half}")
    out = expect_output("out", out, (num_rows, num_heads, head_dim), q.dtype, q)
    if out.stride(0) % 8 or out.stride(1) != head_dim:
        raise ValueError(f"out: expected strides (a multiple of 8, {head_dim}, 1), got {out.stride()}")
    if num_rows == 0:
        return out
    num_selected = 0 if slots is None else slots.shape[1]
    block_selected = triton.next_power_of_2(max(num_selected, 1))
    window = window_rows.shape[1]
    entries = ring if entries is None else entries
    slots = window_rows if slots is None else slots
    scale_log2 = scale * LOG2_E.value
    if runs_on_hopper_kernel(
        num_heads, head_dim, window, q.dtype, is_packed=is_packed, capability=_capability(q)
    ):
        # Programs take rows in turn, so their number is no part of any result.
        num_programs = torch.cuda.get_device_properties(q.device).multi_processor_count
        hopper_attention_kernel[(min(num_rows, num_programs),)](
            q.view(torch.int32), ring, chunk, window_rows, entries, slots, sink, cos, sin,
            out.view(torch.int32), num_rows, ring.shape[0], scale_log2, q.stride(0) // 2, out.stride(0) // 2,
            NUM_SELECTED=num_selected, BLOCK_SELECTED=block_selected, WINDOW_TILES=window // KEYS.value,
            ROPE_HALF=rope_half, num_warps=8,
        )  # fmt: skip
        return out
    config = choose_config(num_heads, head_dim, q.dtype)
    paged_sparse_attention_kernel[(num_rows, triton.cdiv(num_heads, config.block_heads))](
        q, ring, chunk, window_rows, entries, slots, sink, cos, sin, out,
        ring.shape[0], scale_log2,
        q.stride(0), out.stride(0),
        NUM_HEADS=num_heads, HEAD_DIM=head_dim, ROPE_HALF=rope_half,
        WINDOW=window, NUM_SELECTED=num_selected, WINDOW_WIDTH=window_width, ENTRY_WIDTH=entry_width,
        BLOCK_HEADS=config.block_heads, BLOCK_HALF=triton.next_power_of_2(head_dim // 2),
        BLOCK_KEYS=config.block_keys, BLOCK_SELECTED=block_selected,
        IS_PACKED=is_packed, PRECISION="ieee",
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return out


def selection_slots(
    selected: Tensor,
    chunks: Tensor,
    block_tables: Tensor,
    *,
    entries_per_block: int,
    out: Tensor | None = None,
) -> Tensor:
    """Pool slots of selected entries, once for all layers that share a selection.

    Args:
        selected: [num_rows, num_selected] int32 or int64 entry numbers, -1 for none.
        chunks: [num_rows] int32 or int64 row of ``block_tables``.
        block_tables: [num_chunks, max_blocks] int32 or int64.
        entries_per_block: entries of one KV block.
        out: where to write; None allocates.

    Returns:
        [num_rows, num_selected] int32, -1 where there is no entry or no block.

    Raises:
        ValueError: an argument is not as described.
    """
    expect_tensor("selected", selected, (None, None), INDICES)
    num_rows, num_selected = selected.shape
    expect_tensor("chunks", chunks, (num_rows,), INDICES, like=selected)
    expect_tensor("block_tables", block_tables, (None, None), INDICES, like=selected)
    if entries_per_block < 1:
        raise ValueError(f"entries_per_block: expected at least 1, got {entries_per_block}")
    out = expect_output("out", out, (num_rows, num_selected), torch.int32, selected)
    if not out.is_contiguous():
        raise ValueError(f"out: expected a contiguous tensor, got strides {out.stride()}")
    if num_rows and num_selected:
        block = min(1024, triton.next_power_of_2(num_selected))
        selection_slots_kernel[(num_rows,)](
            selected, chunks, block_tables, out, num_selected, block_tables.shape[1], block_tables.stride(0),
            ENTRIES_PER_BLOCK=entries_per_block, BLOCK=block, num_warps=4,
        )  # fmt: skip
    return out

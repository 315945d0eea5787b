"""Window + selected-entry attention with a sink, in plain torch: the model page's section 3, step 4."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.number_formats import unpack_fp4_entry, unpack_fp8
from kernels.rope import apply_rope_reference
from kernels.tree_sum import tree_sum


def sparse_attention_reference(
    q: Tensor, keys: Tensor, is_valid: Tensor, sink: Tensor, *, scale: float
) -> Tensor:
    """One softmax over each query's own keys, which are also the values.

    Args:
        q: [num_rows, num_heads, head_dim], float32 or bfloat16.
        keys: [num_rows, num_keys, head_dim] fp32: window positions ascending, then selected entries
            ascending; the place of a key never depends on a chunk. Invalid keys must be finite.
        is_valid: [num_rows, num_keys] bool.
        sink: [num_heads] fp32, in the denominator only.
        scale: factor on the scores.

    Returns:
        [num_rows, num_heads, head_dim], dtype of ``q``; a row without valid keys gives zeros.
    """
    scores = torch.bmm(q.float(), keys.transpose(1, 2)) * scale
    scores = scores.masked_fill(~is_valid[:, None], float("-inf"))
    sink = sink.view(1, -1, 1)
    peak = torch.maximum(scores.amax(-1, keepdim=True), sink)
    weights = torch.exp(scores - peak)
    total = tree_sum(weights, keepdim=True) + torch.exp(sink - peak)
    return (torch.bmm(weights, keys) / total).to(q.dtype)


def selection_slots_reference(
    selected: Tensor, chunks: Tensor, block_tables: Tensor, *, entries_per_block: int
) -> Tensor:
    """Pool slots of selected entries, -1 where there is none; the op's signature and returns."""
    blocks = torch.div(selected, entries_per_block, rounding_mode="floor")
    tables = block_tables[chunks.long()].long()
    found = tables.gather(1, blocks.long().clamp(0, tables.shape[1] - 1))
    is_known = (selected >= 0) & (blocks < tables.shape[1])
    return torch.where(is_known, found * entries_per_block + selected % entries_per_block, -1).to(torch.int32)


def paged_sparse_attention_reference(
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
) -> Tensor:
    """Gather, widen, attend and rotate back, in fp32 up to the end; the op's signature and returns."""
    is_packed = ring.dtype == torch.uint8
    rows = torch.cat([ring, chunk])[window_rows.long().clamp_min(0)]
    keys, is_valid = unpack_fp8(rows) if is_packed else rows.float(), window_rows >= 0
    if entries is not None and slots is not None:
        stored = entries[slots.long().clamp_min(0)]
        keys = torch.cat([keys, unpack_fp4_entry(stored) if is_packed else stored.float()], dim=1)
        is_valid = torch.cat([is_valid, slots >= 0], dim=1)
    # Stale bytes behind an invalid key could be NaN, and NaN times zero is NaN.
    keys = keys.masked_fill(~is_valid[..., None], 0.0)
    attended = sparse_attention_reference(q.float(), keys, is_valid, sink, scale=scale)
    return apply_rope_reference(attended, cos, sin, inverse=True).to(q.dtype)

"""Window + selected-entry attention with a sink, in plain torch: the model page's section 3, step 4."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.number_formats import unpack_fp4_entry, unpack_fp8
from kernels.rope import apply_rope_reference
from kernels.tree_sum import tree_sum

QUERY_TILE = 32


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
    tiles = []
    for start in range(0, q.shape[0], QUERY_TILE):
        rows = slice(start, start + QUERY_TILE)
        keys, is_valid = _read_window(ring, chunk, window_rows[rows].long())
        if entries is not None and slots is not None:
            selected, is_selected = _read_entries(entries, slots[rows].long())
            keys, is_valid = torch.cat([keys, selected], dim=1), torch.cat([is_valid, is_selected], dim=1)
        attended = sparse_attention_reference(q[rows].float(), keys, is_valid, sink, scale=scale)
        tiles.append(apply_rope_reference(attended, cos[rows], sin[rows], inverse=True).to(q.dtype))
    return torch.cat(tiles)


def _read_window(ring: Tensor, chunk: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 window keys of rows of ``cat(ring, chunk)``, zeros where there is none; and where there is one."""
    num_ring = ring.shape[0]
    is_ring = rows < num_ring
    stored = torch.where(
        is_ring[..., None],
        ring[torch.where(is_ring, rows.clamp_min(0), 0)],
        chunk[torch.where(is_ring, 0, rows - num_ring)],
    )
    keys = unpack_fp8(stored) if stored.dtype == torch.uint8 else stored.float()
    # Stale bytes behind an invalid key could be NaN, and NaN times zero is NaN.
    return keys.masked_fill((rows < 0)[..., None], 0.0), rows >= 0


def _read_entries(entries: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 entries, zeros where there is none; and where there is one."""
    is_selected = slots >= 0
    # Only as many columns are read as the tile has; the shape stays the same for every tile.
    most = int(is_selected.sum(1).max())
    stored = entries[slots[:, :most].clamp_min(0)]
    keys = unpack_fp4_entry(stored) if stored.dtype == torch.uint8 else stored.float()
    keys = keys.masked_fill(~is_selected[:, :most, None], 0.0)
    return torch.nn.functional.pad(keys, (0, 0, 0, slots.shape[1] - most)), is_selected

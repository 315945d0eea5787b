"""Indexer scores, the best entries and the candidate blocks, in plain torch: the model page's section 6.

Selection streams over the entries of a sequence in fixed tiles and keeps a running best, so its
scratch does not grow with the context. Ties always go to the lowest index.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.indexer.pages import KeyPages
from kernels.number_formats import unpack_fp4_index
from kernels.tree_sum import tree_sum


def index_scores_reference(q: Tensor, head_weights: Tensor, keys: Tensor) -> Tensor:
    """``s_j = sum_h a_h relu(q_h . k_j)`` in fp32.

    Args:
        q: [num_rows, num_heads, dim] fp32; head_weights: [num_rows, num_heads] fp32.
        keys: [num_rows or 1, num_keys, dim] fp32; 1 means "the same keys for every row".

    Returns:
        [num_rows, num_keys] fp32.
    """
    transposed = keys.transpose(1, 2).expand(q.shape[0], -1, -1)
    weighted = torch.relu(torch.bmm(q, transposed)) * head_weights[..., None]
    return tree_sum(weighted.transpose(1, 2))


def merge_topk_reference(
    scores: Tensor, indices: Tensor, new_scores: Tensor, new_indices: Tensor
) -> tuple[Tensor, Tensor]:
    """Keep the best k of a running best and a new tile whose indices are all higher.

    Args:
        scores, indices: [num_rows, k], best first, ties by lowest index; -inf where empty.
        new_scores: [num_rows, n]; new_indices: [n] or [num_rows, n], ascending.

    Returns:
        The new running best: a stable descending sort keeps the lower index first on ties.
    """
    merged = torch.cat([scores, new_scores], dim=1)
    merged_indices = torch.cat([indices, new_indices.expand_as(new_scores)], dim=1)
    values, order = torch.sort(merged, dim=1, descending=True, stable=True)
    k = scores.shape[1]
    return values[:, :k], merged_indices.gather(1, order[:, :k])


def ascending_selection_reference(scores: Tensor, indices: Tensor) -> Tensor:
    """Drop what scored -inf, order the rest by index: [num_rows, k] int64, padded with -1 behind."""
    last = torch.iinfo(torch.int64).max
    ordered = torch.where(scores == float("-inf"), last, indices).sort(dim=1).values
    return torch.where(ordered == last, -1, ordered)


def block_maxima_reference(scores: Tensor, newest_block: Tensor, first_block: int, block_size: int) -> Tensor:
    """Best score of each block of entries; the block holding a row's newest visible entry is +inf (pinned).

    Args:
        scores: [num_rows, n] fp32 with n a multiple of ``block_size``, -inf where not visible.
        newest_block: [num_rows] int64, absolute block index, -1 for none.
        first_block: absolute index of the first block in ``scores``.

    Returns:
        [num_rows, n / block_size] fp32.
    """
    maxima = scores.unflatten(1, (-1, block_size)).amax(-1)
    blocks = torch.arange(first_block, first_block + maxima.shape[1], device=scores.device)
    return maxima.masked_fill(blocks[None] == newest_block[:, None], float("inf"))


def paged_keys_reference(pages: KeyPages, entries: Tensor) -> Tensor:
    """fp32 index keys of entry numbers [num_rows, n] of each row's sequence: [num_rows, n, dim]."""
    blocks = torch.div(entries, pages.entries_per_block, rounding_mode="floor")
    tables = pages.block_tables[pages.sequences]
    found = tables.gather(1, blocks.clamp(0, tables.shape[1] - 1))
    stored = pages.keys[found * pages.entries_per_block + entries % pages.entries_per_block]
    return unpack_fp4_index(stored) if stored.dtype == torch.uint8 else stored.float()


def paged_index_scores_reference(q: Tensor, head_weights: Tensor, pages: KeyPages) -> Tensor:
    """Twin of ``index_scores``: [num_rows, max_entries] fp32, -inf from ``num_visible`` on."""
    entries = torch.arange(pages.max_entries, device=q.device).expand(q.shape[0], -1)
    return _visible_scores(q, head_weights, pages, entries, entries < pages.num_visible[:, None])


def candidate_scores_reference(
    q: Tensor, head_weights: Tensor, pages: KeyPages, blocks: Tensor, *, block_size: int
) -> Tensor:
    """Twin of ``candidate_scores``: [num_rows, num_blocks * block_size] fp32, -inf for none."""
    entries = (blocks[:, :, None] * block_size + torch.arange(block_size, device=q.device)).flatten(1)
    exists = (blocks >= 0).repeat_interleave(block_size, dim=1) & (entries < pages.num_visible[:, None])
    return _visible_scores(q, head_weights, pages, entries.clamp_min(0), exists)


def _visible_scores(
    q: Tensor, head_weights: Tensor, pages: KeyPages, entries: Tensor, exists: Tensor
) -> Tensor:
    queries = unpack_fp4_index(q) if q.dtype == torch.uint8 else q.float()
    keys = paged_keys_reference(pages, torch.where(exists, entries, 0))
    return index_scores_reference(queries, head_weights, keys).masked_fill(~exists, float("-inf"))


def select_topk_reference(values: Tensor, exists: Tensor, k: int) -> Tensor:
    """Numbers of the k best values above -inf of each row, ascending, -1 behind; ties by lowest number."""
    values = values.masked_fill(~exists, float("-inf"))
    values = torch.nn.functional.pad(values, (0, max(k - values.shape[1], 0)), value=float("-inf"))
    best, numbers = torch.sort(values, dim=1, descending=True, stable=True)
    return ascending_selection_reference(best[:, :k], numbers[:, :k])

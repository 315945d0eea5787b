"""Indexer scores, the best entries and the candidate blocks, in plain torch: the model page's section 6.

Selection streams over the entries of a sequence in fixed tiles and keeps a running best, so its
scratch does not grow with the context. Ties always go to the lowest index.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.indexer.pages import KeyPages, SelectedEntries
from kernels.number_formats import unpack_fp4_index
from kernels.tree_sum import tree_sum

ROW_TILE = 32
ENTRY_TILE = {"cpu": 128, "cuda": 2048}


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
    return tree_sum(weighted, 1)


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


def select_entries_reference(
    q: Tensor,
    head_weights: Tensor,
    pages: KeyPages,
    *,
    k: int,
    block_size: int,
    num_blocks: int = 0,
    blocks: Tensor | None = None,
) -> SelectedEntries:
    """Twin of ``select_entries``, one fixed tile of rows after another."""
    queries = unpack_fp4_index(q) if q.dtype == torch.uint8 else q.float()
    tiles = []
    for start in range(0, q.shape[0], ROW_TILE):
        rows = slice(start, start + ROW_TILE)
        visible = pages.num_visible[rows]
        tile = pages._replace(
            sequences=pages.sequences[rows], num_visible=visible, max_entries=int(visible.max())
        )
        inputs = (queries[rows], head_weights[rows], tile)
        if blocks is not None:
            tiles.append(_select_in_blocks(*inputs, blocks[rows], k, block_size))
        else:
            tiles.append(_select_visible(*inputs, k, block_size, num_blocks))
    kept = [tile.blocks for tile in tiles if tile.blocks is not None]
    return SelectedEntries(torch.cat([tile.entries for tile in tiles]), torch.cat(kept) if kept else None)


def _select_visible(
    q: Tensor, head_weights: Tensor, pages: KeyPages, k: int, block_size: int, num_blocks: int
) -> SelectedEntries:
    visible, device = pages.num_visible, q.device
    newest = torch.where(visible > 0, (visible - 1) // block_size, -1)
    if pages.max_entries <= k and (num_blocks == 0 or pages.max_entries <= block_size * num_blocks):
        # Everything visible is selected, and every block kept: there is nothing to score.
        return SelectedEntries(
            _all_below(visible, k), _all_below(newest + 1, num_blocks) if num_blocks else None
        )
    best, best_blocks = _empty_best(len(visible), k, device), _empty_best(len(visible), num_blocks, device)
    if bool((pages.sequences == pages.sequences[0]).all()):
        # All rows read the same keys: they are widened once.
        pages = pages._replace(sequences=pages.sequences[:1])
    # A tile of entries holds whole candidate blocks.
    step = max(ENTRY_TILE[device.type] // block_size, 1) * block_size
    for first in range(0, pages.max_entries, step):
        entries = torch.arange(first, first + step, device=device)
        keys = paged_keys_reference(pages, entries.expand(len(pages.sequences), -1))
        scores = index_scores_reference(q, head_weights, keys)
        scores = scores.masked_fill(entries[None] >= visible[:, None], float("-inf"))
        best = merge_topk_reference(*best, scores, entries)
        if num_blocks:
            maxima = block_maxima_reference(scores, newest, first // block_size, block_size)
            numbers = torch.arange(first // block_size, first // block_size + maxima.shape[1], device=device)
            best_blocks = merge_topk_reference(*best_blocks, maxima, numbers)
    kept = ascending_selection_reference(*best_blocks) if num_blocks else None
    return SelectedEntries(ascending_selection_reference(*best), kept)


def _select_in_blocks(
    q: Tensor, head_weights: Tensor, pages: KeyPages, blocks: Tensor, k: int, block_size: int
) -> SelectedEntries:
    """Only the entries of each row's kept blocks, in ascending order."""
    visible, device = pages.num_visible, q.device
    if pages.max_entries <= k and pages.max_entries <= block_size * blocks.shape[1]:
        return SelectedEntries(_all_below(visible, k), None)
    best = _empty_best(len(visible), k, device)
    step = max(ENTRY_TILE[device.type] // block_size, 1)
    num_blocks = min(blocks.shape[1], -(-pages.max_entries // block_size))
    for first in range(0, num_blocks, step):
        some = blocks[:, first : first + step]
        some = torch.nn.functional.pad(some, (0, step - some.shape[1]), value=-1)
        entries = (some[:, :, None] * block_size + torch.arange(block_size, device=device)).flatten(1)
        exists = (some >= 0).repeat_interleave(block_size, dim=1) & (entries < visible[:, None])
        keys = paged_keys_reference(pages, entries.clamp_min(0))
        scores = index_scores_reference(q, head_weights, keys).masked_fill(~exists, float("-inf"))
        best = merge_topk_reference(*best, scores, entries)
    return SelectedEntries(ascending_selection_reference(*best), None)


def _all_below(counts: Tensor, width: int) -> Tensor:
    """[n] counts -> [n, width] int64: 0 .. count - 1, then -1."""
    numbers = torch.arange(width, device=counts.device)[None]
    return torch.where(numbers < counts[:, None], numbers, -1)


def _empty_best(num_rows: int, k: int, device: torch.device) -> tuple[Tensor, Tensor]:
    scores = torch.full((num_rows, k), float("-inf"), device=device)
    return scores, torch.full((num_rows, k), -1, dtype=torch.int64, device=device)

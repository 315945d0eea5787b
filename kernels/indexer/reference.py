"""Indexer scores, the best entries and the candidate blocks, in plain torch: the model page's section 6.

Selection streams over the entries of a sequence in fixed tiles and keeps a running best, so its
scratch does not grow with the context. Ties always go to the lowest index.
"""

from __future__ import annotations

import torch
from torch import Tensor

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

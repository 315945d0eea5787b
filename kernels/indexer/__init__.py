from kernels.indexer.op import candidate_scores, index_scores
from kernels.indexer.pages import KeyPages, SelectedEntries
from kernels.indexer.reference import (
    ascending_selection_reference,
    block_maxima_reference,
    candidate_scores_reference,
    index_scores_reference,
    merge_topk_reference,
    paged_index_scores_reference,
    select_entries_reference,
    select_topk_reference,
)
from kernels.indexer.selection import select_entries, select_topk

__all__ = [
    "KeyPages",
    "SelectedEntries",
    "ascending_selection_reference",
    "block_maxima_reference",
    "candidate_scores",
    "candidate_scores_reference",
    "index_scores",
    "index_scores_reference",
    "merge_topk_reference",
    "paged_index_scores_reference",
    "select_entries",
    "select_entries_reference",
    "select_topk",
    "select_topk_reference",
]

from kernels.indexer.reference import (
    ascending_selection_reference,
    block_maxima_reference,
    index_scores_reference,
    merge_topk_reference,
)

__all__ = [
    "ascending_selection_reference",
    "block_maxima_reference",
    "index_scores_reference",
    "merge_topk_reference",
]

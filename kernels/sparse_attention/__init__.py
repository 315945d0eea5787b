from kernels.sparse_attention.op import (
    AttentionConfig,
    choose_config,
    paged_sparse_attention,
    selection_slots,
)
from kernels.sparse_attention.reference import (
    paged_sparse_attention_reference,
    selection_slots_reference,
    sparse_attention_reference,
)

__all__ = [
    "AttentionConfig",
    "choose_config",
    "paged_sparse_attention",
    "paged_sparse_attention_reference",
    "selection_slots",
    "selection_slots_reference",
    "sparse_attention_reference",
]

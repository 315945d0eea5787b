from kernels.rope.op import choose_rotate_config, rotate_queries
from kernels.rope.reference import (
    YarnScaling,
    apply_rope_reference,
    rope_frequencies,
    rope_tables,
    rotate_queries_reference,
)

__all__ = [
    "YarnScaling",
    "apply_rope_reference",
    "choose_rotate_config",
    "rope_frequencies",
    "rope_tables",
    "rotate_queries",
    "rotate_queries_reference",
]

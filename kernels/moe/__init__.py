from kernels.moe.reference import (
    Routes,
    combine_experts_reference,
    expert_mlp_reference,
    route_tokens_reference,
    swiglu_reference,
)

__all__ = [
    "Routes",
    "combine_experts_reference",
    "expert_mlp_reference",
    "route_tokens_reference",
    "swiglu_reference",
]

from kernels.moe.op import combine_experts, expert_mlp, swiglu
from kernels.moe.reference import (
    Routes,
    combine_experts_reference,
    expert_mlp_reference,
    route_tokens_reference,
    swiglu_reference,
)
from kernels.moe.routing import route_tokens, split_gate
from kernels.moe.weights import ExpertWeight, Mxfp4Weight

__all__ = [
    "ExpertWeight",
    "Mxfp4Weight",
    "Routes",
    "combine_experts",
    "combine_experts_reference",
    "expert_mlp",
    "expert_mlp_reference",
    "route_tokens",
    "route_tokens_reference",
    "split_gate",
    "swiglu",
    "swiglu_reference",
]

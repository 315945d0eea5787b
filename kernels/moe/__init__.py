from kernels.moe.homes import ALIGNMENT, SlotHomes
from kernels.moe.op import combine_experts, expert_mlp, expert_mlp_at_homes, swiglu
from kernels.moe.prepared import can_prepare, fastest_experts, prepare_experts, restore_experts
from kernels.moe.reference import (
    Routes,
    combine_experts_reference,
    expert_mlp_at_homes_reference,
    expert_mlp_reference,
    route_tokens_reference,
    swiglu_reference,
)
from kernels.moe.routing import route_tokens, split_gate
from kernels.moe.weights import ExpertWeight, Mxfp4Weight, PreparedMxfp4

__all__ = [
    "ALIGNMENT",
    "ExpertWeight",
    "Mxfp4Weight",
    "PreparedMxfp4",
    "Routes",
    "SlotHomes",
    "can_prepare",
    "combine_experts",
    "combine_experts_reference",
    "expert_mlp",
    "expert_mlp_at_homes",
    "expert_mlp_at_homes_reference",
    "expert_mlp_reference",
    "fastest_experts",
    "prepare_experts",
    "restore_experts",
    "route_tokens",
    "route_tokens_reference",
    "split_gate",
    "swiglu",
    "swiglu_reference",
]

from kernels.linear.op import fp8_linear, grouped_linear, head_logits, linear
from kernels.linear.reference import (
    Fp8Weight,
    fp8_linear_reference,
    grouped_linear_reference,
    head_logits_reference,
    linear_reference,
)
from kernels.linear.tiles import choose_config, choose_sum_order

__all__ = [
    "Fp8Weight",
    "choose_config",
    "choose_sum_order",
    "fp8_linear",
    "fp8_linear_reference",
    "grouped_linear",
    "grouped_linear_reference",
    "head_logits",
    "head_logits_reference",
    "linear",
    "linear_reference",
]

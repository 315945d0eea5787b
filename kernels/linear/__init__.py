from kernels.linear.reference import (
    Fp8Weight,
    fp8_linear_reference,
    grouped_linear_reference,
    head_logits_reference,
    linear_reference,
)

__all__ = [
    "Fp8Weight",
    "fp8_linear_reference",
    "grouped_linear_reference",
    "head_logits_reference",
    "linear_reference",
]

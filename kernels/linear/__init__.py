from kernels.linear.op import fp8_linear, fp32_linear, grouped_linear, linear
from kernels.linear.reference import (
    Fp8Weight,
    fp8_linear_reference,
    fp32_linear_reference,
    grouped_linear_reference,
    linear_reference,
)
from kernels.linear.scales import ROUNDING, align_scales
from kernels.linear.tiles import (
    HOPPER_TILES,
    HopperConfig,
    choose_config,
    choose_hopper_config,
    choose_sum_order,
    runs_on_hopper_kernel,
)

__all__ = [
    "HOPPER_TILES",
    "ROUNDING",
    "Fp8Weight",
    "HopperConfig",
    "align_scales",
    "choose_config",
    "choose_hopper_config",
    "choose_sum_order",
    "fp8_linear",
    "fp8_linear_reference",
    "fp32_linear",
    "fp32_linear_reference",
    "grouped_linear",
    "grouped_linear_reference",
    "linear",
    "linear_reference",
    "runs_on_hopper_kernel",
]

"""Linear layers on the device: checks, tile choice, launches.

It knows how operands are stored; not what the layer is part of.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.argument_checks import FLOATS, expect_output, expect_tensor
from kernels.linear.hopper import STORE_ROWS, hopper_linear_kernel
from kernels.linear.kernel import linear_kernel, sum_parts_kernel, widen_rows_kernel, widen_weight_kernel
from kernels.linear.reference import Fp8Weight
from kernels.linear.tiles import (
    FEW_ROWS,
    SLICE,
    Product,
    choose_config,
    choose_hopper_config,
    choose_sum_order,
    runs_on_hopper_kernel,
)
from kernels.number_formats import QuantisedRows

E4M3 = (torch.float8_e4m3fn,)


def linear(x: Tensor, weight: Tensor, *, out: Tensor | None = None) -> Tensor:
    """``x @ weight^T`` with fp32 sums, in an order that the weight's shape alone decides.

    Args:
        x: [num_rows, in_features], float32 or bfloat16; rows may lie apart.
        weight: [out_features, in_features], dtype of ``x``. float32 products are not rounded.
        out: [num_rows, out_features], dtype of ``x``; None allocates.

    Returns:
        [num_rows, out_features], dtype of ``x``.

    Raises:
        ValueError: an argument is not as described, or a row of bfloat16 or fp8 not at a multiple of 16 bytes
            where Hopper's kernel reads or writes it.
    """
    expect_tensor("x", x, (None, None), FLOATS, is_strided=True)
    expect_tensor("weight", weight, (None, x.shape[1]), (x.dtype,), like=x)
    out = expect_output("out", out, (x.shape[0], weight.shape[0]), x.dtype, x)
    return _launch(x, None, weight, None, out, num_groups=1)


def fp8_linear(
    x: QuantisedRows | Tensor, weight: Fp8Weight, *, dtype: torch.dtype, out: Tensor | None = None
) -> Tensor:
    """``x @ weight^T`` of a weight stored as fp8.

    Args:
        x: [num_rows, in_features]; as quantised (contiguous), or float32 or bfloat16 (then in ``dtype``;
            rows may lie apart).
        weight: [out_features, in_features], contiguous. ``is_even`` is taken at its word.
        dtype: float32 or bfloat16: of the output. Rows with one scale and bfloat16 are multiplied as fp8;
            all else is widened, which is exact, and multiplied in ``dtype``. fp8 tensor cores cut a running
            sum to about 14 bits, so every 128 products are added in fp32: a sum of one sign is then within
            4e-3 of the true one, its rounding to bfloat16 included.
        out: [num_rows, out_features] in ``dtype``; None allocates.

    Returns:
        [num_rows, out_features] in ``dtype``. Section 10 of the model page.

    Raises:
        ValueError: an argument is not as described, or a row of bfloat16 or fp8 not at a multiple of 16 bytes
            where Hopper's kernel reads or writes it.
    """
    if dtype not in FLOATS:
        raise ValueError(f"dtype: expected {' or '.join(map(str, FLOATS))}, got {dtype}")
    if not isinstance(x, QuantisedRows):
        expect_tensor("x", x, (None, None), (dtype,), is_strided=True)
        num_rows, in_features = x.shape
        _expect_weight(weight, in_features, x)
        out = expect_output("out", out, (num_rows, weight.values.shape[0]), dtype, x)
        return _launch(x, None, weight.values, weight.scales, out, num_groups=1)
    values, scales = x
    expect_tensor("x.values", values, (None, None), E4M3)
    num_rows, in_features = values.shape
    is_row = scales.dim() == 2 and scales.shape[1] == 1
    num_scales = 1 if is_row else in_features // SLICE
    expect_tensor("x.scales", scales, (num_rows, num_scales), (torch.uint8,), like=values)
    _expect_weight(weight, in_features, values)
    out = expect_output("out", out, (num_rows, weight.values.shape[0]), dtype, values)
    if is_row and dtype == torch.bfloat16:
        return _launch(
            values, scales, weight.values, weight.scales, out, num_groups=1, is_even=weight.is_even
        )
    return _launch(_widen_rows(x, dtype), None, weight.values, weight.scales, out, num_groups=1)


def grouped_linear(
    x: Tensor, weight: Fp8Weight | Tensor, *, num_groups: int, out: Tensor | None = None
) -> Tensor:
    """Each group of outputs reads its own slice of the inputs; one launch.

    Args:
        x: [num_rows, num_groups * group_in], float32 or bfloat16; rows may lie apart.
        weight: [num_groups * group_out, group_in], contiguous; a tensor has ``x``'s dtype, fp8 is widened.
        out: [num_rows, num_groups * group_out], dtype of ``x``; None allocates.

    Returns:
        [num_rows, num_groups * group_out], dtype of ``x``.

    Raises:
        ValueError: an argument is not as described, or a row of bfloat16 or fp8 not at a multiple of 16 bytes
            where Hopper's kernel reads or writes it.
    """
    expect_tensor("x", x, (None, None), FLOATS, is_strided=True)
    num_rows, in_features = x.shape
    if num_groups < 1 or in_features % num_groups:
        raise ValueError(f"num_groups: expected a divisor of {in_features}, got {num_groups}")
    values, scales = (weight.values, weight.scales) if isinstance(weight, Fp8Weight) else (weight, None)
    if isinstance(weight, Fp8Weight):
        _expect_weight(weight, in_features // num_groups, x)
    else:
        expect_tensor("weight", weight, (None, in_features // num_groups), (x.dtype,), like=x)
    if values.shape[0] % num_groups:
        raise ValueError(f"num_groups: expected a divisor of {values.shape[0]}, got {num_groups}")
    out = expect_output("out", out, (num_rows, values.shape[0]), x.dtype, x)
    return _launch(x, None, values, scales, out, num_groups=num_groups)


def fp32_linear(x: Tensor, weight: Tensor, *, out: Tensor | None = None) -> Tensor:
    """``x @ weight^T`` in fp32: the head's logits, and what a compressor pools.

    Args:
        x: [num_rows, in_features], float32 or bfloat16; rows may lie apart.
        weight: [out_features, in_features], float32 or bfloat16, contiguous. Two bfloat16 operands are
            multiplied as they are, which is exact; else both are widened to float32.
        out: [num_rows, out_features] fp32; None allocates.

    Returns:
        [num_rows, out_features] fp32.

    Raises:
        ValueError: an argument is not as described.
    """
    expect_tensor("x", x, (None, None), FLOATS, is_strided=True)
    expect_tensor("weight", weight, (None, x.shape[1]), FLOATS, like=x)
    out = expect_output("out", out, (x.shape[0], weight.shape[0]), torch.float32, x)
    return _launch(x, None, weight, None, out, num_groups=1)


def _expect_weight(weight: Fp8Weight, in_features: int, like: Tensor) -> None:
    expect_tensor("weight.values", weight.values, (None, in_features), E4M3, like=like)
    tiles = (-(-weight.values.shape[0] // SLICE), -(-in_features // SLICE))
    expect_tensor("weight.scales", weight.scales, tiles, (torch.uint8,), like=like)


def _widen_rows(x: QuantisedRows, dtype: torch.dtype) -> Tensor:
    num_rows, width = x.values.shape
    wide = torch.empty((num_rows, width), dtype=dtype, device=x.values.device)
    if wide.numel():
        widen_rows_kernel[(num_rows, triton.cdiv(width, 2048))](
            x.values.view(torch.uint8), x.scales, wide,
            WIDTH=width, GROUP=width // x.scales.shape[1], BLOCK=2048, num_warps=4,
        )  # fmt: skip
    return wide


def _product_of(x: Tensor, weight: Tensor) -> Product:
    if x.dtype in E4M3:
        return "fp8"
    return "fp32" if torch.float32 in (x.dtype, weight.dtype) else "bf16"


@functools.cache
def _processor(device: torch.device) -> tuple[tuple[int, int], int]:
    """Compute capability and number of multiprocessors."""
    properties = torch.cuda.get_device_properties(device)
    return (properties.major, properties.minor), properties.multi_processor_count


def _launch(
    x: Tensor,
    row_scales: Tensor | None,
    weight: Tensor,
    scales: Tensor | None,
    out: Tensor,
    *,
    num_groups: int,
    is_even: bool = False,
) -> Tensor:
    num_rows, num_out = out.shape
    if num_rows == 0 or num_out == 0:
        return out
    product = _product_of(x, weight)
    capability = _processor(x.device)[0] if x.is_cuda else (0, 0)
    uses_hopper = out.dtype == torch.bfloat16 and runs_on_hopper_kernel(
        num_out // num_groups, weight.shape[1], num_groups, product, capability
    )
    if uses_hopper and product == "bf16" and scales is not None:
        # Few rows are bound by reading the weight: it is widened in the product. Else once, before it.
        uses_hopper = num_rows > FEW_ROWS
        if uses_hopper:
            weight, scales = _widen_weight(weight, scales), None
    if uses_hopper:
        return _launch_hopper(x, row_scales, weight, scales, out, num_groups, is_even)
    return _launch_plain(x, row_scales, weight, scales, out, num_groups, product)


def _widen_weight(values: Tensor, scales: Tensor) -> Tensor:
    num_out, width = values.shape
    wide = torch.empty((num_out, width), dtype=torch.bfloat16, device=values.device)
    widen_weight_kernel[(triton.cdiv(num_out, SLICE), triton.cdiv(width, 256))](
        values.view(torch.uint8), scales, wide, num_out,
        WIDTH=width, NUM_SCALES=scales.shape[1], ROWS=SLICE, BLOCK=256, num_warps=8,
    )  # fmt: skip
    return wide


def _launch_hopper(
    x: Tensor,
    row_scales: Tensor | None,
    weight: Tensor,
    scales: Tensor | None,
    out: Tensor,
    num_groups: int,
    is_even: bool,
) -> Tensor:
    (num_rows, num_out), in_features = out.shape, weight.shape[1]
    for name, operand in (("x", x), ("weight", weight), ("out", out)):
        if operand.stride(0) * operand.element_size() % 16 or operand.data_ptr() % 16:
            raise ValueError(
                f"{name}: expected rows that start at multiples of 16 bytes, got {operand.stride()}"
            )
    num_processors = _processor(out.device)[1]
    config = choose_hopper_config(num_out, num_rows, num_processors)
    block_in = 128 // x.element_size()
    bits = 8 * x.element_size()
    operand_layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=bits, rank=2)
    out_layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    tiles = triton.cdiv(num_out, config.block_out) * triton.cdiv(num_rows, config.block_rows)
    # Programs take tiles in turn, so their number is no part of any result.
    hopper_linear_kernel[(min(tiles, num_processors * config.per_processor),)](
        TensorDescriptor.from_tensor(x, [config.block_rows, block_in], operand_layout),
        TensorDescriptor.from_tensor(weight, [config.block_out, block_in], operand_layout),
        TensorDescriptor.from_tensor(out, [min(STORE_ROWS.value, config.block_rows), 64], out_layout),
        None if scales is None else scales.view(torch.int32), row_scales, num_rows,
        OUT=num_out, K_TILES=in_features // block_in, GROUP_OUT=num_out // num_groups,
        STAGES=config.num_stages, BAND=config.band, IS_EVEN=is_even, num_warps=4,
        maxnreg=128 if config.per_processor == 2 else None,
    )  # fmt: skip
    return out


def _launch_plain(
    x: Tensor, row_scales: Tensor | None, weight: Tensor, scales: Tensor | None, out: Tensor, num_groups: int,
    product: Product,
) -> Tensor:  # fmt: skip
    """One launch where rows abound or the sum has one part; else one for the parts and one for their sum."""
    num_rows, num_out = out.shape
    group_out, in_features = num_out // num_groups, weight.shape[1]
    order = choose_sum_order(group_out, in_features, num_groups, product)
    config = choose_config(group_out, num_rows, product)
    is_partial = order.num_splits > 1 and num_rows <= FEW_ROWS
    num_parts = order.num_splits if is_partial else 1
    target = out
    if is_partial:
        target = torch.empty((num_parts * num_rows, num_out), dtype=torch.float32, device=out.device)
    is_fp8_weight = scales is not None
    tiles = num_groups * triton.cdiv(group_out, config.block_out) * triton.cdiv(num_rows, config.block_rows)
    linear_kernel[(tiles, num_parts)](
        x, row_scales, weight, scales, target, num_rows, x.stride(0), target.stride(0), num_rows * num_out,
        GROUP_OUT=group_out, IN=in_features, NUM_GROUPS=num_groups, NUM_SPLITS=order.num_splits,
        SPLIT_SLICES=order.split_slices, BLOCK_OUT=config.block_out, BLOCK_ROWS=config.block_rows,
        UNROLL=order.unroll, NUM_STAGES=config.num_stages, IS_FP8_WEIGHT=is_fp8_weight,
        IS_ROW=product == "fp8", IS_PARTIAL=is_partial,
        DOT_TYPE=tl.bfloat16 if product == "bf16" else tl.float32, BAND=config.band, SLICE=SLICE,
        num_warps=config.num_warps,
    )  # fmt: skip
    if is_partial:
        block = min(1024, triton.next_power_of_2(num_out))
        sum_parts_kernel[(num_rows, triton.cdiv(num_out, block))](
            target, row_scales, out, num_rows * num_out, out.stride(0),
            OUT=num_out, NUM_SPLITS=num_parts, BLOCK=block, IS_ROW=product == "fp8", num_warps=4,
        )  # fmt: skip
    return out

"""Contract cases of linear layers: every kind of operand, ragged shapes, one part and several."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from kernels.linear import (
    Fp8Weight,
    fp8_linear,
    fp8_linear_reference,
    fp32_linear,
    fp32_linear_reference,
    grouped_linear,
    grouped_linear_reference,
    linear,
    linear_reference,
)
from kernels.number_formats import QuantisedRows, quantise_activations_reference
from tests.kernels.contract import Inputs, OpCase, Outputs, Tolerance

Kind = Literal["linear", "fp32", "none", "release", "row", "grouped", "grouped-fp8"]
FP32 = Tolerance(2e-6, 2e-6, "fp32 sums in another order")
FP32_OF_BF16 = Tolerance(1e-5, 1e-5, "tensor cores cut a running fp32 sum off after every 16 products")
BF16 = Tolerance(5e-4, 5e-3, "fp32 sums in another order; at a rounding boundary, one bfloat16 step")
ROW = Tolerance(2.5e-3, 5e-3, "fp8 tensor cores keep about 14 bits of 128 products' sum; rounded to bfloat16")
ONE_SIGN = Tolerance(4e-3, 8e-3, "2^-9 for sums of which nothing cancels, 2^-9 for the rounding to bfloat16")
ROW_COUNTS = (1, 2, 3, 5, 16, 17, 64, 65, 257)
NUM_GROUPS = 4


def fp8_weight(out_features: int, in_features: int, g: torch.Generator, device: torch.device) -> Fp8Weight:
    """Codes and scales as the release has them: a tile's largest value fills the format."""
    wide = torch.randn(out_features, in_features, generator=g, device=g.device) / in_features**0.5
    wide *= torch.exp2(torch.randn(out_features, 1, generator=g, device=g.device) / 2)
    rows, columns = -(-out_features // 32), -(-in_features // 32)
    padding = (0, columns * 32 - in_features, 0, rows * 32 - out_features)
    padded = torch.nn.functional.pad(wide, padding)
    amax = padded.view(rows, 32, columns, 32).abs().amax((1, 3)).clamp_min(1e-4)
    exponents = torch.ceil(torch.log2(amax / 448)).to(torch.int32) + 127
    scales = torch.exp2(exponents.float() - 127).repeat_interleave(32, 0).repeat_interleave(32, 1)
    values = (padded / scales)[:out_features, :in_features].to(torch.float8_e4m3fn)
    return Fp8Weight(values.contiguous().to(device), exponents.to(torch.uint8).to(device))


def linear_inputs(
    kind: Kind, seed: int, device: torch.device, num_rows: int, in_features: int, out_features: int,
    dtype: torch.dtype, weight_dtype: torch.dtype, is_one_signed: bool = False,
) -> Inputs:  # fmt: skip
    """Rows of different sizes; all numbers positive where sums are to have one sign."""
    g = torch.Generator().manual_seed(seed)
    width = in_features * (NUM_GROUPS if kind.startswith("grouped") else 1)
    x = torch.randn(num_rows, width, generator=g) * torch.exp2(2 * torch.randn(num_rows, 1, generator=g))
    x = (x.abs() if is_one_signed else x).to(dtype)
    inputs: dict[str, Tensor] = {}
    if kind in ("release", "row"):
        quantised = quantise_activations_reference(x, mode=kind)  # type: ignore[arg-type]
        inputs |= {"x": quantised.values.to(device), "row_scales": quantised.scales.to(device)}
    else:
        inputs["x"] = x.to(device)
    if kind in ("linear", "fp32", "grouped"):
        weight = torch.randn(out_features, in_features, generator=g) / in_features**0.5
        inputs["weight"] = weight.to(device, weight_dtype)
    else:
        values, scales, _ = fp8_weight(out_features, in_features, g, device)
        if is_one_signed:
            values = (values.view(torch.uint8) & 0x7F).view(values.dtype)
        inputs |= {"weight": values, "scales": scales}
    return inputs


def _operands(i: Inputs) -> tuple[QuantisedRows | Tensor, Fp8Weight | Tensor]:
    x = QuantisedRows(i["x"], i["row_scales"]) if "row_scales" in i else i["x"]
    return x, Fp8Weight(i["weight"], i["scales"]) if "scales" in i else i["weight"]


def call(kind: Kind, i: Inputs, dtype: torch.dtype, out: Tensor | None) -> Tensor:
    """The public op."""
    x, weight = _operands(i)
    if kind == "linear":
        return linear(x, weight, out=out)
    if kind == "fp32":
        return fp32_linear(x, weight, out=out)
    if kind.startswith("grouped"):
        return grouped_linear(x, weight, num_groups=NUM_GROUPS, out=out)
    return fp8_linear(x, weight, dtype=dtype, out=out)


def call_reference(kind: Kind, i: Inputs, dtype: torch.dtype) -> Tensor:
    """Its reference."""
    x, weight = _operands(i)
    if kind == "linear":
        return linear_reference(x, weight)
    if kind == "fp32":
        return fp32_linear_reference(x, weight)
    if kind.startswith("grouped"):
        return grouped_linear_reference(x, weight, num_groups=NUM_GROUPS)
    return fp8_linear_reference(x, weight, dtype=dtype)


def float64_product(i: Inputs) -> Tensor:
    """On the values that the operands stand for."""
    x, weight = _operands(i)
    if isinstance(x, QuantisedRows):
        scales = torch.exp2(x.scales.double() - 127).repeat_interleave(
            x.values.shape[1] // x.scales.shape[1], 1
        )
        x = x.values.double() * scales
    wide = (weight.widened() if isinstance(weight, Fp8Weight) else weight).double()
    groups = x.shape[1] // wide.shape[1]
    pairs = zip(x.double().chunk(groups, 1), wide.chunk(groups), strict=True)
    return torch.cat([inputs @ part.T for inputs, part in pairs], dim=1)


def linear_case(
    kind: Kind,
    in_features: int,
    out_features: int,
    dtype: torch.dtype,
    *,
    num_rows: int = 300,
    row_counts: tuple[int, ...] = ROW_COUNTS,
    weight_dtype: torch.dtype | None = None,
    is_one_signed: bool = False,
) -> OpCase:
    out_dtype = torch.float32 if kind == "fp32" else dtype
    if kind == "fp32":
        tolerance = FP32_OF_BF16 if (dtype, weight_dtype) == (torch.bfloat16, None) else FP32
    elif kind == "row" and dtype == torch.bfloat16:
        tolerance = ONE_SIGN if is_one_signed else ROW
    else:
        tolerance = FP32 if dtype == torch.float32 else BF16

    def run(inputs: Inputs, out: Outputs) -> None:
        call(kind, inputs, dtype, out["out"][: inputs["x"].shape[0]])

    return OpCase(
        name=f"{kind}-{str(dtype)[6:]}-{in_features}-{out_features}" + "-one-sign" * is_one_signed,
        build=lambda seed, device: linear_inputs(
            kind,
            seed,
            device,
            num_rows,
            in_features,
            out_features,
            dtype,
            weight_dtype or dtype,
            is_one_signed,
        ),
        row_inputs=("x", "row_scales") if kind in ("release", "row") else ("x",),
        outputs=lambda i, n: {"out": torch.empty(n, out_features, dtype=out_dtype, device=i["x"].device)},
        run=run,
        reference=lambda i: {"out": call_reference(kind, i, dtype)},
        float64=lambda i: {"out": float64_product(i)},
        tolerances={"out": tolerance},
        row_counts=row_counts,
        # The interpreter's bfloat16 products are wrong, and it is slow.
        needs_gpu=dtype == torch.bfloat16 or in_features * out_features > 1 << 17,
    )


F32, B16 = torch.float32, torch.bfloat16
FEW = (1, 3, 17)
SMALL = [
    linear_case("linear", 100, 8, F32, num_rows=40, row_counts=FEW),
    linear_case("linear", 1024, 40, F32, num_rows=70, row_counts=(1, 65)),
    linear_case("fp32", 96, 50, F32, num_rows=9, row_counts=(1, 3)),
    linear_case("none", 96, 40, F32, num_rows=9, row_counts=(1, 3)),
    linear_case("release", 96, 40, F32, num_rows=9, row_counts=(1, 3)),
    linear_case("row", 96, 40, F32, num_rows=9, row_counts=(1, 3)),
    linear_case("grouped", 40, 32, F32, num_rows=9, row_counts=(1, 3)),
    linear_case("grouped-fp8", 64, 64, F32, num_rows=9, row_counts=(1, 3)),
]
LARGE = [
    linear_case("linear", 5120, 512, F32),
    linear_case("linear", 96, 24, B16, row_counts=FEW),
    linear_case("linear", 5120, 32, B16),
    linear_case("linear", 5120, 512, B16),
    linear_case("fp32", 1024, 1000, B16),
    linear_case("fp32", 5120, 1024, B16),
    linear_case("fp32", 256, 500, B16, weight_dtype=F32, row_counts=FEW),
    linear_case("none", 1280, 4096, B16),
    linear_case("release", 96, 40, B16, row_counts=FEW),
    linear_case("release", 5120, 1280, B16),
    linear_case("row", 96, 40, B16, row_counts=FEW),
    linear_case("row", 256, 192, B16, row_counts=FEW),
    linear_case("row", 1280, 4096, B16),
    linear_case("row", 8192, 5120, B16),
    linear_case("row", 2304, 5120, B16, row_counts=FEW),
    linear_case("row", 8192, 512, B16, row_counts=FEW, is_one_signed=True),
    linear_case("row", 8192, 40, B16, row_counts=FEW, is_one_signed=True),
    linear_case("grouped", 256, 64, B16, row_counts=FEW),
    linear_case("grouped-fp8", 4096, 4096, B16),
]
CASES = [*SMALL, *LARGE]

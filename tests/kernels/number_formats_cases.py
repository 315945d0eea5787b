"""Contract cases of the quantisation of activations and of index queries."""

from __future__ import annotations

from typing import Literal

import torch

from kernels.number_formats import (
    QuantisedRows,
    pack_index_queries,
    pack_index_queries_reference,
    quantise_activations,
    quantise_activations_reference,
)
from tests.kernels.contract import EXACT, Inputs, OpCase, Outputs


def quantise_case(
    mode: Literal["release", "row"],
    width: int,
    dtype: torch.dtype,
    num_rows: int = 300,
    row_counts: tuple[int, ...] = (1, 2, 3, 5, 16, 17, 64, 257),
) -> OpCase:
    """Rows of very different magnitude, zeros and outliers among them."""
    num_scales = width // 32 if mode == "release" else 1

    def build(seed: int, device: torch.device) -> Inputs:
        g = torch.Generator().manual_seed(seed)
        x = torch.randn(num_rows, width + 8, generator=g) * torch.exp2(
            8 * torch.randn(num_rows, 1, generator=g)
        )
        x[0] = 0
        x[1, ::7] *= 1e-6
        x[2, 3] = 448.0
        return {"x": x.to(device, dtype)[:, :width]}

    def outputs(inputs: Inputs, n: int) -> Outputs:
        device = inputs["x"].device
        return {
            "values": torch.empty(n, width, dtype=torch.float8_e4m3fn, device=device),
            "scales": torch.empty(n, num_scales, dtype=torch.uint8, device=device),
        }

    def run(inputs: Inputs, out: Outputs) -> None:
        n = inputs["x"].shape[0]
        quantise_activations(inputs["x"], mode=mode, out=QuantisedRows(out["values"][:n], out["scales"][:n]))

    return OpCase(
        name=f"quantise-{mode}-{width}-{str(dtype)[6:]}",
        build=build,
        row_inputs=("x",),
        outputs=outputs,
        run=run,
        reference=lambda i: quantise_activations_reference(i["x"], mode=mode)._asdict(),
        tolerances={"values": EXACT, "scales": EXACT},
        row_counts=row_counts,
        needs_gpu=False,
    )


def pack_case(
    num_heads: int, dim: int, dtype: torch.dtype, num_rows: int, row_counts: tuple[int, ...]
) -> OpCase:
    """Vectors of very different magnitude; zeros, values that are halfway, outliers and subnormals among them."""

    def build(seed: int, device: torch.device) -> Inputs:
        g = torch.Generator().manual_seed(seed)
        x = torch.randn(num_rows, num_heads, dim, generator=g)
        x *= torch.exp2(8 * torch.randn(num_rows, num_heads, 1, generator=g))
        x[0] = 0
        x[1, :, ::7] *= 1e-6
        x[2, 0, :8] = torch.tensor([6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, -5.0])
        x[2, 0, 8:] = 0
        x[3, 0] = 1e-40
        return {"x": x.to(device, dtype)}

    return OpCase(
        name=f"pack-index-{num_heads}x{dim}-{str(dtype)[6:]}",
        build=build,
        row_inputs=("x",),
        outputs=lambda i, n: {
            "packed": torch.empty(n, num_heads, dim * 17 // 32, dtype=torch.uint8, device=i["x"].device)
        },
        run=lambda i, out: pack_index_queries(i["x"], out=out["packed"][: len(i["x"])]),
        reference=lambda i: {"packed": pack_index_queries_reference(i["x"])},
        tolerances={"packed": EXACT},
        row_counts=row_counts,
        needs_gpu=num_rows > 16,
    )


FEW = (1, 3)
CASES = [
    quantise_case("release", 96, torch.float32, 9, FEW),
    quantise_case("release", 1280, torch.bfloat16, 9, FEW),
    quantise_case("row", 100, torch.bfloat16, 9, FEW),
    quantise_case("row", 5120, torch.bfloat16, 9, FEW),
    pack_case(3, 96, torch.float32, 9, FEW),
    pack_case(5, 32, torch.bfloat16, 9, FEW),
    pack_case(32, 128, torch.bfloat16, 300, (1, 2, 3, 5, 16, 17, 64, 257)),
]

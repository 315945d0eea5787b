"""Contract cases of the rotation of queries."""

from __future__ import annotations

import torch

from kernels.rope import rotate_queries, rotate_queries_reference
from tests.kernels.contract import EXACT, Inputs, OpCase, Outputs


def rotate_case(
    num_heads: int, dim: int, half: int, dtype: torch.dtype, num_rows: int, row_counts: tuple[int, ...]
) -> OpCase:
    """``rotate_queries`` on a copy, since it works in place."""

    def build(seed: int, device: torch.device) -> Inputs:
        g = torch.Generator().manual_seed(seed)
        angles = 1000 * torch.rand(num_rows, half, generator=g)
        x = torch.randn(num_rows, num_heads, dim, generator=g)
        return {
            "x": x.to(device, dtype),
            "cos": angles.cos().to(device),
            "sin": angles.sin().to(device),
        }

    def run(inputs: Inputs, out: Outputs) -> None:
        copy = out["x"][: inputs["x"].shape[0]].copy_(inputs["x"])
        rotate_queries(copy, inputs["cos"], inputs["sin"])

    return OpCase(
        name=f"rotate-{num_heads}x{dim}-{str(dtype)[6:]}",
        build=build,
        row_inputs=("x", "cos", "sin"),
        outputs=lambda i, n: {"x": torch.empty(n, num_heads, dim, dtype=dtype, device=i["x"].device)},
        run=run,
        reference=lambda i: {"x": rotate_queries_reference(i["x"].clone(), i["cos"], i["sin"])},
        tolerances={"x": EXACT},
        row_counts=row_counts,
        needs_gpu=dtype == torch.bfloat16,  # the interpreter truncates to bfloat16
    )


CASES = [
    rotate_case(3, 48, 12, torch.float32, 9, (1, 3)),
    rotate_case(64, 512, 32, torch.bfloat16, 270, (1, 2, 3, 5, 16, 17, 64, 257)),
    rotate_case(32, 128, 32, torch.bfloat16, 9, (1, 3)),
]

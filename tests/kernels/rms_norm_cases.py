"""Contract cases of RMSNorm."""

from __future__ import annotations

import torch

from kernels.rms_norm import rms_norm, rms_norm_reference
from tests.kernels.contract import Inputs, OpCase, Outputs, Tolerance

FP32 = Tolerance(1e-6, 1e-6, "fp32 sums in another order, approximate reciprocal root")
BF16 = Tolerance(2e-4, 5e-3, "as fp32; where that crosses a rounding boundary, one bfloat16 step")


def norm_case(
    name: str,
    width: int,
    dtype: torch.dtype,
    num_rows: int = 300,
    row_counts: tuple[int, ...] = (1, 2, 3, 5, 16, 17, 64, 257),
) -> OpCase:
    """``rms_norm`` of rows that lie apart in memory."""

    def build(seed: int, device: torch.device) -> Inputs:
        g = torch.Generator().manual_seed(seed)
        x = torch.randn(num_rows, width + 8, generator=g) * torch.exp2(
            4 * torch.randn(num_rows, 1, generator=g)
        )
        return {"x": x.to(device, dtype)[:, :width], "weight": torch.randn(width, generator=g).to(device)}

    def run(inputs: Inputs, out: Outputs) -> None:
        rms_norm(inputs["x"], inputs["weight"], eps=1e-20, out=out["out"][: inputs["x"].shape[0]])

    return OpCase(
        name=name,
        build=build,
        row_inputs=("x",),
        outputs=lambda i, n: {"out": torch.empty(n, width, dtype=dtype, device=i["x"].device)},
        run=run,
        reference=lambda i: {"out": rms_norm_reference(i["x"], i["weight"], eps=1e-20)},
        float64=lambda i: {
            "out": i["x"].double()
            * torch.rsqrt((i["x"].double() ** 2).mean(-1, keepdim=True))
            * i["weight"].double()
        },
        tolerances={"out": FP32 if dtype == torch.float32 else BF16},
        row_counts=row_counts,
        needs_gpu=dtype == torch.bfloat16,  # the interpreter truncates to bfloat16
    )


CASES = [
    norm_case("rms_norm-fp32-100", 100, torch.float32, 9, (1, 3)),
    norm_case("rms_norm-bf16-256", 256, torch.bfloat16, 9, (1, 3)),
    norm_case("rms_norm-bf16-5120", 5120, torch.bfloat16),
    norm_case("rms_norm-bf16-1280", 1280, torch.bfloat16),
]

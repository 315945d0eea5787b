"""Contract cases of engram's gather and gate."""

from __future__ import annotations

import torch

from kernels.engram import engram_gate, engram_gate_reference, engram_gather, engram_gather_reference
from tests.kernels.contract import EXACT, Inputs, OpCase, Outputs, Tolerance

FP32 = Tolerance(2e-6, 4e-6, "fp32 sums in another order; approximate roots and exponentials")
BF16 = Tolerance(4e-4, 8e-3, "as fp32; where that crosses a rounding boundary, one bfloat16 step")


def gather_case(
    name: str,
    num_rows: int,
    num_lookups: int,
    dim: int,
    dtype: torch.dtype,
    has_scale: bool,
    row_counts: tuple[int, ...],
) -> OpCase:
    """``engram_gather`` with every scale exponent that occurs."""

    def build(seed: int, device: torch.device) -> Inputs:
        g = torch.Generator(device).manual_seed(seed)
        table = torch.randn(500, dim, generator=g, device=device)
        rows = torch.randint(0, 500, (num_rows, num_lookups), generator=g, device=device)
        scale = torch.randint(100, 140, (500, dim // 32), generator=g, device=device).to(torch.uint8)
        table = table.to(torch.float8_e4m3fn if has_scale else dtype)
        return {"table": table, "scale": scale if has_scale else None, "rows": rows, "dtype": dtype}

    return OpCase(
        name=name,
        build=build,
        row_inputs=("rows",),
        outputs=lambda i, n: {"out": torch.empty(n, num_lookups * dim, dtype=dtype, device=i["rows"].device)},
        run=lambda i, out: engram_gather(**i, out=out["out"][: len(i["rows"])]),
        reference=lambda i: {"out": engram_gather_reference(**i)},
        tolerances={"out": EXACT},
        row_counts=row_counts,
        needs_gpu=num_rows > 100,  # right in the interpreter too, but slow
    )


def gate_case(
    name: str, num_rows: int, width: int, dtype: torch.dtype, row_counts: tuple[int, ...]
) -> OpCase:
    """``engram_gate`` on keys and values that are slices of one product, as the model has them."""

    def build(seed: int, device: torch.device) -> Inputs:
        g = torch.Generator(device).manual_seed(seed)
        projected = torch.randn(num_rows, 5 * width, generator=g, device=device).to(dtype)
        return {
            "streams": torch.randn(num_rows, 4, width, generator=g, device=device).to(dtype),
            "keys": projected[:, : 4 * width].unflatten(1, (4, width)),
            "value": projected[:, 4 * width :],
            "q_weight": torch.randn(4, width, generator=g, device=device),
            "k_weight": torch.randn(4, width, generator=g, device=device),
            "eps": 1e-20,
        }

    def run(i: Inputs, out: Outputs) -> None:
        engram_gate(**i, out=out["out"][: len(i["value"])])

    return OpCase(
        name=name,
        build=build,
        row_inputs=("streams", "keys", "value"),
        outputs=lambda i, n: {"out": torch.empty(n, 4, width, dtype=dtype, device=i["value"].device)},
        run=run,
        reference=lambda i: {"out": engram_gate_reference(**i)},
        tolerances={"out": FP32 if dtype == torch.float32 else BF16},
        row_counts=row_counts,
        needs_gpu=dtype == torch.bfloat16,
    )


MANY = (1, 2, 3, 5, 16, 17, 64, 257)
CASES = [
    gather_case("gather-fp32", 9, 6, 32, torch.float32, True, (1, 3)),
    gather_case("gather-fp32-plain", 9, 6, 48, torch.float32, False, (1, 3)),
    gather_case("gather-bf16-release", 300, 24, 256, torch.bfloat16, True, MANY),
    gate_case("gate-fp32", 9, 96, torch.float32, (1, 3)),
    gate_case("gate-bf16-release", 300, 5120, torch.bfloat16, MANY),
]

"""Contract cases of routing and experts: plain and mxfp4 weights, every mode, uneven and empty experts."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.moe import (
    ExpertWeight,
    Mxfp4Weight,
    PreparedMxfp4,
    Routes,
    combine_experts,
    combine_experts_reference,
    expert_mlp,
    expert_mlp_reference,
    prepare_experts,
    route_tokens,
    route_tokens_reference,
    split_gate,
    swiglu,
    swiglu_reference,
)
from kernels.number_formats import ActivationMode
from tests.kernels.contract import EXACT, Inputs, OpCase, Outputs, Tolerance

FP32 = Tolerance(3e-6, 6e-6, "fp32 sums in another order")
BF16 = Tolerance(4e-3, 8e-3, "hidden rows and outputs are rounded to bfloat16 (2^-9 each)")
ROUNDED = {
    torch.float32: Tolerance(
        4e-3, 3e-2, "sums in another order; a hidden channel on the edge of two e4m3 codes"
    ),
    torch.bfloat16: Tolerance(8e-3, 3e-2, "the same, and bfloat16"),
}
WEIGHTS = Tolerance(2e-6, 4e-6, "fp32 sums in another order; approximate exponentials")
ACTIVATED = {torch.float32: FP32, torch.bfloat16: Tolerance(4e-4, 8e-3, "one bfloat16 step on an edge")}


def uneven_ids(g: torch.Generator, num_rows: int, top_k: int, num_experts: int) -> Tensor:
    """[num_rows, top_k] int64, distinct in a row; some experts get most of the rows, some none."""
    popularity = torch.rand(num_experts, generator=g, device=g.device) ** 3
    popularity[num_experts // 2] = 0
    scores = torch.rand(num_rows, num_experts, generator=g, device=g.device) * popularity
    return scores.topk(top_k, dim=1).indices


def random_mxfp4(g: torch.Generator, shape: tuple[int, int, int], spread: int = 5) -> Mxfp4Weight:
    """Random codes; a row's exponents lie within ``spread`` of each other."""
    experts, outputs, inputs = shape
    values = torch.randint(
        0, 256, (experts, outputs, inputs // 2), dtype=torch.uint8, generator=g, device=g.device
    )
    middle = 120 - int((inputs.bit_length() - 1) / 2)
    low, high = middle - spread // 2, middle - spread // 2 + spread + 1
    scales = torch.randint(low, high, (experts, outputs, inputs // 32), generator=g, device=g.device)
    return Mxfp4Weight(values, scales.to(torch.uint8))


def expert_inputs(
    seed: int,
    device: torch.device,
    *,
    num_rows: int,
    hidden: int,
    intermediate: int,
    num_experts: int,
    top_k: int,
    dtype: torch.dtype,
    is_fp4: bool,
    spread: int = 5,
) -> dict[str, object]:
    """Rows of different sizes, their routes, and the weights of all experts."""
    g = torch.Generator(device).manual_seed(seed)

    def weight(*shape: int) -> ExpertWeight:
        if is_fp4:
            return random_mxfp4(g, shape, spread)
        return (torch.randn(*shape, generator=g, device=device) * shape[-1] ** -0.5).to(dtype)

    x = torch.randn(num_rows, hidden, generator=g, device=device)
    x = x * torch.exp2(torch.randn(num_rows, 1, generator=g, device=device))
    w13 = weight(num_experts, 2 * intermediate, hidden)
    w2 = weight(num_experts, hidden, intermediate)
    inputs: dict[str, object] = {
        "x": x.to(dtype),
        "ids": uneven_ids(g, num_rows, top_k, num_experts),
        "weights": torch.rand(num_rows, top_k, generator=g, device=device),
    }
    for name, one in (("w13", w13), ("w2", w2)):
        parts = (
            {name: one} if isinstance(one, Tensor) else {f"{name}_{k}": v for k, v in one._asdict().items()}
        )
        inputs |= parts
    return inputs


def expert_weight(inputs: Inputs, name: str) -> ExpertWeight:
    if name in inputs:
        return inputs[name]
    if f"{name}_bases" in inputs:
        return PreparedMxfp4(*(inputs[f"{name}_{field}"] for field in PreparedMxfp4._fields))
    return Mxfp4Weight(inputs[f"{name}_values"], inputs[f"{name}_scales"])


def expert_case(
    name: str,
    mode: ActivationMode,
    *,
    is_prepared: bool = False,
    row_counts: tuple[int, ...] = (1, 2, 3, 5, 16, 17, 64, 257),
    **shape,
) -> OpCase:  # type: ignore[no-untyped-def]
    """``expert_mlp`` on one shape."""
    dtype = shape["dtype"]

    def arguments(i: Inputs, name: str = "") -> tuple[Tensor, Routes, ExpertWeight, ExpertWeight]:
        routes = Routes(i["ids"], i["weights"])
        return i["x"], routes, expert_weight(i, f"{name}w13"), expert_weight(i, f"{name}w2")

    def build(seed: int, device: torch.device) -> Inputs:
        i = expert_inputs(seed, device, **shape)
        if is_prepared:
            for weight, is_gated in (("w13", True), ("w2", False)):
                prepared = prepare_experts(expert_weight(i, weight), is_gated=is_gated)
                i |= {f"prepared_{weight}_{k}": v for k, v in prepared._asdict().items()}
        return i

    return OpCase(
        name=f"experts-{name}-{mode}",
        build=build,
        row_inputs=("x", "ids", "weights"),
        outputs=lambda i, n: {
            "out": torch.empty(n, shape["top_k"], shape["hidden"], dtype=dtype, device=i["x"].device)
        },
        run=lambda i, out: expert_mlp(
            *arguments(i, "prepared_" if is_prepared else ""),
            limit=2.0,
            mode=mode,
            out=out["out"][: len(i["x"])],
        ),
        reference=lambda i: {"out": expert_mlp_reference(*arguments(i), limit=2.0, mode=mode)},
        tolerances={"out": ROUNDED[dtype] if mode != "none" else FP32 if dtype == torch.float32 else BF16},
        row_counts=row_counts,
        needs_gpu=dtype == torch.bfloat16,
    )


def route_case(
    name: str, num_rows: int, hidden: int, num_experts: int, top_k: int, dtype: torch.dtype, is_exact: bool
) -> OpCase:
    """``route_tokens``; a gate that bfloat16 holds is one piece, another one three."""

    def build(seed: int, device: torch.device) -> Inputs:
        g = torch.Generator(device).manual_seed(seed)
        gate = torch.randn(num_experts, hidden, generator=g, device=device) * hidden**-0.5
        gate = gate.bfloat16().float() if is_exact else gate
        bias = torch.randn(num_experts, generator=g, device=device) * 0.3
        return {
            "x": torch.randn(num_rows, hidden + 8, generator=g, device=device).to(dtype)[:, :hidden],
            "gate": split_gate(gate) if dtype == torch.bfloat16 else gate,
            "bias": bias,
        }

    options = {"top_k": top_k, "routed_scale": 1.5}

    def outputs(i: Inputs, n: int) -> Outputs:
        ids = torch.empty(n, top_k, dtype=torch.int64, device=i["bias"].device)
        return {"ids": ids, "weights": torch.empty(n, top_k, device=ids.device)}

    def run(i: Inputs, out: Outputs) -> None:
        n = len(i["x"])
        route_tokens(i["x"], i["gate"], i["bias"], **options, out=Routes(out["ids"][:n], out["weights"][:n]))

    def reference(i: Inputs) -> Outputs:
        routes = route_tokens_reference(i["x"], i["gate"], i["bias"], **options)
        return {"ids": routes.expert_ids, "weights": routes.weights}

    return OpCase(
        name=f"routes-{name}",
        build=build,
        row_inputs=("x",),
        outputs=outputs,
        run=run,
        reference=reference,
        tolerances={"ids": EXACT, "weights": WEIGHTS},
        row_counts=(1, 2, 3, 5, 16, 17, 64, 257),
        needs_gpu=dtype == torch.bfloat16,
    )


def elementwise_cases(suffix: str, num_rows: int, width: int, dtype: torch.dtype) -> list[OpCase]:
    """``swiglu`` with and without weights, and ``combine_experts``."""

    def build(seed: int, device: torch.device) -> Inputs:
        g = torch.Generator(device).manual_seed(seed)

        def randn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=g, device=device)

        return {
            "gate_and_up": (randn(num_rows, 2 * width) * 4).to(dtype),
            "weights": randn(num_rows, 1),
            "slots": randn(num_rows, 6, width).to(dtype),
            "shared": randn(num_rows, width + 8).to(dtype)[:, :width],
        }

    def case(name: str, run, reference, tolerance: Tolerance) -> OpCase:  # type: ignore[no-untyped-def]
        return OpCase(
            name=f"{name}-{suffix}",
            build=build,
            row_inputs=("gate_and_up", "weights", "slots", "shared"),
            outputs=lambda i, n: {"out": torch.empty(n, width, dtype=dtype, device=i["slots"].device)},
            run=lambda i, out: run(i, out["out"][: len(i["slots"])]),
            reference=lambda i: {"out": reference(i)},
            tolerances={"out": tolerance},
            row_counts=(1, 5, 17),
            needs_gpu=dtype == torch.bfloat16,
        )

    return [
        case(
            "swiglu",
            lambda i, out: swiglu(i["gate_and_up"], None, limit=3.0, out=out),
            lambda i: swiglu_reference(i["gate_and_up"], None, limit=3.0),
            ACTIVATED[dtype],
        ),
        case(
            "weighted-swiglu",
            lambda i, out: swiglu(i["gate_and_up"], i["weights"], limit=3.0, out=out),
            lambda i: swiglu_reference(i["gate_and_up"], i["weights"], limit=3.0),
            ACTIVATED[dtype],
        ),
        case(
            "combine",
            lambda i, out: combine_experts(i["slots"], i["shared"], out=out),
            lambda i: combine_experts_reference(i["slots"], i["shared"]),
            EXACT,
        ),
    ]


SMALL = {"num_rows": 9, "hidden": 96, "intermediate": 32, "num_experts": 5, "top_k": 2}
MIDDLE = {"num_rows": 300, "hidden": 256, "intermediate": 96, "num_experts": 16, "top_k": 6}
TILED = {"num_rows": 700, "hidden": 512, "intermediate": 256, "num_experts": 8, "top_k": 4}
FEW = (1, 4)
CASES = [
    expert_case("fp32", "none", **SMALL, dtype=torch.float32, is_fp4=False, row_counts=FEW),
    *[
        expert_case("fp4-fp32", mode, **SMALL, dtype=torch.float32, is_fp4=True, row_counts=FEW)
        for mode in ("release", "row")
    ],
    expert_case("bf16", "none", **MIDDLE, dtype=torch.bfloat16, is_fp4=False),
    expert_case("bf16", "row", **MIDDLE, dtype=torch.bfloat16, is_fp4=False),
    *[
        expert_case("fp4-bf16", mode, **MIDDLE, dtype=torch.bfloat16, is_fp4=True)
        for mode in ("release", "row", "none")
    ],
    *[
        expert_case("prepared", mode, **TILED, dtype=torch.bfloat16, is_fp4=True, is_prepared=True)
        for mode in ("release", "row", "none")
    ],
    *[
        expert_case(
            f"wide-{spread}",
            "row",
            **TILED,
            dtype=torch.bfloat16,
            is_fp4=True,
            is_prepared=True,
            spread=spread,
            row_counts=(1, 64, 257),
        )
        for spread in (11, 30)
    ],
    route_case("fp32", 23, 96, 7, 3, torch.float32, False),
    route_case("pieces", 300, 256, 16, 4, torch.bfloat16, False),
    route_case("release", 300, 5120, 384, 6, torch.bfloat16, True),
    *elementwise_cases("fp32", 23, 96, torch.float32),
    *elementwise_cases("bf16", 300, 2304, torch.bfloat16),
]

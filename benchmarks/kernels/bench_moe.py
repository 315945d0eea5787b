"""Routed experts of one rank of four at the release's shape: 24,576 rows over 96 experts, mxfp4 at rest.

The contract comes first: nothing is timed when a gate is red. Then every mode beside the library's grouped
product on weights that are bfloat16 already, the parts, and decode against the bytes of the experts it
touches. Run from the root: ``python -m benchmarks.kernels.bench_moe``.
"""

from __future__ import annotations

import json

import torch

from benchmarks.kernels.captured import captured_ms
from benchmarks.kernels.contracts import require_contracts
from benchmarks.kernels.timing import sustained_ms
from kernels.moe import (
    PreparedMxfp4,
    Routes,
    combine_experts,
    expert_mlp,
    expert_mlp_reference,
    hopper_op,
    prepare_experts,
    route_tokens,
    split_gate,
    swiglu,
)
from tests.kernels.contract import errors_of
from tests.kernels.moe_cases import random_mxfp4

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 5120, 2304, 96, 6
FLOPS = 2 * 3 * HIDDEN * INTERMEDIATE
LIMIT = 10.0


def prepared(g: torch.Generator, shape: tuple[int, int, int], *, is_gated: bool) -> PreparedMxfp4:
    return prepare_experts(random_mxfp4(g, shape), is_gated=is_gated)


def random_routes(g: torch.Generator, num_rows: int) -> Routes:
    ids = torch.rand(num_rows, EXPERTS, generator=g, device="cuda").topk(TOP_K, dim=1).indices
    return Routes(ids, torch.rand(num_rows, TOP_K, generator=g, device="cuda"))


def measure_prefill(g: torch.Generator, w13: PreparedMxfp4, w2: PreparedMxfp4) -> dict[str, float]:
    x = torch.randn(4096, HIDDEN, generator=g, device="cuda").bfloat16()
    routes = random_routes(g, 4096)
    counts = torch.bincount(routes.expert_ids.flatten(), minlength=EXPERTS)
    print(f"rows of an expert: {int(counts.min())} to {int(counts.max())}")
    slots = torch.empty(4096, TOP_K, HIDDEN, dtype=torch.bfloat16, device="cuda")
    combined = torch.empty_like(x)
    results = {}
    few = Routes(routes.expert_ids[:8].contiguous(), routes.weights[:8].contiguous())
    for mode in ("row", "release", "none"):

        def layer(mode: str = mode) -> None:
            expert_mlp(x, routes, w13, w2, limit=LIMIT, mode=mode, out=slots)
            combine_experts(slots, x, out=combined)

        layer()
        expected = expert_mlp_reference(x[:8], few, w13, w2, limit=LIMIT, mode=mode)
        print(f"{mode}: error against the reference on 8 rows {errors_of(slots[:8], expected)[0]:.1e}")
        ms = sustained_ms(layer, 1.5)
        results[mode] = ms
        print(f"{mode:8} layer {ms:7.3f} ms  {4096 * TOP_K * FLOPS / ms / 1e9:6.0f} TFLOP/s")
    hidden = torch.empty(4096 * TOP_K, INTERMEDIATE, dtype=torch.bfloat16, device="cuda").normal_()
    for mode in ("row", "release"):
        plans = hopper_op.Plans(routes.expert_ids, EXPERTS, 64, mode, has_wide=False)
        position = plans.position
        rows = hopper_op.SortedRows(x, position, TOP_K, mode, has_wide=False)
        inner = hopper_op.SortedRows(hidden, position, 1, mode, has_wide=False)
        parts = {
            "plan": lambda m=mode: hopper_op.Plans(routes.expert_ids, EXPERTS, 64, m, has_wide=False),
            "rows": lambda m=mode, p=position: hopper_op.SortedRows(x, p, TOP_K, m, has_wide=False),
            "w13": lambda r=rows, p=plans: hopper_op.product(r, w13, p, routes, hidden, LIMIT, 64),
            "hidden": lambda m=mode, p=position: hopper_op.SortedRows(hidden, p, 1, m, has_wide=False),
            "w2": lambda r=inner, p=plans: hopper_op.product(r, w2, p, routes, slots, LIMIT, 64),
            "combine": lambda: combine_experts(slots, x, out=combined),
        }
        for name, launch in parts.items():
            results[f"{mode} {name}"] = ms = captured_ms(launch, 0.4)
            print(f"{mode:8} {name:8} {ms:7.4f} ms")
    return results


def measure_library(g: torch.Generator) -> float:
    """Two grouped products of sorted bfloat16 rows with bfloat16 weights, and nothing else."""
    ends = torch.bincount(random_routes(g, 4096).expert_ids.flatten(), minlength=EXPERTS).cumsum(0).int()
    total = 0.0
    for depth, width in ((HIDDEN, 2 * INTERMEDIATE), (INTERMEDIATE, HIDDEN)):
        weight = torch.randn(EXPERTS, width, depth, generator=g, device="cuda", dtype=torch.bfloat16)
        x = torch.randn(4096 * TOP_K, depth, generator=g, device="cuda", dtype=torch.bfloat16)
        total += sustained_ms(lambda: torch._grouped_mm(x, weight.transpose(1, 2), offs=ends), 0.8)  # noqa: B023
    print(f"library  layer {total:7.3f} ms (bf16 weights at hand, products alone)")
    return total


def measure_decode(g: torch.Generator, w13: PreparedMxfp4, w2: PreparedMxfp4) -> dict[str, float]:
    results = {}
    for num_rows in (1, 64):
        x = torch.randn(num_rows, HIDDEN, generator=g, device="cuda").bfloat16()
        routes = random_routes(g, num_rows)
        touched = routes.expert_ids.unique().numel()
        num_bytes = touched * sum(w.values[0].nbytes + w.scales[0].nbytes for w in (w13, w2))
        out = torch.empty(num_rows, TOP_K, HIDDEN, dtype=torch.bfloat16, device="cuda")
        for mode in ("row", "release"):
            launch = lambda: expert_mlp(x, routes, w13, w2, limit=LIMIT, mode=mode, out=out)  # noqa: E731, B023
            ms = captured_ms(launch, 0.5)
            results[f"{mode} {num_rows}"] = ms
            rate = num_bytes / ms / 1e9
            print(f"decode {num_rows:3} rows {mode:8} {ms:7.4f} ms, {touched} experts, {rate:.2f} TB/s")
    return results


def measure_small(g: torch.Generator) -> dict[str, float]:
    results = {}
    gate = split_gate(torch.randn(384, HIDDEN, generator=g, device="cuda").bfloat16().float())
    bias = torch.zeros(384, device="cuda")
    for num_rows in (4096, 64):
        x = torch.randn(num_rows, HIDDEN, generator=g, device="cuda").bfloat16()
        both = torch.randn(num_rows, 2 * INTERMEDIATE, generator=g, device="cuda").bfloat16()
        route = captured_ms(lambda: route_tokens(x, gate, bias, top_k=6, routed_scale=1.5))  # noqa: B023
        activate = captured_ms(lambda: swiglu(both, None, limit=LIMIT))  # noqa: B023
        results |= {f"route {num_rows}": route, f"swiglu {num_rows}": activate}
        print(f"{num_rows} rows: route_tokens {route:.4f} ms, swiglu {activate:.4f} ms")
    return results


def main() -> None:
    require_contracts(__doc__, "moe")
    g = torch.Generator("cuda").manual_seed(5)
    w13 = prepared(g, (EXPERTS, 2 * INTERMEDIATE, HIDDEN), is_gated=True)
    w2 = prepared(g, (EXPERTS, HIDDEN, INTERMEDIATE), is_gated=False)
    results: dict[str, object] = {
        "prefill": measure_prefill(g, w13, w2),
        "decode": measure_decode(g, w13, w2),
    }
    results |= {"small": measure_small(g), "library": measure_library(g)}
    facts = {"op": "moe", "gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    print(json.dumps(facts | {"results": results}))


if __name__ == "__main__":
    main()

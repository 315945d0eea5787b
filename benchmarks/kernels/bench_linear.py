"""Dense projections at the release's shapes: a prefill step's rows and a decode step's, beside the library's.

The contract comes first: nothing is timed when a gate is red. The library reads one scale a tensor row and a
column, which no checkpoint has: it is the anchor for speed alone. At few rows weights take turns, so that
none is found in the cache. Run from the root: ``python -m benchmarks.kernels.bench_linear``.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from benchmarks.kernels.captured import LAUNCHES, captured_ms
from benchmarks.kernels.contracts import require_contracts
from benchmarks.kernels.timing import sustained_ms
from kernels.linear import ROUNDING, Fp8Weight, align_scales, fp8_linear, grouped_linear, linear
from kernels.number_formats import ActivationMode, QuantisedRows, quantise_activations
from tests.kernels.linear_cases import fp8_weight

LAYER = {
    "wq_a": (5120, 1280),
    "wq_b": (1280, 32768),
    "wkv": (5120, 512),
    "wo_b": (8192, 5120),
    "shared w13": (5120, 4608),
    "shared w2": (2304, 5120),
}
LARGE = {"wq_b": (1280, 32768), "wo_b": (8192, 5120), "engram wkv": (6144, 25600)}
DECODE_ROWS = (1, 2, 4, 5, 16, 64)
WO_A = (8, 4096, 1024)
CACHE_BYTES = 200 << 20
READ_TB_S = 4.5
"""What a plain read of this card's memory reaches."""


def random_weight(in_features: int, out_features: int, seed: int = 0) -> Fp8Weight:
    """As the release stores it, with the spread of scales that normal values give."""
    g = torch.Generator("cuda").manual_seed(seed)
    return fp8_weight(out_features, in_features, g, torch.device("cuda"))


def rows_of(num_rows: int, width: int) -> Tensor:
    return torch.randn(num_rows, width, device="cuda").bfloat16()


def scaled_mm(x: Tensor, weight: Fp8Weight) -> Callable[[], Tensor]:
    """The library's fp8 product with a scale a row; at least 16 rows."""
    padded = torch.nn.functional.pad(x.float(), (0, 0, 0, max(0, 16 - len(x)))).to(torch.float8_e4m3fn)
    rows = torch.ones(len(padded), 1, device="cuda")
    columns = torch.ones(1, len(weight.values), device="cuda")
    return lambda: torch._scaled_mm(
        padded, weight.values.t(), rows, columns, out_dtype=torch.bfloat16, use_fast_accum=True
    )


def relative_error(out: Tensor, x: QuantisedRows | Tensor, weight: Fp8Weight) -> float:
    """Of some rows, against float64 on the values that the operands stand for."""
    if isinstance(x, QuantisedRows):
        group = x.values.shape[1] // x.scales.shape[1]
        scales = torch.exp2(x.scales[:64].double() - 127).repeat_interleave(group, 1)
        x = x.values[:64].double() * scales
    expected = x[:64].double() @ weight.widened().double().T
    return float((out[:64].double() - expected).norm() / expected.norm())


def uneven_steps(weight: Fp8Weight) -> float:
    """The share of steps of 64 outputs and 128 inputs in which some 32 outputs have several scales."""
    groups = weight.scales.unflatten(1, (-1, 4)).unflatten(0, (-1, 2))
    return float((groups != groups[..., :1]).any(3).any(1).float().mean())


def prefill(num_rows: int, seconds: float) -> dict[str, dict[str, float]]:
    """Every projection of a layer under both modes, and the sums."""
    results: dict[str, dict[str, float]] = {}
    for name, (width, num_out) in LAYER.items():
        stored = random_weight(width, num_out)
        weight, x = align_scales(stored, rounding=ROUNDING), rows_of(num_rows, width)
        wide = weight.widened().bfloat16()
        out = torch.empty(num_rows, num_out, dtype=torch.bfloat16, device="cuda")
        modes: tuple[ActivationMode, ...] = ("row", "release")
        q = {mode: quantise_activations(x, mode=mode) for mode in modes}
        launches: dict[str, Callable[[], Tensor]] = {
            mode: lambda r=rows, w=weight, o=out: fp8_linear(r, w, dtype=torch.bfloat16, out=o)
            for mode, rows in q.items()
        }
        launches["row, scales as stored"] = lambda r=q["row"], w=stored, o=out: fp8_linear(
            r, w, dtype=torch.bfloat16, out=o
        )
        exact = align_scales(stored)
        launches["row, aligned without rounding"] = lambda r=q["row"], w=exact, o=out: fp8_linear(
            r, w, dtype=torch.bfloat16, out=o
        )
        launches["_scaled_mm"] = scaled_mm(x, weight)
        launches["torch.mm bf16"] = lambda x=x, w=wide, o=out: torch.mm(x, w.t(), out=o)
        results[name] = {key: captured_ms(launch, seconds) for key, launch in launches.items()}
        results[name]["row eager, host included"] = sustained_ms(launches["row"], seconds / 4)
        for mode in modes:
            results[name][f"{mode} error"] = relative_error(launches[mode](), q[mode], weight)
        results[name]["steps of several scales"] = uneven_steps(weight)
    results["wo_a"] = grouped(num_rows, seconds)
    for key in ("row", "release", "_scaled_mm", "torch.mm bf16"):
        results.setdefault("sum", {})[key] = sum(r[key] for n, r in results.items() if n != "sum")
    return results


def grouped(num_rows: int, seconds: float) -> dict[str, float]:
    groups, width, num_out = WO_A
    weight = random_weight(width, groups * num_out)
    x = rows_of(num_rows, groups * width)
    ours = captured_ms(lambda: grouped_linear(x, weight, num_groups=groups), seconds)
    wide = weight.widened().bfloat16().view(groups, num_out, width).transpose(1, 2)
    library = captured_ms(lambda: torch.bmm(x.view(num_rows, groups, width).transpose(0, 1), wide), seconds)
    return {"row": ours, "release": ours, "_scaled_mm": library, "torch.mm bf16": library}


def in_turn(launches: Sequence[Callable[[], Tensor]]) -> Callable[[], Tensor]:
    """One of them at each call."""
    turn = itertools.cycle(launches)
    return lambda: next(turn)()


def decode(seconds: float, row_counts: Sequence[int] = DECODE_ROWS) -> dict[str, dict[str, float]]:
    """Milliseconds, and the rate at which ours reads the weight."""
    results: dict[str, dict[str, float]] = {}
    for name, (width, num_out) in LARGE.items():
        count = min(LAUNCHES, 1 + CACHE_BYTES // (width * num_out))
        weights = [
            align_scales(random_weight(width, num_out, seed), rounding=ROUNDING) for seed in range(count)
        ]
        for num_rows in row_counts:
            x = rows_of(num_rows, width)
            q, blocks = (quantise_activations(x, mode=mode) for mode in ("row", "release"))
            times = {
                "row": [lambda w=w, q=q: fp8_linear(q, w, dtype=torch.bfloat16) for w in weights],
                "release": [lambda w=w, q=blocks: fp8_linear(q, w, dtype=torch.bfloat16) for w in weights],
                "_scaled_mm": [scaled_mm(x, w) for w in weights],
            }
            cell = {key: captured_ms(in_turn(launches), seconds) for key, launches in times.items()}
            cell["row TB/s"] = width * num_out / cell["row"] / 1e9
            cell["of read"] = cell["row TB/s"] / READ_TB_S
            results[f"{name} {num_rows}"] = cell
    return results


def show(results: dict[str, dict[str, float]]) -> None:
    for name, cell in results.items():
        print(f"{name:16}", {key: round(value, 5) for key, value in cell.items()}, flush=True)


def main() -> None:
    require_contracts(__doc__, "number_formats", "rope", "linear")
    results = {"prefill_4096": prefill(4096, 1.0), "decode": decode(0.5)}
    for part in results.values():
        show(part)
    x = rows_of(4096, 5120)
    small = torch.randn(512, 5120, device="cuda")
    results["plain"] = {
        "compressor fp32": {"ms": sustained_ms(lambda: linear(x.float(), small))},
        "compressor bf16": {"ms": sustained_ms(lambda: linear(x, small.bfloat16()))},
    }
    show(results["plain"])
    facts = {"op": "linear", "gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    print(json.dumps(facts | {"ms": results}))


if __name__ == "__main__":
    main()

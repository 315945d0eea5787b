"""Contract cases of what enters the caches. Packed outputs are compared as bytes, and decoded in the test."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.cache_store import (
    compress_and_store,
    compress_and_store_reference,
    copy_rows,
    copy_rows_reference,
    store_index_keys,
    store_index_keys_reference,
    store_window_kv,
    store_window_kv_reference,
)
from kernels.rope import rope_frequencies, rope_tables
from tests.kernels.contract import EXACT, Inputs, OpCase, Outputs, Tolerance

FP32 = Tolerance(2e-6, 4e-6, "fp32 sums in another order, approximate reciprocal root and exponential")
BF16 = Tolerance(5e-4, 8e-3, "as fp32; where that crosses a rounding boundary, one bfloat16 step")
BYTES = Tolerance(
    3e-2, 1.0, "a value at a rounding boundary of the format may move by one code, a zero may change sign"
)
EPS = 1e-20


def store_inputs(
    seed: int, device: torch.device, num_rows: int, dim: int, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Rows of different sizes, angles, distinct slots of which every fifth is -1."""
    g = torch.Generator(device).manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, device=device)

    frequencies = rope_frequencies(min(64, dim // 2), 160000.0, None).to(device)
    cos, sin = rope_tables(torch.arange(num_rows, device=device) * 7, frequencies)
    slots = torch.arange(num_rows, device=device) * 2 % (2 * num_rows - 1)
    return {
        "rows": (
            randn(num_rows, dim) * torch.exp2(2 * randn(num_rows, 1)) * torch.exp2(2 * randn(1, dim))
        ).to(dtype),
        "weight": 1 + 0.3 * randn(dim),
        "cos": cos,
        "sin": sin,
        "slots": torch.where(torch.arange(num_rows, device=device) % 5 == 3, -1, slots),
        "group_rows": torch.randint(0, num_rows + 3, (num_rows, 2), generator=g, device=device),
        "open_groups": randn(3, 2, dim),
        "keys_and_gates": randn(num_rows, 2, dim) * 2,
    }


def widths(kind: str, dim: int, is_packed: bool) -> int:
    return (
        {"window": dim + dim // 32, "entry": dim // 2 + dim // 16, "index": dim // 2 + dim // 32}[kind]
        if is_packed
        else dim
    )


def pool_like(kind: str, i: Inputs, n: int, dim: int, dtype: torch.dtype, is_packed: bool) -> Tensor:
    store = torch.uint8 if is_packed else dtype
    return torch.empty(n, widths(kind, dim, is_packed), dtype=store, device=i["rows"].device)


def window_case(
    name: str, num_rows: int, dim: int, dtype: torch.dtype, is_packed: bool, row_counts: tuple[int, ...]
) -> OpCase:
    """``store_window_kv`` into the step's rows."""

    def arguments(i: Inputs) -> list[Tensor]:
        return [i["rows"], i["weight"], i["cos"], i["sin"]]

    def run(i: Inputs, out: Outputs) -> None:
        store_window_kv(*arguments(i), eps=EPS, is_packed=is_packed, out=out["out"][: len(i["rows"])])

    return OpCase(
        name=name,
        build=lambda seed, device: store_inputs(seed, device, num_rows, dim, dtype),
        row_inputs=("rows", "cos", "sin", "slots", "group_rows"),
        outputs=lambda i, n: {"out": pool_like("window", i, n, dim, dtype, is_packed)},
        run=run,
        reference=lambda i: {"out": store_window_kv_reference(*arguments(i), eps=EPS, is_packed=is_packed)},
        tolerances={"out": BYTES if is_packed else (FP32 if dtype == torch.float32 else BF16)},
        row_counts=row_counts,
        needs_gpu=dtype == torch.bfloat16,
    )


def pool_case(
    kind: str,
    name: str,
    num_rows: int,
    dim: int,
    dtype: torch.dtype,
    is_packed: bool,
    row_counts: tuple[int, ...],
    ratio: int = 1,
) -> OpCase:
    """Stores through slots: "entry" (with their latents left out) or "index"."""

    def call(i: Inputs, pool: Tensor, is_reference: bool) -> None:
        norm = [i["weight"], i["cos"], i["sin"]]
        if kind == "index":
            index_op = store_index_keys_reference if is_reference else store_index_keys
            index_op(i["rows"], *norm, i["slots"], pool, eps=EPS)
        else:
            entry_op = compress_and_store_reference if is_reference else compress_and_store
            entry_op(*sources(i, ratio), *norm, i["slots"], pool, eps=EPS, dtype=dtype)

    def reference(i: Inputs) -> Outputs:
        n = 2 * num_rows
        pool = torch.zeros_like(pool_like(kind, i, n, dim, dtype, is_packed))
        call(i, pool, True)
        return {"pool": pool[i["slots"][i["slots"] >= 0]]}

    return OpCase(
        name=name,
        build=lambda seed, device: store_inputs(seed, device, num_rows, dim, dtype),
        row_inputs=("slots", "cos", "sin", "group_rows", *(("rows",) if kind != "entry" else ())),
        outputs=lambda i, n: {"pool": pool_like(kind, i, 2 * num_rows + 3, dim, dtype, is_packed)},
        run=lambda i, out: call(i, out["pool"], False),
        reference=reference,
        written_rows=lambda i: i["slots"],
        tolerances={"pool": BYTES if is_packed else (FP32 if dtype == torch.float32 else BF16)},
        row_counts=row_counts,
        needs_gpu=dtype == torch.bfloat16,
    )


def sources(i: Inputs, ratio: int) -> tuple[Tensor, Tensor | None, Tensor]:
    if ratio == 1:
        return i["rows"], None, i["group_rows"][:, :1].contiguous() % i["rows"].shape[0]
    return i["keys_and_gates"], i["open_groups"], i["group_rows"]


def latents_case(
    name: str, num_rows: int, dim: int, dtype: torch.dtype, ratio: int, row_counts: tuple[int, ...]
) -> OpCase:
    """The latents of ``compress_and_store``."""

    def scratch(i: Inputs) -> Tensor:
        return torch.zeros(2 * num_rows, dim // 2 + dim // 16, dtype=torch.uint8, device=i["rows"].device)

    def arguments(i: Inputs) -> list[Tensor | None]:
        return [*sources(i, ratio), i["weight"], i["cos"], i["sin"], i["slots"], scratch(i)]

    def run(i: Inputs, out: Outputs) -> None:
        compress_and_store(*arguments(i), eps=EPS, dtype=dtype, out=out["out"][: len(i["slots"])])

    return OpCase(
        name=name,
        build=lambda seed, device: store_inputs(seed, device, num_rows, dim, dtype),
        row_inputs=("slots", "cos", "sin", "group_rows"),
        outputs=lambda i, n: {"out": torch.empty(n, dim, dtype=dtype, device=i["rows"].device)},
        run=run,
        reference=lambda i: {"out": compress_and_store_reference(*arguments(i), eps=EPS, dtype=dtype)},
        tolerances={"out": FP32 if dtype == torch.float32 else BF16},
        row_counts=row_counts,
        needs_gpu=dtype == torch.bfloat16,
    )


def copy_case() -> OpCase:
    """``copy_rows`` of 33-byte rows to scattered places, some of them nowhere."""

    def build(seed: int, device: torch.device) -> Inputs:
        g = torch.Generator(device).manual_seed(seed)
        source = torch.randint(0, 256, (40, 33), generator=g, device=device).to(torch.uint8)
        rows = torch.randperm(40, generator=g, device=device)[:21]
        targets = torch.arange(21, device=device) * 2
        return {"source": source, "source_rows": rows, "target_rows": torch.where(rows % 5 == 0, -1, targets)}

    def run(i: Inputs, out: Outputs) -> None:
        copy_rows(i["source"], out["target"], i["source_rows"], i["target_rows"])

    def reference(i: Inputs) -> Outputs:
        target = torch.zeros(60, 33, dtype=torch.uint8, device=i["source"].device)
        copy_rows_reference(i["source"], target, i["source_rows"], i["target_rows"])
        return {"target": target[i["target_rows"][i["target_rows"] >= 0]]}

    return OpCase(
        name="copy_rows",
        build=build,
        row_inputs=("source_rows", "target_rows"),
        outputs=lambda i, n: {"target": torch.empty(60, 33, dtype=torch.uint8, device=i["source"].device)},
        run=run,
        reference=reference,
        written_rows=lambda i: i["target_rows"],
        tolerances={"target": EXACT},
        row_counts=(1, 5),
        needs_gpu=False,
    )


MANY = (1, 2, 3, 5, 16, 17, 64, 257)
F, B = torch.float32, torch.bfloat16
CASES = [
    window_case("window-fp32-packed", 23, 64, F, True, (1, 5)),
    window_case("window-fp32-packed-odd", 9, 96, F, True, (1, 5)),
    window_case("window-fp32-plain", 9, 64, F, False, (1, 5)),
    window_case("window-bf16-release", 300, 512, B, True, MANY),
    window_case("window-bf16-plain", 70, 512, B, False, (1, 5)),
    pool_case("entry", "entry-fp32-packed-1", 23, 64, F, True, (1, 5), 1),
    pool_case("entry", "entry-fp32-packed-2", 23, 64, F, True, (1, 5), 2),
    pool_case("entry", "entry-fp32-plain-2", 9, 64, F, False, (1, 5), 2),
    pool_case("entry", "entry-bf16-release-1", 300, 512, B, True, MANY, 1),
    pool_case("entry", "entry-bf16-release-2", 300, 512, B, True, MANY, 2),
    latents_case("latents-fp32-2", 9, 64, F, 2, (1, 5)),
    latents_case("latents-bf16-release-1", 300, 512, B, 1, MANY),
    latents_case("latents-bf16-release-2", 300, 512, B, 2, MANY),
    pool_case("index", "index-fp32-packed", 23, 32, F, True, (1, 5)),
    pool_case("index", "index-fp32-plain", 9, 32, F, False, (1, 5)),
    pool_case("index", "index-bf16-release", 300, 128, B, True, MANY),
    copy_case(),
]

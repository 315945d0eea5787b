"""Contract cases of the attention ops: many short and long sequences at once, holes in windows and selections."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kernels.number_formats import pack_fp4_entry, pack_fp8
from kernels.rope import rope_frequencies, rope_tables
from kernels.sparse_attention import (
    paged_sparse_attention,
    paged_sparse_attention_reference,
    selection_slots,
    selection_slots_reference,
)
from tests.kernels.contract import EXACT, Inputs, OpCase, Outputs, Tolerance

BF16 = Tolerance(4e-3, 8e-3, "weights and outputs are rounded to bfloat16 (2^-9 each)")
FP32 = Tolerance(2e-6, 4e-6, "fp32 sums in another order")

ROW_INPUTS = ("q", "window_rows", "slots", "cos", "sin")


def attention_inputs(
    seed: int,
    device: torch.device,
    *,
    num_rows: int,
    num_heads: int,
    head_dim: int,
    window: int,
    num_selected: int,
    num_slots: int,
    dtype: torch.dtype,
    is_packed: bool,
    is_full: bool = False,
) -> dict[str, Tensor | float | None]:
    """Random inputs. ``is_full``: no holes, and all of unit variance, as normed keys and queries are; without
    it keys differ wildly in size, and some rows have short windows, few entries, or none at all."""
    g = torch.Generator(device).manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, device=device)

    def store(x: Tensor, pack: Callable[[Tensor], Tensor]) -> Tensor:
        return pack(x) if is_packed else x.to(dtype)

    spread = 0.0 if is_full else 1.0
    ring = store(randn(3 * window, head_dim) * (1 + spread), pack_fp8)
    chunk = store(randn(num_rows + 7, head_dim), pack_fp8)
    entries = store(randn(num_slots, head_dim) * torch.exp2(2 * spread * randn(num_slots, 1)), pack_fp4_entry)
    last = torch.arange(num_rows, device=device) % (2 * window) + window
    window_rows = last[:, None] * 1 + torch.arange(window, device=device) + 3 * window - 2 * window
    window_rows = window_rows % (3 * window + num_rows + 7)
    slots = torch.randint(0, num_slots, (num_rows, num_selected), generator=g, device=device)
    if not is_full:
        place = torch.arange(window, device=device)
        window_rows = torch.where(place[None] < (window - 1 - last[:, None] % window), -1, window_rows)
        window_rows[-1] = -1
        count = torch.randint(0, num_selected + 1, (num_rows, 1), generator=g, device=device)
        count[::3] = num_selected
        slots = torch.where(torch.arange(num_selected, device=device)[None] < count, slots, -1)
        slots[-1] = -1
    frequencies = rope_frequencies(min(64, head_dim // 4), 10000.0, None).to(device)
    cos, sin = rope_tables(torch.arange(num_rows, device=device) * 3, frequencies)
    return {
        "q": (randn(num_rows, num_heads, head_dim) * (1 + spread / 2)).to(dtype),
        "ring": ring,
        "chunk": chunk,
        "window_rows": window_rows.to(torch.int32),
        "entries": entries if num_selected else None,
        "slots": slots.to(torch.int32) if num_selected else None,
        "sink": randn(num_heads),
        "cos": cos,
        "sin": sin,
        "scale": head_dim**-0.5,
    }


def attention_case(
    name: str,
    *,
    num_rows: int,
    num_heads: int,
    head_dim: int,
    window: int,
    num_selected: int,
    dtype: torch.dtype,
    is_packed: bool,
    num_slots: int = 1000,
    row_counts: tuple[int, ...] = (1, 2, 3, 5, 16, 17, 64, 257),
) -> OpCase:
    """``paged_sparse_attention`` on one shape."""

    def build(seed: int, device: torch.device) -> Inputs:
        return attention_inputs(
            seed,
            device,
            num_rows=num_rows,
            num_heads=num_heads,
            head_dim=head_dim,
            window=window,
            num_selected=num_selected,
            num_slots=num_slots,
            dtype=dtype,
            is_packed=is_packed,
        )

    def outputs(inputs: Inputs, n: int) -> Outputs:
        return {"out": torch.empty(n, num_heads, head_dim, dtype=dtype, device=inputs["q"].device)}

    def run(inputs: Inputs, out: Outputs) -> None:
        paged_sparse_attention(**inputs, out=out["out"][: inputs["q"].shape[0]])

    def reference(inputs: Inputs) -> Outputs:
        return {"out": paged_sparse_attention_reference(**inputs)}

    return OpCase(
        name=name,
        build=build,
        row_inputs=[n for n in ROW_INPUTS if num_selected or n != "slots"],
        outputs=outputs,
        run=run,
        reference=reference,
        tolerances={"out": FP32 if dtype == torch.float32 else BF16},
        row_counts=row_counts,
        needs_gpu=dtype == torch.bfloat16,
    )


def slots_case() -> OpCase:
    """``selection_slots`` with ragged selections and block tables."""

    def build(seed: int, device: torch.device) -> Inputs:
        g = torch.Generator(device).manual_seed(seed)
        selected = torch.randint(-1, 32 * 9, (67, 40), generator=g, device=device)
        tables = torch.randint(0, 500, (5, 9), generator=g, device=device)
        chunks = torch.randint(0, 5, (67,), generator=g, device=device)
        return {"selected": selected, "chunks": chunks, "block_tables": tables, "entries_per_block": 32}

    return OpCase(
        name="selection_slots",
        build=build,
        row_inputs=("selected", "chunks"),
        outputs=lambda i, n: {"out": torch.empty(n, 40, dtype=torch.int32, device=i["selected"].device)},
        run=lambda i, o: selection_slots(**i, out=o["out"][: i["selected"].shape[0]]),
        reference=lambda i: {"out": selection_slots_reference(**i)},
        tolerances={"out": EXACT},
        row_counts=(1, 3, 17),
        needs_gpu=False,
    )


SMALL = {
    "head_dim": 64,
    "window": 32,
    "num_selected": 64,
    "num_rows": 7,
    "row_counts": (1, 3),
    "num_slots": 90,
}
CASES = [
    attention_case("attention-fp32-packed", num_heads=8, dtype=torch.float32, is_packed=True, **SMALL),
    attention_case("attention-fp32-plain", num_heads=4, dtype=torch.float32, is_packed=False, **SMALL),
    attention_case(
        "attention-fp32-odd",
        num_heads=5,
        head_dim=96,
        window=20,
        num_selected=24,
        num_rows=5,
        row_counts=(1, 2),
        num_slots=50,
        dtype=torch.float32,
        is_packed=True,
    ),
    attention_case(
        "attention-bf16-bard", num_heads=8, dtype=torch.bfloat16, is_packed=True, **SMALL | {"num_rows": 300}
    ),
    attention_case("attention-bf16-plain", num_heads=4, dtype=torch.bfloat16, is_packed=False, **SMALL),
    attention_case(
        "attention-bf16-release",
        num_rows=300,
        num_heads=64,
        head_dim=512,
        window=128,
        num_selected=512,
        num_slots=4096,
        dtype=torch.bfloat16,
        is_packed=True,
    ),
    attention_case(
        "attention-bf16-release-window",
        num_rows=70,
        num_heads=64,
        head_dim=512,
        window=128,
        num_selected=0,
        dtype=torch.bfloat16,
        is_packed=True,
        row_counts=(1, 5, 17),
    ),
    attention_case(
        "attention-bf16-release-plain",
        num_rows=70,
        num_heads=64,
        head_dim=512,
        window=128,
        num_selected=512,
        dtype=torch.bfloat16,
        is_packed=False,
        row_counts=(1, 5, 17),
    ),
    slots_case(),
]

"""Launches of Hopper's expert kernels on prepared weights: rows into sorted order, product, again, product.

``op.py`` has checked the arguments. Which weights are prepared is decided at load, by shapes and device.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.moe.homes import SlotHomes
from kernels.moe.hopper import hopper_expert_kernel
from kernels.moe.hopper_sums import TAIL
from kernels.moe.kernel import place_rows_kernel
from kernels.moe.reference import Routes
from kernels.moe.routing import plan_slots
from kernels.moe.weights import PreparedMxfp4
from kernels.number_formats import ActivationMode, QuantisedRows

STAGES = {
    (64, torch.float8_e4m3fn): 5,
    (64, torch.bfloat16): 3,
    (16, torch.float8_e4m3fn): 12,
    (16, torch.bfloat16): 8,
}
"""What fits into shared memory, by the rows of a box and the rows' dtype."""


def choose_box(num_rows: int) -> int:
    """A tile has up to four boxes of rows, an expert at most ``num_rows``. No bit depends on the choice."""
    return 16 if num_rows <= 64 else 64


class Plans:
    """A step's slots sorted by expert, cut into tiles for products in e4m3, in bfloat16 or in both.

    ``order`` and ``position`` are those of any plan.
    """

    def __init__(
        self, expert_ids: Tensor, num_experts: int, box: int, mode: ActivationMode, *, has_wide: bool
    ) -> None:
        is_fp8 = mode == "row"
        dtypes = [torch.float8_e4m3fn] * is_fp8 + [torch.bfloat16] * (has_wide or not is_fp8)
        self.of = {
            dtype: plan_slots(
                expert_ids, num_experts, 4 * box,
                extra=TAIL.value if box == 64 and dtype == torch.float8_e4m3fn else 0,
            )
            for dtype in dtypes
        }  # fmt: skip
        self.order, self.position, _ = self.of[dtypes[0]]


class SortedRows:
    """What a product reads: [num_slots, depth] as e4m3, as bfloat16 or as both, and the rows' scales."""

    def __init__(
        self, rows: Tensor | QuantisedRows, position: Tensor, copies: int, mode: ActivationMode, *,
        has_wide: bool,
    ) -> None:  # fmt: skip
        x = exponents = rows if isinstance(rows, Tensor) else rows.values.view(torch.uint8)
        if isinstance(rows, QuantisedRows):
            exponents = rows.scales
        num_rows, width = x.shape
        is_row = mode == "row"
        block = triton.next_power_of_2(width)

        def target(dtype: torch.dtype, is_needed: bool) -> Tensor | None:
            shape = (num_rows * copies, width)
            return torch.empty(shape, dtype=dtype, device=x.device) if is_needed else None

        self.fp8 = target(torch.float8_e4m3fn, is_row)
        self.bf16 = target(torch.bfloat16, has_wide or not is_row)
        self.scales = torch.empty(num_rows * copies, dtype=torch.float32, device=x.device) if is_row else None
        targets = [x if out is None else out for out in (self.fp8, self.bf16, self.scales)]
        place_rows_kernel[(num_rows,)](
            x, exponents, position, *targets, x.stride(0),
            WIDTH=width, COPIES=copies, BLOCK=block, IS_ROW=is_row, IS_ROUNDED=mode != "none",
            IS_QUANTISED=x is not exponents, HAS_FP8=self.fp8 is not None,
            HAS_BF16=self.bf16 is not None, num_warps=8,
        )  # fmt: skip


def _launch(
    rows: Tensor, scales: Tensor | None, weight: PreparedMxfp4, plans: Plans, routes: Routes, out: Tensor,
    homes: SlotHomes | None, limit: float, box: int, want_wide: bool,
) -> None:  # fmt: skip
    """One product of sorted rows in one number format."""
    depth, width = rows.shape[1], out.shape[-1]
    is_fp8 = rows.dtype == torch.float8_e4m3fn
    swizzled = gl.NVMMASharedLayout(128, 8 if is_fp8 else 16, 2)
    block = 128 if is_fp8 else 64
    x_desc = TensorDescriptor.from_tensor(rows, [box, block], swizzled)
    tail_desc = TensorDescriptor.from_tensor(rows, [TAIL.value, block], swizzled)
    packed_desc = TensorDescriptor.from_tensor(
        weight.values.view(-1, 128), [32, 128], gl.NVMMASharedLayout(128, 8, 2)
    )
    scale_desc = TensorDescriptor.from_tensor(
        weight.scales.view(-1, 8), [8, 8], gl.NVMMASharedLayout(32, 32, 2)
    )
    num_columns = width // (64 if weight.is_gated else 128)
    plan = plans.of[rows.dtype]
    num_items = plan.tiles.shape[0] * num_columns
    # Programs take tiles in turn, so their number is no part of any result.
    num_programs = torch.cuda.get_device_properties(rows.device).multi_processor_count
    hopper_expert_kernel[(min(num_items, num_programs),)](
        x_desc, tail_desc, packed_desc, scale_desc, weight.bases, weight.is_wide,
        routes.weights if scales is None else scales, plan.order, plan.tiles,
        routes.weights, out, out if homes is None else homes.addresses,
        0 if homes is None else routes.weights.numel() // len(homes.memories), num_items, limit,
        WIDTH=width, NUM_COLUMNS=num_columns, NUM_BLOCKS=depth // 128,
        STAGES=STAGES[box, rows.dtype], BOX=box, IS_GATED=weight.is_gated, IS_FP8=is_fp8,
        HAS_ROW_SCALE=scales is not None, HAS_HOMES=homes is not None,
        HAS_WIDE=scales is not None and weight.has_wide, WANT_WIDE=want_wide, num_warps=4,
    )  # fmt: skip


def product(
    rows: SortedRows, weight: PreparedMxfp4, plans: Plans, routes: Routes, out: Tensor, limit: float,
    box: int, homes: SlotHomes | None = None,
) -> None:  # fmt: skip
    """In e4m3 where there is one scale a row; in bfloat16 what does not fit into it, and all other modes.

    With ``homes`` slots go there, and ``out`` says only what they are like.
    """
    if rows.fp8 is not None:
        _launch(rows.fp8, rows.scales, weight, plans, routes, out, homes, limit, box, want_wide=False)
    if rows.bf16 is not None:
        _launch(rows.bf16, rows.scales, weight, plans, routes, out, homes, limit, box, want_wide=True)


def prepared_expert_mlp(
    x: Tensor | QuantisedRows, routes: Routes, w13: PreparedMxfp4, w2: PreparedMxfp4, limit: float,
    mode: ActivationMode, out: Tensor, homes: SlotHomes | None,
) -> None:  # fmt: skip
    """``expert_mlp`` on weights from ``prepare_experts``; ``out`` and ``homes`` as for ``product``."""
    num_rows, top_k = routes.expert_ids.shape
    intermediate = w2.values.shape[2] * 128
    box = choose_box(num_rows)
    has_wide = w13.has_wide or w2.has_wide
    plans = Plans(routes.expert_ids, w13.values.shape[0], box, mode, has_wide=has_wide)
    rows = SortedRows(x, plans.position, top_k, mode, has_wide=w13.has_wide)
    hidden = torch.empty(num_rows * top_k, intermediate, dtype=torch.bfloat16, device=plans.order.device)
    product(rows, w13, plans, routes, hidden, limit, box)
    rows = SortedRows(hidden, plans.position, 1, mode, has_wide=w2.has_wide)
    product(rows, w2, plans, routes, out, limit, box, homes)

"""Experts on the device: every slot's output, the shared expert's activation, the sum.

Owns checks, tile choice and launches. Which ids are local, and when another rank's memory may be written, is
the caller's.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from kernels.argument_checks import FLOATS, expect_dense, expect_output, expect_tensor
from kernels.moe.homes import SlotHomes
from kernels.moe.hopper_op import prepared_expert_mlp
from kernels.moe.kernel import (
    combine_experts_kernel,
    expert_product_kernel,
    round_rows_kernel,
    swiglu_kernel,
    widen_rows_kernel,
)
from kernels.moe.reference import Routes
from kernels.moe.routing import Plan, plan_slots
from kernels.moe.weights import ExpertWeight, Mxfp4Weight, PreparedMxfp4, weight_shape
from kernels.number_formats import SCALE_BLOCK, ActivationMode, QuantisedRows

MODES = ("release", "row", "none")


class ExpertConfig(NamedTuple):
    """Tiles of the grouped products: functions of shape and dtype, not of the number of rows."""

    rows: int
    outputs: int
    block: int
    num_warps: int
    num_stages: int


def choose_config(depth: int, width: int, dtype: torch.dtype) -> ExpertConfig:
    """Tiles for a product of rows of ``depth`` with ``width`` outputs."""
    outputs = min(64, max(16, triton.next_power_of_2(width)))
    if dtype == torch.float32:
        return ExpertConfig(16, min(32, outputs), 32, 4, 1)
    return ExpertConfig(64, outputs, 64 if depth % 64 == 0 else 32, 4, 3)


def _expect_weight(
    name: str, weight: ExpertWeight, shape: tuple[int | None, int, int], dtype: torch.dtype, like: Tensor
) -> None:
    """``dtype``: the engine's."""
    experts, outputs, inputs = shape
    if isinstance(weight, Tensor):
        expect_tensor(name, weight, shape, (dtype,), like=like)
        return
    if isinstance(weight, PreparedMxfp4):
        if dtype != torch.bfloat16 or weight_shape(weight)[1:] != (outputs, inputs):
            wanted = f"[{experts or 'any'}, {outputs}, {inputs}] for {dtype}"
            raise ValueError(f"{name}: expected {wanted}, got prepared {weight_shape(weight)} for bfloat16")
        return
    expect_tensor(f"{name}.values", weight.values, (experts, outputs, inputs // 2), (torch.uint8,), like=like)
    scales = (weight.values.shape[0], outputs, inputs // SCALE_BLOCK)
    expect_tensor(f"{name}.scales", weight.scales, scales, (torch.uint8,), like=like)


def _expect_rounded(x: QuantisedRows, mode: ActivationMode, dtype: torch.dtype | None) -> torch.dtype:
    """Refuse rows that the mode does not round so; the engine's dtype."""
    if dtype not in FLOATS:
        raise ValueError(f"dtype: expected float32 or bfloat16 with rounded rows, got {dtype}")
    expect_tensor("x.values", x.values, (None, None), (torch.float8_e4m3fn,))
    num_rows, width = x.values.shape
    num_scales = 1 if mode == "row" else width // SCALE_BLOCK
    expect_tensor("x.scales", x.scales, (num_rows, num_scales), (torch.uint8,), like=x.values)
    return dtype


def _round_rows(x: Tensor, mode: ActivationMode) -> Tensor:
    """The numbers that a product of the mode reads, rows close together."""
    num_rows, width = x.shape
    out = torch.empty(num_rows, width, dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(width)
    round_rows_kernel[(num_rows,)](
        x, out, x.stride(0), WIDTH=width, BLOCK=block, IS_ROW=mode == "row",
        num_warps=min(8, max(1, block // 512)),
    )  # fmt: skip
    return out


def _widen_rows(x: QuantisedRows, mode: ActivationMode, dtype: torch.dtype) -> Tensor:
    """The same of rows that were rounded before they came here."""
    num_rows, width = x.values.shape
    out = torch.empty(num_rows, width, dtype=dtype, device=x.values.device)
    block = triton.next_power_of_2(width)
    widen_rows_kernel[(num_rows,)](
        x.values.view(torch.uint8), x.scales, out,
        WIDTH=width, BLOCK=block, IS_ROW=mode == "row", num_warps=min(8, max(1, block // 512)),
    )  # fmt: skip
    return out


def _product(
    x: Tensor,
    weight: Tensor | Mxfp4Weight,
    plan: Plan,
    routes: Routes,
    out: Tensor,
    limit: float,
    is_gated: bool,
    homes: SlotHomes | None = None,
) -> None:
    """One grouped product into ``out``, or into ``homes`` that are like it; see ``expert_product_kernel``."""
    depth, width = x.shape[1], out.shape[-1]
    config = choose_config(depth, width, x.dtype)
    values, scales = (weight, weight) if isinstance(weight, Tensor) else weight
    grid = (plan.tiles.shape[0] * triton.cdiv(width, config.outputs),)
    expert_product_kernel[grid](
        x, values, scales, plan.order, plan.tiles, routes.weights, out,
        out if homes is None else homes.addresses,
        0 if homes is None else routes.expert_ids.numel() // len(homes.memories), limit,
        DEPTH=depth, WIDTH=width, TOP_K=routes.expert_ids.shape[1], IS_GATED=is_gated,
        HAS_HOMES=homes is not None, IS_FP4=not isinstance(weight, Tensor),
        ROWS=config.rows, OUTPUTS=config.outputs, BLOCK=config.block,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip


def expert_mlp(
    x: Tensor | QuantisedRows,
    routes: Routes,
    w13: ExpertWeight,
    w2: ExpertWeight,
    *,
    limit: float,
    mode: ActivationMode,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Every slot's expert output: ``w2 (weight * silu(min(w1 x, limit)) * clip(w3 x, -limit, limit))``.

    Args:
        x: [num_rows, hidden], float32 or bfloat16; rows may lie apart where the mode rounds them. Or what
            ``quantise_activations`` makes of them in the same mode.
        routes: expert ids [num_rows, top_k] int64, experts of the weights or -1 for one held elsewhere, and
            slot weights [num_rows, top_k] fp32.
        w13: [num_experts, 2 * intermediate, hidden], the gate's rows first; w2: [num_experts, hidden,
            intermediate]; each mxfp4 or of the dtype of ``x``, or both from ``prepare_experts`` (the first
            gated; on Hopper, for bfloat16 rows). Both depths are multiples of 32.
        limit: clamp of the activation.
        mode: how the input of each product is rounded.
        dtype: that of the result, where ``x`` is rounded already; else it is that of ``x``.
        out: where to write; None allocates.

    Returns:
        [num_rows, top_k, hidden]; slots of experts held elsewhere are left as they are. The caller sums the
        slots in order.

    Raises:
        ValueError: an argument is not as described.
    """
    dtype = _expect_arguments(x, routes, w13, w2, mode, dtype)
    rows = x.values if isinstance(x, QuantisedRows) else x
    out = expect_output("out", out, (*routes.expert_ids.shape, rows.shape[1]), dtype, rows)
    expect_dense("out", out)
    _expert_mlp(x, routes, w13, w2, limit, mode, out, None)
    return out


def expert_mlp_at_homes(
    x: Tensor | QuantisedRows,
    routes: Routes,
    w13: ExpertWeight,
    w2: ExpertWeight,
    homes: SlotHomes,
    *,
    limit: float,
    mode: ActivationMode,
    dtype: torch.dtype | None = None,
) -> None:
    """The same slots, each stored into the memory of the rank whose row it is of, while products go on.

    Args:
        x: rows of all ranks, rank by rank, as many of each; these and the others are as for ``expert_mlp``.
        homes: of each rank. A row's place in its home is its place among its rank's rows.

    Raises:
        ValueError: an argument is not as described.
    """
    dtype = _expect_arguments(x, routes, w13, w2, mode, dtype)
    rows = x.values if isinstance(x, QuantisedRows) else x
    num_rows, top_k = routes.expert_ids.shape
    homes.expect(num_rows, top_k, rows.shape[1], dtype, like=rows)
    _expert_mlp(x, routes, w13, w2, limit, mode, homes.memories[0], homes)


def _expect_arguments(
    x: Tensor | QuantisedRows,
    routes: Routes,
    w13: ExpertWeight,
    w2: ExpertWeight,
    mode: ActivationMode,
    dtype: torch.dtype | None,
) -> torch.dtype:
    """Refuse what is not as ``expert_mlp`` describes; the dtype of the result."""
    if mode not in MODES:
        raise ValueError(f"mode: expected one of {MODES}, got {mode}")
    if isinstance(x, QuantisedRows):
        values, dtype = x.values, _expect_rounded(x, mode, dtype)
    else:
        expect_tensor("x", x, (None, None), FLOATS, is_strided=mode != "none")
        values, dtype = x, x.dtype
    num_rows, width = values.shape
    experts, double, _ = weight_shape(w13)
    intermediate = double // 2
    _expect_weight("w13", w13, (None, 2 * intermediate, width), dtype, values)
    _expect_weight("w2", w2, (experts, width, intermediate), dtype, values)
    if isinstance(w13, PreparedMxfp4) != isinstance(w2, PreparedMxfp4):
        raise ValueError(f"w2: expected prepared like w13, got {type(w13).__name__} and {type(w2).__name__}")
    if width % SCALE_BLOCK or intermediate % SCALE_BLOCK:
        raise ValueError(f"w13: expected depths of whole {SCALE_BLOCK}s, got {width} and {intermediate}")
    ids, weights = routes
    expect_tensor("routes.expert_ids", ids, (num_rows, None), (torch.int64,), like=values)
    expect_tensor("routes.weights", weights, tuple(ids.shape), (torch.float32,), like=values)
    return dtype


def _expert_mlp(
    x: Tensor | QuantisedRows,
    routes: Routes,
    w13: ExpertWeight,
    w2: ExpertWeight,
    limit: float,
    mode: ActivationMode,
    out: Tensor,
    homes: SlotHomes | None,
) -> None:
    """Into ``out``, or into ``homes`` that are like it."""
    num_slots = routes.expert_ids.numel()
    if num_slots == 0:
        return
    if isinstance(w13, PreparedMxfp4) and isinstance(w2, PreparedMxfp4):
        prepared_expert_mlp(x, routes, w13, w2, limit, mode, out, homes)
        return
    assert not isinstance(w13, PreparedMxfp4)
    assert not isinstance(w2, PreparedMxfp4)
    experts, width, intermediate = weight_shape(w2)
    plan = plan_slots(routes.expert_ids, experts, choose_config(width, intermediate, out.dtype).rows)
    if isinstance(x, QuantisedRows):
        rows = _widen_rows(x, mode, out.dtype)
    else:
        rows = x if mode == "none" else _round_rows(x, mode)
    hidden = torch.empty(num_slots, intermediate, dtype=out.dtype, device=rows.device)
    _product(rows, w13, plan, routes, hidden, limit, is_gated=True)
    if mode != "none":
        hidden = _round_rows(hidden, mode)
    _product(hidden, w2, plan, routes, out, limit, is_gated=False, homes=homes)


def swiglu(gate_and_up: Tensor, weights: Tensor | None, *, limit: float, out: Tensor | None = None) -> Tensor:
    """``silu(min(g, limit)) * clip(v, -limit, limit) [* weight]`` in fp32, cast to the input's dtype.

    Args:
        gate_and_up: [num_rows, 2 * intermediate], float32 or bfloat16: g, then v; rows may lie apart.
        weights: [num_rows, 1] fp32 or None.
        limit: the clamp.
        out: where to write; None allocates.

    Returns:
        [num_rows, intermediate], dtype of ``gate_and_up``.

    Raises:
        ValueError: an argument is not as described.
    """
    expect_tensor("gate_and_up", gate_and_up, (None, None), FLOATS, is_strided=True)
    num_rows, double = gate_and_up.shape
    if double % 2:
        raise ValueError(f"gate_and_up: expected an even width, got {double}")
    if weights is not None:
        expect_tensor("weights", weights, (num_rows, 1), (torch.float32,), like=gate_and_up)
    width = double // 2
    out = expect_output("out", out, (num_rows, width), gate_and_up.dtype, gate_and_up)
    expect_dense("out", out)
    if num_rows and width:
        block = min(1024, triton.next_power_of_2(width))
        swiglu_kernel[(num_rows, triton.cdiv(width, block))](
            gate_and_up, gate_and_up if weights is None else weights, out, limit, gate_and_up.stride(0),
            WIDTH=width, BLOCK=block, HAS_WEIGHTS=weights is not None, num_warps=4,
        )  # fmt: skip
    return out


def combine_experts(slots: Tensor, shared: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Sum in slot order, then the shared expert: fp32 inside, dtype of ``slots`` out.

    Args:
        slots: [num_rows, top_k, hidden], float32 or bfloat16.
        shared: [num_rows, hidden], dtype of ``slots``; rows may lie apart.
        out: where to write, rows may lie apart; None allocates.

    Returns:
        [num_rows, hidden].

    Raises:
        ValueError: an argument is not as described.
    """
    expect_tensor("slots", slots, (None, None, None), FLOATS)
    num_rows, top_k, width = slots.shape
    expect_tensor("shared", shared, (num_rows, width), (slots.dtype,), like=slots, is_strided=True)
    out = expect_output("out", out, (num_rows, width), slots.dtype, slots)
    if num_rows and width:
        block = min(1024, triton.next_power_of_2(width))
        combine_experts_kernel[(num_rows, triton.cdiv(width, block))](
            slots, shared, out, shared.stride(0), out.stride(0),
            WIDTH=width, TOP_K=top_k, BLOCK=block, num_warps=4,
        )  # fmt: skip
    return out

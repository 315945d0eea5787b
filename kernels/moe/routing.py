"""Routing on the device: which experts a row takes, and the order in which their rows are computed.

Owns checks, tile choice and launches. Nothing returns to the host: sizes are bounds of the number of slots.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from kernels.argument_checks import FLOATS, expect_output, expect_tensor
from kernels.float_pieces import split_float32
from kernels.moe.reference import Routes
from kernels.moe.routing_kernel import (
    choose_experts_kernel,
    count_slots_kernel,
    gate_product_kernel,
    place_slots_kernel,
)

SLOT_BLOCK = 128
FILL = 128


class GateConfig(NamedTuple):
    """Tiles of the gate's product: functions of its shape and dtype alone."""

    rows: int
    experts: int
    block: int
    part: int


class Plan(NamedTuple):
    """The slots of a launch sorted by expert, cut into tiles of rows that share one."""

    order: Tensor  # [num_slots] int32: the slot at each position
    position: Tensor  # [num_slots] int32: the position of each slot
    tiles: Tensor  # [max_tiles, 3] int32: expert (-1 for none), first position, end


def choose_gate_config(num_experts: int, width: int, dtype: torch.dtype) -> GateConfig:
    """The depth is cut into five parts at most, so that few rows fill more of the device."""
    is_bf16 = dtype == torch.bfloat16
    block = min(128 if is_bf16 else 32, max(16, triton.next_power_of_2(width)))
    part = triton.cdiv(triton.cdiv(width, 5), block) * block
    experts = min(128 if is_bf16 else 32, max(16, triton.next_power_of_2(num_experts)))
    return GateConfig(64 if is_bf16 else 32, experts, block, part)


def split_gate(gate: Tensor) -> Tensor:
    """An fp32 gate as bfloat16 pieces: [E, D] -> [1 to 3, E, D], those of ``split_float32`` but for zeros.

    A gate published in bfloat16 is one piece. Raises ``ValueError`` if a value is not finite.
    """
    pieces = split_float32(gate)
    num_pieces = max(1, sum(bool((piece != 0).any()) for piece in pieces))
    return pieces[:num_pieces].contiguous()


def route_tokens(
    x: Tensor, gate: Tensor, bias: Tensor, *, top_k: int, routed_scale: float, out: Routes | None = None
) -> Routes:
    """Choose experts by biased score, weigh them by the unbiased one.

    ``s = sqrt(softplus(gate x))``; the ``top_k`` largest of ``s + bias`` are chosen, the lowest id of equal
    ones first; weights are ``s / (sum of the chosen + 1e-20) * routed_scale``. All in fp32.

    Args:
        x: [num_rows, hidden], float32 or bfloat16; rows may lie apart.
        gate: [num_experts, hidden] fp32, or for bfloat16 rows its pieces [n, num_experts, hidden] from
            ``split_gate`` (the same numbers on the tensor cores).
        bias: [num_experts] fp32.
        top_k: experts of a row; routed_scale: factor on the normalised weights.
        out: where to write; None allocates.

    Returns:
        Expert ids [num_rows, top_k] int64 and weights [num_rows, top_k] fp32, best first.

    Raises:
        ValueError: an argument is not as described.
    """
    expect_tensor("x", x, (None, None), FLOATS, is_strided=True)
    num_rows, width = x.shape
    is_split = gate.dim() == 3
    if is_split and x.dtype != torch.bfloat16:
        raise ValueError(f"gate: expected [num_experts, hidden] with {x.dtype} rows, got {tuple(gate.shape)}")
    shape = (None, None, width) if is_split else (None, width)
    expect_tensor("gate", gate, shape, (torch.bfloat16 if is_split else torch.float32,), like=x)
    num_pieces, num_experts = gate.shape[:2] if is_split else (1, gate.shape[0])
    expect_tensor("bias", bias, (num_experts,), (torch.float32,), like=x)
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"top_k: expected 1 to {num_experts}, got {top_k}")
    ids = expect_output("out", out and out.expert_ids, (num_rows, top_k), torch.int64, x)
    weights = expect_output("out", out and out.weights, (num_rows, top_k), torch.float32, x)
    if num_rows == 0:
        return Routes(ids, weights)
    config = choose_gate_config(num_experts, width, gate.dtype)
    num_parts = triton.cdiv(width, config.part)
    partial = torch.empty(num_parts, num_rows, num_experts, dtype=torch.float32, device=x.device)
    grid = (num_parts, triton.cdiv(num_rows, config.rows), triton.cdiv(num_experts, config.experts))
    gate_product_kernel[grid](
        x, gate, partial, num_rows, x.stride(0),
        WIDTH=width, NUM_EXPERTS=num_experts, NUM_PIECES=num_pieces, PART=config.part,
        ROWS=config.rows, EXPERTS=config.experts, BLOCK=config.block,
        num_warps=4, num_stages=3 if is_split else 1,
    )  # fmt: skip
    choose_experts_kernel[(num_rows,)](
        partial, bias, ids, weights, num_rows, routed_scale,
        NUM_EXPERTS=num_experts, NUM_PARTS=num_parts, TOP_K=top_k,
        BLOCK=triton.next_power_of_2(num_experts), BLOCK_K=triton.next_power_of_2(top_k), num_warps=1,
    )  # fmt: skip
    return Routes(ids, weights)


def plan_slots(expert_ids: Tensor, num_experts: int, tile: int, *, extra: int = 0) -> Plan:
    """Sort slots by expert, stably, and cut each expert's rows into tiles of ``tile`` rows.

    ``extra`` < ``tile`` rows are not worth a tile of their own: an expert's last one may have so many more.

    Args:
        expert_ids: [num_rows, top_k] int64, each in 0 .. num_experts - 1, or -1 for none: such slots have no
            position (-1), and the last positions no slot.
    """
    num_slots = expert_ids.numel()
    num_blocks = triton.cdiv(num_slots, SLOT_BLOCK)
    # Every tile but an expert's last is full. A multiple of 16, because a kernel is compiled once for such
    # numbers and once for others.
    max_tiles = triton.cdiv(num_slots // tile + min(num_experts, num_slots), 16) * 16

    def ints(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=expert_ids.device)

    counts, ranks = ints(num_blocks, num_experts), ints(num_slots)
    plan = Plan(ints(num_slots), ints(num_slots), ints(max_tiles, 3))
    all_experts = triton.next_power_of_2(num_experts)
    count_slots_kernel[(num_blocks,)](
        expert_ids, counts, ranks, num_slots,
        NUM_EXPERTS=num_experts, BLOCK=SLOT_BLOCK, EXPERTS=min(128, all_experts), num_warps=4,
    )  # fmt: skip
    place_slots_kernel[(num_blocks + num_experts,)](
        expert_ids, counts, ranks, *plan, num_slots, num_blocks, max_tiles,
        NUM_EXPERTS=num_experts, BLOCK=SLOT_BLOCK, ALL_EXPERTS=all_experts,
        TILE=tile, EXTRA=extra, FILL=FILL, num_warps=4,
    )  # fmt: skip
    return plan

"""Routing and experts in plain torch: the model page's section 9."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.linear import linear_reference
from kernels.moe.homes import SlotHomes
from kernels.moe.prepared import expert_matrix
from kernels.moe.weights import ExpertWeight, weight_shape
from kernels.number_formats import (
    ActivationMode,
    QuantisedRows,
    dequantise_activations,
    quantise_activations_reference,
)
from kernels.tree_sum import tree_sum
from kernels.whole_vectors import on_whole_vectors

EXPERT_ROW_TILE = 32


class Routes(NamedTuple):
    """Each row's experts, best biased score first; a row's slots are summed in this order."""

    expert_ids: Tensor  # [num_rows, top_k] int64; -1 is an expert that is held elsewhere
    weights: Tensor  # [num_rows, top_k] fp32


def route_tokens_reference(
    x: Tensor, gate: Tensor, bias: Tensor, *, top_k: int, routed_scale: float
) -> Routes:
    """Choose by biased score, weigh by the unbiased one.

    Args:
        x: [num_rows, hidden]; bias: [num_experts] fp32.
        gate: [num_experts, hidden] fp32, or for bfloat16 rows its pieces from ``split_gate``.
        top_k: experts per token; ties go to the lowest id.
        routed_scale: factor on the normalised weights.

    ``s = sqrt(softplus(gate x))``; weights are ``s / (sum of the chosen + 1e-20) * routed_scale``.
    """
    gate = gate if gate.dim() == 2 else gate.float().flip(0).cumsum(0)[-1]
    scores = torch.sqrt(on_whole_vectors(F.softplus, linear_reference(x.float(), gate)))
    order = torch.sort(scores + bias, dim=-1, descending=True, stable=True).indices
    expert_ids = order[:, :top_k]
    chosen = scores.gather(1, expert_ids)
    return Routes(expert_ids, chosen / (tree_sum(chosen, keepdim=True) + 1e-20) * routed_scale)


def swiglu_reference(gate_and_up: Tensor, weights: Tensor | None, *, limit: float) -> Tensor:
    """``silu(min(g, limit)) * clip(v, -limit, limit) [* weight]`` in fp32, cast to the input's dtype.

    Args:
        gate_and_up: [num_rows, 2 * intermediate]: g, then v.
        weights: [num_rows, 1] fp32 or None.
    """
    gate, up = gate_and_up.float().chunk(2, dim=-1)
    gate, up = gate.clamp_max(limit), up.clamp(-limit, limit)
    hidden = gate / (1 + torch.exp(-gate)) * up
    return (hidden if weights is None else hidden * weights).to(gate_and_up.dtype)


def expert_mlp_reference(
    x: Tensor | QuantisedRows,
    routes: Routes,
    w13: ExpertWeight,
    w2: ExpertWeight,
    *,
    limit: float,
    mode: ActivationMode,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Every slot's expert output; a slot without an expert (id -1) holds anything.

    Args:
        x: [num_rows, hidden], as it is or as rounded by the mode.
        w13: [num_experts, 2 * intermediate, hidden], the gate's rows first; w2: [num_experts, hidden,
            intermediate]; each mxfp4 or of the dtype of ``x``.
        limit: clamp of ``swiglu_reference``.
        mode: how the input of each product is rounded.
        dtype: the engine's, where ``x`` is rounded already.

    Returns:
        [num_rows, top_k, hidden], in the engine's dtype. The caller sums the slots in order.
    """
    num_rows, top_k = routes.expert_ids.shape
    if isinstance(x, QuantisedRows):
        assert dtype is not None, "rounded rows do not tell the engine's dtype"
        rounded = dequantise_activations(x, dtype)
    else:
        rounded = _rounded(x, mode)
    out = rounded.new_empty(num_rows * top_k, rounded.shape[1])
    experts = routes.expert_ids.flatten()
    slots = torch.argsort(experts, stable=True)[int((experts < 0).sum()) :]
    if len(slots) == 0:
        return out.view(num_rows, top_k, -1)
    counts = torch.bincount(experts[slots], minlength=weight_shape(w13)[0]).tolist()
    # Each expert's rows are padded to whole tiles (with a row of its own), so that every product and
    # every vector kernel sees whole tiles whatever the counts.
    groups = [g for g in slots.split(counts) if len(g)]
    padded = torch.cat([torch.cat([g, g[-1:].expand(-len(g) % EXPERT_ROW_TILE)]) for g in groups])
    sizes = [-(-count // EXPERT_ROW_TILE) * EXPERT_ROW_TILE for count in counts]
    hidden = _grouped_linear(rounded[padded // top_k], sizes, w13)
    hidden = swiglu_reference(hidden, routes.weights.flatten()[padded, None], limit=limit)
    # A padding row repeats a real one: both write the same bytes.
    out[padded] = _grouped_linear(_rounded(hidden, mode), sizes, w2)
    return out.view(num_rows, top_k, -1)


def expert_mlp_at_homes_reference(
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
    """The slots of ``expert_mlp_reference``, each into the memory of the rank whose row it is of.

    Args:
        x: rows of all ranks, rank by rank, as many of each; the others are as for ``expert_mlp_reference``.
    """
    slots = expert_mlp_reference(x, routes, w13, w2, limit=limit, mode=mode, dtype=dtype)
    most = len(slots) // len(homes.memories)
    for memory, own, ids in zip(
        homes.memories, slots.split(most), routes.expert_ids.split(most), strict=True
    ):
        row, slot = torch.nonzero(ids >= 0, as_tuple=True)
        memory[row, slot] = own[row, slot]


def _rounded(x: Tensor, mode: ActivationMode) -> Tensor:
    """What a product of the mode reads, in the dtype of ``x``."""
    return (
        x if mode == "none" else dequantise_activations(quantise_activations_reference(x, mode=mode), x.dtype)
    )


def _grouped_linear(x: Tensor, sizes: list[int], weight: ExpertWeight) -> Tensor:
    """Consecutive runs of ``sizes`` rows, each through its own expert's weight."""
    parts = [
        linear_reference(rows, expert_matrix(weight, expert, x.dtype))
        for expert, rows in enumerate(x.split(sizes))
        if len(rows)
    ]
    return torch.cat(parts)


def combine_experts_reference(slots: Tensor, shared: Tensor) -> Tensor:
    """Sum in slot order, then the shared expert: fp32 inside, dtype of ``slots`` out.

    Args:
        slots: [num_rows, top_k, hidden]; shared: [num_rows, hidden].
    """
    total = slots[:, 0].float()
    for slot in range(1, slots.shape[1]):
        total = total + slots[:, slot].float()
    return (total + shared.float()).to(slots.dtype)

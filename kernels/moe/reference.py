"""Routing and experts in plain torch: the model page's section 9."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.linear import linear_reference
from kernels.tree_sum import tree_sum


class Routes(NamedTuple):
    """Each row's experts, best biased score first; a row's slots are summed in this order."""

    expert_ids: Tensor  # [num_rows, top_k] int64
    weights: Tensor  # [num_rows, top_k] fp32


def route_tokens_reference(x: Tensor, gate: Tensor, bias: Tensor, *, top_k: int, routed_scale: float) -> Routes:
    """Choose by biased score, weigh by the unbiased one.

    Args:
        x: [num_rows, hidden]; gate: [num_experts, hidden] fp32; bias: [num_experts] fp32.
        top_k: experts per token; ties go to the lowest id.
        routed_scale: factor on the normalised weights.

    ``s = sqrt(softplus(gate x))``; weights are ``s / (sum of the chosen + 1e-20) * routed_scale``.
    """
    scores = torch.sqrt(F.softplus(linear_reference(x.float(), gate)))
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
    x: Tensor,
    routes: Routes,
    w13: Tensor,
    w2: Tensor,
    *,
    limit: float,
    quantise: Callable[[Tensor], Tensor],
) -> Tensor:
    """Every slot's expert output.

    Args:
        x: [num_rows, hidden].
        w13: [num_experts, 2 * intermediate, hidden]; w2: [num_experts, hidden, intermediate]; dtype of ``x``.
        limit: clamp of ``swiglu_reference``.
        quantise: applied to the input of each product.

    Returns:
        [num_rows, top_k, hidden], dtype of ``x``. The caller sums the slots in order.
    """
    num_rows, top_k = routes.expert_ids.shape
    slots = routes.expert_ids.flatten()
    by_expert = torch.argsort(slots, stable=True)
    counts = torch.bincount(slots, minlength=w13.shape[0]).tolist()
    weights = routes.weights.flatten()[:, None]
    quantised = quantise(x)
    out = x.new_empty(num_rows * top_k, x.shape[1])
    start = 0
    for expert, count in enumerate(counts):
        if count:
            chosen = by_expert[start : start + count]
            # Whole tiles keep elementwise kernels on their vector path whatever the count.
            padded = torch.cat([chosen, chosen[-1:].expand(-count % 32)])
            hidden = linear_reference(quantised[padded // top_k], w13[expert])
            hidden = quantise(swiglu_reference(hidden, weights[padded], limit=limit))
            out[chosen] = linear_reference(hidden, w2[expert])[:count]
        start += count
    return out.view(num_rows, top_k, -1)


def combine_experts_reference(slots: Tensor, shared: Tensor) -> Tensor:
    """Sum in slot order, then the shared expert: fp32 inside, dtype of ``slots`` out.

    Args:
        slots: [num_rows, top_k, hidden]; shared: [num_rows, hidden].
    """
    total = slots[:, 0].float()
    for slot in range(1, slots.shape[1]):
        total = total + slots[:, slot].float()
    return (total + shared.float()).to(slots.dtype)

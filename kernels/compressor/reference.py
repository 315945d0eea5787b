"""Pooling of a compression group into one latent: the model page's section 5."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.tree_sum import tree_sum


def pool_groups_reference(keys_and_gates: Tensor, group_rows: Tensor) -> Tensor:
    """Per channel, ``sum_t softmax_t(gate_t) key_t`` over the tokens of each complete group.

    Args:
        keys_and_gates: [num_source_rows, 2, head_dim] fp32: a row's key and gate.
        group_rows: [num_groups, ratio] int64 rows of ``keys_and_gates``, tokens ascending.

    Returns:
        [num_groups, head_dim] fp32.
    """
    grouped = keys_and_gates[group_rows]  # [num_groups, ratio, 2, head_dim]
    keys, gates = grouped[:, :, 0], grouped[:, :, 1]
    weights = torch.exp(gates - gates.amax(1, keepdim=True))
    return tree_sum(weights * keys, 1) / tree_sum(weights, 1)

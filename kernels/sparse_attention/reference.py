"""Window + selected-entry attention with a sink, in plain torch: the model page's section 3, step 4."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.tree_sum import tree_sum


def sparse_attention_reference(
    q: Tensor, keys: Tensor, is_valid: Tensor, sink: Tensor, *, scale: float
) -> Tensor:
    """One softmax over each query's own keys, which are also the values.

    Args:
        q: [num_rows, num_heads, head_dim], float32 or bfloat16.
        keys: [num_rows, num_keys, head_dim] fp32: window positions ascending, then selected entries
            ascending; the place of a key never depends on a chunk. Invalid keys must be finite.
        is_valid: [num_rows, num_keys] bool.
        sink: [num_heads] fp32, in the denominator only.
        scale: factor on the scores.

    Returns:
        [num_rows, num_heads, head_dim], dtype of ``q``; a row without valid keys gives zeros.
    """
    scores = torch.bmm(q.float(), keys.transpose(1, 2)) * scale
    scores = scores.masked_fill(~is_valid[:, None], float("-inf"))
    sink = sink.view(1, -1, 1)
    peak = torch.maximum(scores.amax(-1, keepdim=True), sink)
    weights = torch.exp(scores - peak)
    total = tree_sum(weights, keepdim=True) + torch.exp(sink - peak)
    return (torch.bmm(weights, keys) / total).to(q.dtype)

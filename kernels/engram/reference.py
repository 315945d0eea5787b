"""Engram in plain torch: hash n-grams to table rows, and gate the looked-up value. The model page's section 8."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.number_formats import SCALE_BLOCK, e8m0_to_float
from kernels.rms_norm.reference import inverse_rms
from kernels.tree_sum import tree_sum


def engram_hash_reference(ngram_classes: Tensor, multipliers: Tensor, primes: Tensor, offsets: Tensor) -> Tensor:
    """Table rows of every position.

    Args:
        ngram_classes: [num_rows, N] int64, classes of tokens p, p-1, ..., p-N+1 (pad past the start).
        multipliers: [N] int64.
        primes, offsets: [N - 1, num_heads] int64, for n-grams of 2..N tokens.

    Returns:
        [num_rows, (N - 1) * num_heads] int64, n-major. ``h = c_0 m_0``, then ``h ^= c_i m_i``;
        row ``= h mod prime + offset``.
    """
    hashed = ngram_classes[:, 0] * multipliers[0]
    rows = []
    for i in range(1, ngram_classes.shape[1]):
        hashed = hashed ^ (ngram_classes[:, i] * multipliers[i])
        rows.append(hashed[:, None] % primes[i - 1] + offsets[i - 1])
    return torch.cat(rows, dim=1)


def engram_gate_reference(
    streams: Tensor, keys: Tensor, value: Tensor, q_weight: Tensor, k_weight: Tensor, *, eps: float
) -> Tensor:
    """Add the gated value to every stream.

    Args:
        streams: [num_rows, K, hidden]; keys: [num_rows, K, hidden]; value: [num_rows, hidden].
        q_weight, k_weight: [K, hidden].
        eps: of both RMS norms.

    Returns:
        [num_rows, K, hidden], dtype of ``streams``: ``d = sum(X q k key) / (rms X rms key sqrt(hidden))``,
        ``g = sigmoid(sign(d) sqrt(max(|d|, 1e-6)))``, ``X + g value``; all in fp32.
    """
    wide, wide_keys = streams.float(), keys.float()
    product = wide * q_weight.float() * k_weight.float() * wide_keys
    dot = tree_sum(product, keepdim=True) * inverse_rms(wide, eps) * inverse_rms(wide_keys, eps)
    dot = dot * streams.shape[-1] ** -0.5
    gate = torch.sigmoid(torch.sign(dot) * torch.sqrt(dot.abs().clamp_min(1e-6)))
    return (wide + gate * value.float()[:, None]).to(streams.dtype)


def engram_gather_reference(
    table: Tensor, scale: Tensor | None, rows: Tensor, *, dtype: torch.dtype
) -> Tensor:
    """Look table rows up and widen them; the op's signature and returns."""
    looked_up = table[rows.long()].float()
    if scale is not None:
        scales = e8m0_to_float(scale[rows.long()])
        looked_up = (looked_up.unflatten(-1, (-1, SCALE_BLOCK)) * scales[..., None]).flatten(-2)
    return looked_up.to(dtype).flatten(1)

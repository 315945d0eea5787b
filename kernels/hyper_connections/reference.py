"""Single-pass hyper-connections in plain torch: the model page's section 7. All sums in fp32.

``num_streams`` K is 4 in the release. Sums over K are ``tree_sum``s, so they have one order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.linear import linear_reference
from kernels.rms_norm.reference import inverse_rms, rms_norm_reference
from kernels.tree_sum import tree_sum
from kernels.whole_vectors import on_whole_vectors


class StreamMix(NamedTuple):
    """What one site computes: ``pre`` collapses the *next* site, ``post`` and ``comb`` expand this one."""

    pre: Tensor  # [num_rows, K] fp32
    post: Tensor  # [num_rows, K] fp32
    comb: Tensor  # [num_rows, K, K] fp32; the first K is summed over


class SiteInput(NamedTuple):
    """What a sublayer starts from."""

    streams: Tensor  # [num_rows, K, hidden]
    x: Tensor  # [num_rows, hidden], collapsed and normed
    mix: StreamMix


def mix_streams_reference(
    streams: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    *,
    num_iterations: int,
    eps: float,
    norm_eps: float,
) -> StreamMix:
    """Mixing weights of every row from its own streams.

    Args:
        streams: [num_rows, K, hidden], float32 or bfloat16.
        fn: [2K + K*K, K * hidden] fp32, or its pieces [3, ...] in bfloat16; stream-major.
        base: [2K + K*K] fp32.
        scale: [3] fp32, for pre, post and comb.
        num_iterations: Sinkhorn rounds, the first one being softmax over rows + column division.
        eps: added inside the Sinkhorn and to ``pre``.
        norm_eps: of the RMS over all streams.
    """
    num_rows, k, _ = streams.shape
    if fn.dim() == 3:
        fn = fn[0].float() + fn[1].float() + fn[2].float()
    flat = streams.float().flatten(1)
    z = linear_reference(flat * inverse_rms(flat, norm_eps), fn)
    pre = on_whole_vectors(torch.sigmoid, z[:, :k] * scale[0] + base[:k]) + eps
    post = 2 * on_whole_vectors(torch.sigmoid, z[:, k : 2 * k] * scale[1] + base[k : 2 * k])
    # Rows innermost, so that the many small steps below run along contiguous memory.
    comb = (z[:, 2 * k :] * scale[2] + base[2 * k :]).t().contiguous().view(k, k, num_rows)
    comb = torch.exp(comb - comb.amax(1, keepdim=True))
    comb = comb / tree_sum(comb, 1, keepdim=True) + eps
    comb /= tree_sum(comb, 0, keepdim=True) + eps
    for _ in range(num_iterations - 1):
        comb /= tree_sum(comb, 1, keepdim=True) + eps
        comb /= tree_sum(comb, 0, keepdim=True) + eps
    return StreamMix(pre, post, comb.permute(2, 0, 1).contiguous())


def collapse_streams_reference(streams: Tensor, pre: Tensor) -> Tensor:
    """``sum_k pre[k] streams[k]`` in fp32, cast to the streams' dtype.

    Args:
        streams: [num_rows, K, hidden]; pre: [num_rows, K] fp32.

    Returns:
        [num_rows, hidden], dtype of ``streams``.
    """
    weighted = streams.float() * pre[..., None]
    return tree_sum(weighted, 1).to(streams.dtype)


def expand_streams_reference(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """``out[k] = post[k] y + sum_j comb[j, k] streams[j]`` in fp32, cast to the streams' dtype.

    Args:
        y: [num_rows, hidden], the sublayer's output.
        streams: [num_rows, K, hidden]; post: [num_rows, K] fp32; comb: [num_rows, K, K] fp32.
    """
    wide = streams.float()
    mixed = [
        post[:, k, None] * y.float() + tree_sum(comb[:, :, k, None] * wide, 1)
        for k in range(streams.shape[1])
    ]
    return torch.stack(mixed, dim=1).to(streams.dtype)


def collapse_norm_reference(
    streams: Tensor, pre: Tensor, norm_weight: Tensor | None, *, eps: float
) -> Tensor:
    """``collapse_streams_reference``, then RMSNorm where a weight [hidden] is given."""
    collapsed = collapse_streams_reference(streams, pre)
    return collapsed if norm_weight is None else rms_norm_reference(collapsed, norm_weight, eps=eps)


def read_streams_reference(
    streams: Tensor,
    pre: Tensor,
    norm_weight: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    *,
    num_iterations: int,
    eps: float,
    norm_eps: float,
) -> SiteInput:
    """A site's input and mix; the op's signature and returns."""
    mix = mix_streams_reference(
        streams, fn, base, scale, num_iterations=num_iterations, eps=eps, norm_eps=norm_eps
    )
    return SiteInput(streams, collapse_norm_reference(streams, pre, norm_weight, eps=norm_eps), mix)


def update_streams_reference(
    y: Tensor,
    streams: Tensor,
    mix: StreamMix,
    pre: Tensor,
    norm_weight: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    *,
    num_iterations: int,
    eps: float,
    norm_eps: float,
) -> SiteInput:
    """Expand by one site's mix, then the next site's input and mix; the op's signature and returns."""
    streams = expand_streams_reference(y, streams, mix.post, mix.comb)
    return read_streams_reference(
        streams, pre, norm_weight, fn, base, scale, num_iterations=num_iterations, eps=eps, norm_eps=norm_eps
    )

"""A sum whose order is fixed by the length alone: what every reference uses instead of ``torch.sum``.

Library reductions may choose their order by the number of rows beside the summed axis, which would
let a neighbour change a row's bits. Here every addition is elementwise, so none can.
"""

from __future__ import annotations

import torch
from torch import Tensor


def tree_sum(x: Tensor, *, keepdim: bool = False) -> Tensor:
    """Sum over the last axis in a fixed pairwise order.

    Args:
        x: [..., n], any float dtype; n >= 1.
        keepdim: keep the summed axis with length 1.

    Returns:
        [...] (or [..., 1]), dtype of ``x``. Halves are added while the length is above one; an odd
        element out is carried to the next round unchanged.
    """
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(f"x: needs a last axis of length >= 1, got shape {tuple(x.shape)}")
    while x.shape[-1] > 1:
        n = x.shape[-1]
        half = n // 2
        pairs = x[..., :half] + x[..., half : 2 * half]
        x = torch.cat([pairs, x[..., 2 * half :]], dim=-1) if n % 2 else pairs
    return x if keepdim else x[..., 0]

"""A sum whose order is fixed by the length alone: what every reference uses instead of ``torch.sum``.

Library reductions may choose their order by the number of rows beside the summed axis, which would
let a neighbour change a row's bits. Here every addition is elementwise, so none can.
"""

from __future__ import annotations

import torch
from torch import Tensor


def tree_sum(x: Tensor, dim: int = -1, *, keepdim: bool = False) -> Tensor:
    """Sum over one axis in a fixed pairwise order.

    Args:
        x: any shape and float dtype; the axis has length n >= 1.
        dim: the axis to sum.
        keepdim: keep the summed axis with length 1.

    Returns:
        ``x`` without that axis, same dtype. The first half is added to the second while the length is
        above one; an odd element out is carried to the next round unchanged.
    """
    if x.dim() == 0 or x.shape[dim] == 0:
        raise ValueError(f"x: needs an axis {dim} of length >= 1, got shape {tuple(x.shape)}")
    while x.shape[dim] > 1:
        n = x.shape[dim]
        first, second = (x.narrow(dim, 0, n - 1) if n % 2 else x).chunk(2, dim)
        pairs = first + second
        x = torch.cat([pairs, x.narrow(dim, n - 1, 1)], dim=dim) if n % 2 else pairs
    return x if keepdim else x.squeeze(dim)

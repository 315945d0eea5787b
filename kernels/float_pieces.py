"""fp32 weights cut into bfloat16 pieces, so that tensor cores multiply all of their bits. Called at load."""

from __future__ import annotations

import torch
from torch import Tensor

NUM_PIECES = 3


def split_float32(weight: Tensor) -> Tensor:
    """An fp32 weight as the bfloat16 pieces whose sum it is: [...] -> [3, ...], largest first.

    The sum is exact but for bits below 2 ** -133, the least that bfloat16 holds. Looks at the values; raises
    ``ValueError`` if one is not finite.
    """
    rest = weight.float()
    if not bool(rest.isfinite().all()):
        raise ValueError("weight: expected finite values, got infinities or NaN")
    pieces = []
    for _ in range(NUM_PIECES):
        # Cutting bits off, not rounding, so that three times 8 bits hold all 24.
        top = (rest.contiguous().view(torch.int32) & -65536).view(torch.float32)
        pieces.append(top.to(torch.bfloat16))
        rest = rest - top
    return torch.stack(pieces)

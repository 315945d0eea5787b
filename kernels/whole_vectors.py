"""Elementwise functions whose bits do not depend on where in a tensor an element lies.

A CPU's vector kernels finish a ragged tensor with scalar code that rounds exp, log and their kin
differently. Padding to whole vectors keeps every element on the vector path.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

NUM_ELEMENTS = 64
"""Two of the widest vectors of the smallest float in use, the stride of torch's unrolled loops."""


def on_whole_vectors(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """``function(x)`` for an elementwise function: same shape and dtype as ``x``."""
    padding = -x.numel() % NUM_ELEMENTS
    if padding == 0:
        return function(x.contiguous())
    flat = torch.nn.functional.pad(x.flatten(), (0, padding))
    return function(flat)[: x.numel()].view(x.shape)

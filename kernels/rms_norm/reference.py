"""RMSNorm in plain torch, statistics in fp32 and in a fixed order."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.tree_sum import tree_sum


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """``rsqrt(mean(x^2) + eps)`` over the last axis of an fp32 tensor: [..., n] -> [..., 1]."""
    return torch.rsqrt(tree_sum(x * x, keepdim=True) / x.shape[-1] + eps)


def rms_norm_reference(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """``weight * x * rsqrt(mean(x^2) + eps)``, computed in fp32 and cast once at the end.

    Args:
        x: [..., n], float32 or bfloat16.
        weight: [n], any float dtype.
        eps: added to the mean square.

    Returns:
        [..., n], dtype of ``x``.
    """
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"weight {tuple(weight.shape)} does not match x {tuple(x.shape)}")
    wide = x.float()
    return (wide * inverse_rms(wide, eps) * weight.float()).to(x.dtype)

"""Checks of an op's tensor arguments: every failure is a ``ValueError`` naming the argument and both values.

It knows shapes, dtypes, devices and strides, and no op.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16)
INDICES = (torch.int32, torch.int64)


def expect_tensor(
    name: str,
    x: Tensor,
    shape: Sequence[int | None],
    dtypes: Sequence[torch.dtype],
    *,
    like: Tensor | None = None,
    is_strided: bool = False,
) -> None:
    """Refuse a tensor that is not as documented.

    Args:
        name: the argument's name.
        shape: expected sizes, None for any.
        dtypes: those allowed.
        like: a tensor whose device ``x`` has to share.
        is_strided: rows may lie apart; without it ``x`` has to be contiguous.
    """
    if x.dim() != len(shape) or any(n is not None and n != m for n, m in zip(shape, x.shape, strict=False)):
        expected = tuple("any" if n is None else n for n in shape)
        raise ValueError(f"{name}: expected shape {expected}, got {tuple(x.shape)}")
    if x.dtype not in dtypes:
        raise ValueError(f"{name}: expected dtype {' or '.join(map(str, dtypes))}, got {x.dtype}")
    if like is not None and x.device != like.device:
        raise ValueError(f"{name}: expected device {like.device}, got {x.device}")
    if is_strided:
        if x.dim() and x.shape[-1] > 1 and x.stride(-1) != 1:
            raise ValueError(f"{name}: expected stride 1 on the last axis, got strides {x.stride()}")
    elif not x.is_contiguous():
        raise ValueError(f"{name}: expected a contiguous tensor, got strides {x.stride()}")


def expect_reachable(name: str, x: Tensor, device: torch.device) -> None:
    """Refuse a tensor that a kernel on ``device`` cannot read and write where it is."""
    if x.device != device and not x.is_pinned():
        raise ValueError(f"{name}: expected device {device} or page-locked host memory, got {x.device}")


def expect_output(
    name: str, x: Tensor | None, shape: Sequence[int], dtype: torch.dtype, like: Tensor
) -> Tensor:
    """``x`` when it is as documented (rows may lie apart), a new tensor when it is None."""
    if x is None:
        return torch.empty(tuple(shape), dtype=dtype, device=like.device)
    expect_tensor(name, x, shape, (dtype,), like=like, is_strided=True)
    return x


def expect_dense(name: str, x: Tensor) -> None:
    """Refuse a tensor, an output given by the caller say, whose rows lie apart."""
    if not x.is_contiguous():
        raise ValueError(f"{name}: expected a contiguous tensor, got strides {x.stride()}")

"""An fp8 weight with fewer different scales: what the fp8 product runs fastest on.

Runs once at load. It knows the number format and no kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.linear.reference import Fp8Weight
from kernels.number_formats import SCALE_BLOCK

MAX_SHIFT = 8
GROUP = 4
"""Tiles that the fp8 product adds up before it multiplies by their scale."""
ROUNDING = 2.0**-12
"""Of a tile's largest value, what another may lose; its own rounding to e4m3 may have cost 2^-5 of it."""


def align_scales(weight: Fp8Weight, *, rounding: float = 0.0) -> Fp8Weight:
    """Give the four tiles of 128 inputs one scale wherever that changes no element by more than is allowed.

    A tile moves to a larger scale by dividing its values by a power of two; of them, the smallest of e4m3
    can lose bits. The scale of a group is the one that most of its tiles can have; the others keep theirs.

    Args:
        weight: [out_features, in_features].
        rounding: what an element may change by, as a part of its tile's largest; 0 changes none.

    Returns:
        The weight, ``is_even`` where every group has one scale.
    """
    tiles = _tiles(weight.values)
    exponents = weight.scales.to(torch.int32)
    room = torch.zeros_like(exponents)
    for step in range(1, MAX_SHIFT + 1):
        room[_shifted(tiles, torch.full_like(exponents, step), rounding)[1]] = step
    is_zero = (tiles.float() == 0).all(3).all(1)
    room[is_zero] = 255
    grouped = (_grouped(exponents, 0), _grouped(room, 0), _grouped(is_zero, True))
    target = _targets(*grouped).repeat_interleave(GROUP, 1)[:, : exponents.shape[1]]
    shift = torch.where(
        _can_move(exponents, target, room, is_zero) & ~is_zero,
        target - exponents,
        torch.zeros_like(exponents),
    )
    moved = torch.where(is_zero, target, exponents + shift).to(torch.uint8)
    values = _shifted(tiles, shift, rounding)[0].flatten(2).flatten(0, 1)
    rows, columns = weight.values.shape
    is_even = columns % (GROUP * SCALE_BLOCK) == 0 and bool((moved.int() == target).all())
    return Fp8Weight(values[:rows, :columns].contiguous(), moved.contiguous(), is_even)


def _grouped(x: Tensor, padding: int | bool) -> Tensor:
    """[rows, columns] -> [rows, groups, tiles of a group], a last group filled up."""
    return torch.nn.functional.pad(x, (0, -x.shape[1] % GROUP), value=padding).unflatten(1, (-1, GROUP))


def _targets(exponents: Tensor, room: Tensor, is_zero: Tensor) -> Tensor:
    """[rows, groups]: the scale that most tiles of each group can have, the largest of those."""
    lowest = exponents.masked_fill(is_zero, 0).amax(2, keepdim=True)
    best, target = torch.full_like(lowest, -1), lowest
    for fall in range(MAX_SHIFT + 1):
        candidate = lowest - fall
        count = _can_move(exponents, candidate, room, is_zero).sum(2, keepdim=True).to(torch.int32)
        is_better = (count > best) & (candidate >= 0)
        best, target = torch.where(is_better, count, best), torch.where(is_better, candidate, target)
    return target.squeeze(2)


def _tiles(values: Tensor) -> Tensor:
    """[O, I] -> [ceil(O / 32), 32, ceil(I / 32), 32], zeros behind."""
    rows, columns = values.shape
    padding = (0, -columns % SCALE_BLOCK, 0, -rows % SCALE_BLOCK)
    raw = torch.nn.functional.pad(values.view(torch.uint8), padding)
    return raw.view(torch.float8_e4m3fn).unflatten(1, (-1, SCALE_BLOCK)).unflatten(0, (-1, SCALE_BLOCK))


def _shifted(tiles: Tensor, shift: Tensor, rounding: float) -> tuple[Tensor, Tensor]:
    """Tiles divided by ``2^shift``, and in which of them no more was lost than is allowed."""
    divided = tiles.float() * torch.exp2(-shift.float())[:, None, :, None]
    moved = divided.to(torch.float8_e4m3fn)
    largest = divided.abs().amax((1, 3))
    return moved, (moved.float() - divided).abs().amax((1, 3)) <= rounding * largest


def _can_move(exponents: Tensor, target: Tensor, room: Tensor, is_zero: Tensor) -> Tensor:
    return is_zero | ((exponents <= target) & (target - exponents <= room))

"""What enters the caches, in plain torch, out of the formats', norm's and rotation's own references."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.compressor import pool_groups_reference
from kernels.number_formats import pack_fp4_entry, pack_fp4_index, pack_fp8
from kernels.rms_norm import rms_norm_reference
from kernels.rope import apply_rope_reference


def store_window_kv_reference(
    kv: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    eps: float,
    is_packed: bool,
) -> Tensor:
    """The op's signature and returns."""
    rotated = apply_rope_reference(rms_norm_reference(kv, weight, eps=eps), cos, sin)
    return pack_fp8(rotated) if is_packed else rotated


def compress_and_store_reference(
    source: Tensor,
    open_groups: Tensor | None,
    group_rows: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    pool: Tensor,
    *,
    eps: float,
    dtype: torch.dtype,
) -> Tensor:
    """The op's signature and returns; writes ``pool`` in place."""
    rows = group_rows.long()
    if open_groups is None:
        latents = source[rows[:, 0]]
    else:
        latents = pool_groups_reference(torch.cat([open_groups, source]), rows).to(dtype)
    latents = rms_norm_reference(latents, weight, eps=eps)
    rotated = apply_rope_reference(latents, cos, sin)
    _write(pool, slots, pack_fp4_entry(rotated) if pool.dtype == torch.uint8 else rotated)
    return latents


def store_index_keys_reference(
    keys: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, pool: Tensor, *, eps: float
) -> None:
    """The op's signature; writes ``pool`` in place."""
    rotated = apply_rope_reference(rms_norm_reference(keys, weight, eps=eps), cos, sin)
    _write(pool, slots, pack_fp4_index(rotated) if pool.dtype == torch.uint8 else rotated)


def copy_rows_reference(source: Tensor, target: Tensor, source_rows: Tensor, target_rows: Tensor) -> None:
    """The op's signature; writes ``target`` in place, on whichever device it is."""
    rows = source[source_rows.to(source.device).long()]
    _write(target, target_rows.to(target.device), rows.to(target.device))


def _write(pool: Tensor, slots: Tensor, rows: Tensor) -> None:
    is_kept = slots >= 0
    pool[slots[is_kept].long()] = rows[is_kept]

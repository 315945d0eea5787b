"""The model's small number formats, packed as bytes: the model page's sections 10 and 14.

Three cache formats and two weight formats. Packing then unpacking *is* the model's quantisation
(lossless afterwards), so the cache holds the packed bytes from the first day.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

ActivationMode = Literal["release", "row", "none"]
"""How the input of a quantised product is rounded: a scale per 32 channels, one a row, or not at all."""
SCALE_BLOCK = 32
"""Channels sharing one power-of-two scale (fp8 activations and windows, fp4 index vectors, weights)."""
ENTRY_BLOCK = 16
"""Channels sharing one e4m3 scale (compressed entries)."""
E4M3_MAX = 448.0
E2M1_MAX = 6.0
_E2M1_GRID = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class QuantisedRows(NamedTuple):
    """Activations as an fp8 product reads them: ``values * 2^(scales - 127)``."""

    values: Tensor  # [num_rows, n] float8_e4m3fn
    scales: Tensor  # uint8 e8m0: [num_rows, n / 32], or [num_rows, 1] for one scale a row


def _ceil_power_of_two(ratio: Tensor) -> Tensor:
    """Biased exponent byte of the smallest power of two >= a positive normal fp32 number."""
    bits = ratio.view(torch.int32)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0)
    return exponent.to(torch.uint8)


def e8m0_to_float(exponents: Tensor) -> Tensor:
    """fp32 value ``2^(byte - 127)`` of e8m0 bytes (uint8); byte 0 is ``2^-127``."""
    normal = exponents.to(torch.int32) << 23
    return torch.where(exponents == 0, 0x400000, normal).view(torch.float32)


def _blocks(x: Tensor, size: int) -> Tensor:
    if x.shape[-1] % size:
        raise ValueError(f"x {tuple(x.shape)}: last axis is no multiple of {size}")
    return x.float().unflatten(-1, (-1, size))


def _to_e2m1(x: Tensor) -> Tensor:
    """4-bit codes (uint8) of fp32 numbers: round to nearest, ties to the even code, sign in bit 3."""
    a = x.abs()
    code = (a > 0.25).to(torch.uint8)
    for threshold, ties_up in (
        (0.75, True),
        (1.25, False),
        (1.75, True),
        (2.5, False),
        (3.5, True),
        (5.0, False),
    ):
        code += (a >= threshold) if ties_up else (a > threshold)
    return code | (torch.signbit(x).to(torch.uint8) << 3)


def _pack_nibbles(codes: Tensor) -> Tensor:
    """[..., n] codes -> [..., n / 2] bytes, the even channel in the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_e2m1(packed: Tensor) -> Tensor:
    """[..., n / 2] bytes -> [..., n] fp32 values, low nibble first."""
    grid = torch.tensor(_E2M1_GRID, dtype=torch.float32, device=packed.device)
    values = torch.cat([grid, -grid])
    pairs = torch.stack([values.repeat(16), values.repeat_interleave(16)], dim=-1)  # [256, 2]
    # A byte's two values are fetched as one number of eight bytes: several times as fast on a CPU.
    found = pairs.view(torch.int64).flatten().index_select(0, packed.flatten().to(torch.int32))
    return found.view(torch.float32).view(*packed.shape[:-1], 2 * packed.shape[-1])


def fp8_scales(x: Tensor, block: int) -> Tensor:
    """Power-of-two scale bytes of e4m3 blocks: ``2^ceil(log2(max(amax, 1e-4) / 448))``."""
    amax = _blocks(x, block).abs().amax(-1).clamp_min(1e-4)
    return _ceil_power_of_two(amax * (1.0 / E4M3_MAX))


def pack_fp8(x: Tensor) -> Tensor:
    """Window KV (Q8): [..., n] float -> [..., n + n / 32] bytes: e4m3 values, then e8m0 scales."""
    exponents = fp8_scales(x, SCALE_BLOCK)
    scaled = _blocks(x, SCALE_BLOCK) / e8m0_to_float(exponents)[..., None]
    values = scaled.to(torch.float8_e4m3fn).view(torch.uint8).flatten(-2)
    return torch.cat([values, exponents], dim=-1)


def unpack_fp8(packed: Tensor) -> Tensor:
    """Inverse of ``pack_fp8``: [..., n + n / 32] bytes -> [..., n] fp32."""
    num_scales = packed.shape[-1] // (SCALE_BLOCK + 1)
    values = packed[..., :-num_scales].contiguous().view(torch.float8_e4m3fn).float()
    scales = e8m0_to_float(packed[..., -num_scales:])
    return (values.unflatten(-1, (num_scales, SCALE_BLOCK)) * scales[..., None]).flatten(-2)


def pack_fp4_index(x: Tensor) -> Tensor:
    """Index vectors (Q4): [..., n] float -> [..., n / 2 + n / 32] bytes: e2m1 nibbles, then e8m0 scales."""
    amax = _blocks(x, SCALE_BLOCK).abs().amax(-1).clamp_min(E2M1_MAX * 2.0**-126)
    exponents = _ceil_power_of_two(amax * (1.0 / E2M1_MAX))
    codes = _to_e2m1(_blocks(x, SCALE_BLOCK) / e8m0_to_float(exponents)[..., None])
    return torch.cat([_pack_nibbles(codes.flatten(-2)), exponents], dim=-1)


def pack_index_queries_reference(x: Tensor) -> Tensor:
    """``pack_fp4_index`` of [num_rows, num_heads, n]."""
    return pack_fp4_index(x)


def unpack_fp4_index(packed: Tensor) -> Tensor:
    """Inverse of ``pack_fp4_index``: [..., n / 2 + n / 32] bytes -> [..., n] fp32."""
    num_scales = packed.shape[-1] // (SCALE_BLOCK // 2 + 1)
    values = unpack_e2m1(packed[..., :-num_scales])
    scales = e8m0_to_float(packed[..., -num_scales:])
    return (values.unflatten(-1, (num_scales, SCALE_BLOCK)) * scales[..., None]).flatten(-2)


def pack_fp4_entry(x: Tensor) -> Tensor:
    """Compressed KV (Q4e): [..., n] float -> [..., n / 2 + n / 16] bytes: e2m1 nibbles, then e4m3 scales."""
    amax = _blocks(x, ENTRY_BLOCK).abs().amax(-1).clamp_min(E2M1_MAX * 2.0**-9)
    scales = (amax / E2M1_MAX).clamp_max(E4M3_MAX).to(torch.float8_e4m3fn)
    codes = _to_e2m1(_blocks(x, ENTRY_BLOCK) / scales.float()[..., None])
    return torch.cat([_pack_nibbles(codes.flatten(-2)), scales.view(torch.uint8)], dim=-1)


def unpack_fp4_entry(packed: Tensor) -> Tensor:
    """Inverse of ``pack_fp4_entry``: [..., n / 2 + n / 16] bytes -> [..., n] fp32."""
    num_scales = packed.shape[-1] // (ENTRY_BLOCK // 2 + 1)
    values = unpack_e2m1(packed[..., :-num_scales])
    scales = packed[..., -num_scales:].contiguous().view(torch.float8_e4m3fn).float()
    return (values.unflatten(-1, (num_scales, ENTRY_BLOCK)) * scales[..., None]).flatten(-2)


def quantise_activations_reference(x: Tensor, *, mode: ActivationMode) -> QuantisedRows:
    """What an fp8 product reads: ``x`` rounded to e4m3, with power-of-two scales.

    Args:
        x: [num_rows, n], float32 or bfloat16; n a multiple of 32 under ``release``.
        mode: ``release`` gives each 32 channels a scale of their own, ``row`` one to the whole row.

    Returns:
        values [num_rows, n], scales [num_rows, n / 32] or [num_rows, 1].
    """
    if mode == "none":
        raise ValueError(f"mode: expected release or row, got {mode}")
    block = SCALE_BLOCK if mode == "release" else x.shape[-1]
    exponents = fp8_scales(x, block)
    values = _blocks(x, block) / e8m0_to_float(exponents)[..., None]
    return QuantisedRows(values.to(torch.float8_e4m3fn).flatten(-2), exponents)


def dequantise_activations(x: QuantisedRows, dtype: torch.dtype) -> Tensor:
    """[num_rows, n] in ``dtype``; exact, because e4m3 times a power of two fits bfloat16."""
    values = x.values.float().unflatten(-1, (x.scales.shape[-1], -1))
    return (values * e8m0_to_float(x.scales)[..., None]).flatten(-2).to(dtype)


def dequantise_fp8_weight(weight: Tensor, scale: Tensor) -> Tensor:
    """[O, I] e4m3 with one e8m0 scale per 32 x 32 tile ([ceil(O/32), ceil(I/32)], uint8) -> fp32."""
    rows, columns = weight.shape
    scales = e8m0_to_float(scale).repeat_interleave(SCALE_BLOCK, 0)[:rows]
    return weight.float() * scales.repeat_interleave(SCALE_BLOCK, 1)[:, :columns]


def dequantise_mxfp4_weight(packed: Tensor, scale: Tensor) -> Tensor:
    """[O, I / 2] bytes (low nibble = even column), an e8m0 scale per 32 columns -> fp32 [O, I]."""
    values = unpack_e2m1(packed.view(torch.uint8))
    return (values.unflatten(-1, (-1, SCALE_BLOCK)) * e8m0_to_float(scale)[..., None]).flatten(-2)

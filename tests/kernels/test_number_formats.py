"""The small number formats against brute force: every code, every tie, and blocks at the ends of the range."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels.number_formats import (
    choose_quantise_config,
    dequantise_activations,
    dequantise_fp8_weight,
    dequantise_mxfp4_weight,
    e8m0_to_float,
    pack_fp4_entry,
    pack_fp4_index,
    pack_fp8,
    quantise_activations,
    quantise_activations_reference,
    unpack_fp4_entry,
    unpack_fp4_index,
    unpack_fp8,
)
from tests.kernels.contract import Gate, OpCase, contract_device, contract_params
from tests.kernels.number_formats_cases import CASES

GRID = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
ALL_BYTES = torch.arange(256, dtype=torch.uint8)
E4M3_VALUES = ALL_BYTES.view(torch.float8_e4m3fn).float()


def nearest_code(value: float) -> float:
    """Round to the fp4 grid; a tie goes to the value with the even code."""
    best = min(range(8), key=lambda code: (abs(GRID[code] - abs(value)), code % 2))
    return math.copysign(GRID[best], value)


def nearest_e4m3(value: float) -> float:
    """Round to e4m3 by trying all values; a tie goes to the even mantissa."""
    codes = [code for code in range(127) if not math.isnan(E4M3_VALUES[code])]
    best = min(codes, key=lambda code: (abs(float(E4M3_VALUES[code]) - abs(value)), code % 2))
    return math.copysign(float(E4M3_VALUES[best]), value)


def power_of_two_scale(amax: float, largest: float) -> float:
    """2^ceil(log2(amax / largest)), the division being a product with the fp32 reciprocal."""
    reciprocal = torch.tensor(1.0 / largest, dtype=torch.float32)
    mantissa, exponent = math.frexp(float(torch.tensor(amax, dtype=torch.float32) * reciprocal))
    return 2.0 ** (exponent - 1 if mantissa == 0.5 else exponent)


def brute_force(block: list[float], kind: str) -> list[float]:
    """What packing and unpacking a block has to give."""
    amax = max(abs(x) for x in block)
    if kind == "fp8":
        scale = power_of_two_scale(max(amax, 1e-4), 448.0)
        return [nearest_e4m3(x / scale) * scale for x in block]
    if kind == "index":
        scale = power_of_two_scale(max(amax, 6 * 2.0**-126), 6.0)
    else:
        floor = max(amax, 6 * 2.0**-9)
        scale = nearest_e4m3(min(float(torch.tensor(floor, dtype=torch.float32) / 6.0), 448.0))
    return [nearest_code(x / scale) * scale for x in block]


FORMATS = {
    "fp8": (32, pack_fp8, unpack_fp8),
    "index": (32, pack_fp4_index, unpack_fp4_index),
    "entry": (16, pack_fp4_entry, unpack_fp4_entry),
}


def special_blocks(width: int) -> Tensor:
    """Zero, tiny, denormal, huge and lopsided blocks, blocks of ties, and random ones."""
    generator = torch.Generator().manual_seed(3)
    rows = [
        torch.zeros(width),
        torch.full((width,), 1e-5),
        torch.full((width,), 1e-40),
        torch.full((width,), 2600.0),
        torch.linspace(-6, 6, width),
        torch.tensor([6.0] + [0.25, -0.75, 1.25, 1.75, -2.5, 3.5, 5.0] + [0.0] * (width - 8)),
        torch.tensor([448.0, 17.0, 19.0, 21.0, -1.0625, 2.0**-7] + [-0.0] * (width - 6)),
        torch.tensor([3e4] + [1.0] * (width - 1)),
        2.0 ** torch.arange(width).float() / 1000,
    ]
    random_rows = torch.randn(40, width, generator=generator) * 4.0 ** torch.randn(40, 1, generator=generator)
    return torch.cat([torch.stack(rows), random_rows])


@pytest.mark.parametrize("kind", list(FORMATS))
def test_packing_and_unpacking_is_the_brute_force_rounding(kind: str) -> None:
    width, pack, unpack = FORMATS[kind]
    blocks = special_blocks(width)
    if kind == "entry":
        # Beyond 6 * 448 the scale saturates; the largest code is then all there is.
        blocks = blocks.clamp(-2688, 2688)
    got = unpack(pack(blocks))
    expected = torch.tensor([brute_force(block, kind) for block in blocks.tolist()])
    assert torch.equal(got, expected)


@pytest.mark.parametrize("kind", list(FORMATS))
def test_packed_bytes_have_the_stated_width_and_are_stable(kind: str) -> None:
    """Packing what was unpacked loses nothing more; leading axes are kept; a row's bytes are its own."""
    width, pack, unpack = FORMATS[kind]
    x = torch.randn(3, 5, 4 * width, generator=torch.Generator().manual_seed(1))
    packed = pack(x)
    num_bytes = {"fp8": 4 * width + 4, "index": 2 * width + 4, "entry": 2 * width + 4}[kind]
    assert packed.dtype == torch.uint8
    assert packed.shape == (3, 5, num_bytes)
    assert torch.equal(unpack(pack(unpack(packed))), unpack(packed))
    assert torch.equal(pack(x[1, 2:3]), packed[1, 2:3])


def test_the_release_widths_are_the_model_pages() -> None:
    assert pack_fp8(torch.ones(1, 512)).shape == (1, 528)
    assert pack_fp4_entry(torch.ones(1, 512)).shape == (1, 288)
    assert pack_fp4_index(torch.ones(1, 128)).shape == (1, 68)


def test_every_fp4_code_survives_and_the_low_nibble_comes_first() -> None:
    values = [*GRID, *[-v for v in GRID]]
    row = torch.tensor([values + values])
    packed = pack_fp4_index(row)
    assert packed[0, :8].tolist() == [(code + 1) * 16 + code for code in range(0, 16, 2)]
    assert torch.equal(unpack_fp4_index(packed), row)
    assert torch.signbit(unpack_fp4_index(packed)[0, 8])


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.25, 0.0),
        (0.75, 1.0),
        (1.25, 1.0),
        (1.75, 2.0),
        (2.5, 2.0),
        (3.5, 4.0),
        (5.0, 4.0),
        (-2.5, -2.0),
        (-0.25, 0.0),
    ],
)
def test_fp4_ties_go_to_the_even_code(value: float, expected: float) -> None:
    block = torch.tensor([[6.0, value] + [0.0] * 30])
    assert unpack_fp4_index(pack_fp4_index(block))[0, 1] == expected


def test_every_e4m3_scale_of_an_entry_is_read_back() -> None:
    for byte in range(1, 127):
        scale = float(E4M3_VALUES[byte])
        if scale < 2.0**-9:
            continue
        block = torch.tensor([[6 * scale, -3 * scale] + [0.5 * scale] * 14])
        packed = pack_fp4_entry(block)
        assert packed[0, -1] == byte
        assert torch.equal(unpack_fp4_entry(packed), block)


def test_e8m0_covers_its_whole_range() -> None:
    values = e8m0_to_float(ALL_BYTES[:255])
    assert torch.equal(values.double(), 2.0 ** (torch.arange(255, dtype=torch.float64) - 127))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations_are_rounded_like_the_window(dtype: torch.dtype) -> None:
    x = torch.randn(7, 64, generator=torch.Generator().manual_seed(2)).to(dtype)
    blocks = quantise_activations_reference(x, mode="release")
    assert torch.equal(dequantise_activations(blocks, dtype), unpack_fp8(pack_fp8(x)).to(dtype))
    one_scale = dequantise_activations(quantise_activations_reference(x, mode="row"), dtype)
    rows = [[nearest_e4m3(v / s) * s for v in row] for row in x.tolist() for s in [_row_scale(row)]]
    assert torch.equal(one_scale, torch.tensor(rows).to(dtype))


def _row_scale(row: list[float]) -> float:
    return power_of_two_scale(max(max(abs(v) for v in row), 1e-4), 448.0)


def test_weights_are_widened_tile_by_tile() -> None:
    generator = torch.Generator().manual_seed(4)
    stored = torch.randn(40, 70, generator=generator).to(torch.float8_e4m3fn)
    scale = torch.randint(120, 135, (2, 3), generator=generator, dtype=torch.uint8)
    wide = dequantise_fp8_weight(stored, scale)
    for i, j in [(0, 0), (31, 31), (32, 31), (39, 69), (5, 64)]:
        assert wide[i, j] == stored[i, j].float() * 2.0 ** (int(scale[i // 32, j // 32]) - 127)


def test_mxfp4_weights_hold_the_even_column_low() -> None:
    codes = torch.arange(64).reshape(1, 64) % 16
    packed = (codes[:, 0::2] + 16 * codes[:, 1::2]).to(torch.uint8).view(torch.int8)
    wide = dequantise_mxfp4_weight(packed, torch.tensor([[127, 130]], dtype=torch.uint8))
    values = torch.tensor([*GRID, *[-v for v in GRID]])
    assert torch.equal(wide, torch.cat([values.repeat(2), values.repeat(2) * 8])[None])


def test_a_ragged_last_axis_is_refused() -> None:
    with pytest.raises(ValueError, match="no multiple of 32"):
        pack_fp8(torch.ones(2, 40))


@pytest.mark.parametrize(("case", "gate"), contract_params(CASES))
def test_contract(case: OpCase, gate: Gate) -> None:
    gate(case, contract_device())


def test_a_wrong_argument_is_named() -> None:
    x = torch.zeros(3, 40)
    with pytest.raises(ValueError, match=r"^x: expected a width that is a multiple of 32, got 40"):
        quantise_activations(x, mode="release")
    with pytest.raises(ValueError, match=r"^mode: expected release or row, got none"):
        quantise_activations(x, mode="none")
    assert quantise_activations(x[:0], mode="row").values.shape == (0, 40)


def test_blocks_cover_the_row() -> None:
    assert choose_quantise_config(5120, "release")[:2] == (8192, 32)
    assert choose_quantise_config(100, "row")[:2] == (128, 128)


@pytest.mark.parametrize(
    ("pack", "unpack"),
    [(pack_fp8, unpack_fp8), (pack_fp4_index, unpack_fp4_index), (pack_fp4_entry, unpack_fp4_entry)],
)
def test_no_rows_unpack_to_no_rows(
    pack: Callable[[Tensor], Tensor], unpack: Callable[[Tensor], Tensor]
) -> None:
    """As where no row of a tile has selected anything."""
    packed = pack(torch.ones(5, 1, 32))
    assert unpack(packed[:, :0]).shape == (5, 0, 32)
    assert unpack(packed[:0, 0]).shape == (0, 32)

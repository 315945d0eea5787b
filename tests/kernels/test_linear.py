"""Linear layers: the contract, tile choice, empty launches, argument checks."""

from __future__ import annotations

import pytest
import torch

from kernels.linear import (
    HOPPER_TILES,
    ROUNDING,
    Fp8Weight,
    HopperConfig,
    align_scales,
    choose_config,
    choose_hopper_config,
    choose_sum_order,
    fp8_linear,
    fp32_linear,
    grouped_linear,
    linear,
    runs_on_hopper_kernel,
)
from kernels.number_formats import (
    QuantisedRows,
    dequantise_activations,
    dequantise_fp8_weight,
    quantise_activations,
)
from tests.kernels.contract import Gate, OpCase, contract_device, contract_params, equal_bytes, errors_of
from tests.kernels.linear_cases import CASES, fp8_weight


@pytest.mark.parametrize(("case", "gate"), contract_params(CASES))
def test_contract(case: OpCase, gate: Gate) -> None:
    gate(case, contract_device())


@pytest.mark.parametrize("in_features", [32, 96, 1280, 2304, 4096, 5120, 6144, 8192])
@pytest.mark.parametrize("out_features", [8, 512, 1280, 32768])
def test_parts_cover_the_inputs(in_features: int, out_features: int) -> None:
    order = choose_sum_order(out_features, in_features, 1, "fp8")
    assert order.num_splits * order.split_slices * 32 == in_features
    assert order.split_slices % order.unroll == 0


@pytest.mark.parametrize("out_features", [8, 40, 64, 5120])
def test_rows_do_not_change_the_kind_of_product(out_features: int) -> None:
    """Tiles of 64 outputs and more take the wide instruction; no row count crosses that line."""
    configs = [choose_config(out_features, rows, "bf16") for rows in (1, 16, 17, 64, 65, 8192)]
    assert len({config.block_out >= 64 for config in configs}) == 1


def test_no_rows_give_no_rows() -> None:
    x, weight = torch.zeros(0, 64), torch.zeros(24, 64)
    stored = Fp8Weight(weight.to(torch.float8_e4m3fn), torch.zeros(1, 2, dtype=torch.uint8))
    rows = QuantisedRows(x.to(torch.float8_e4m3fn), torch.zeros(0, 1, dtype=torch.uint8))
    assert linear(x, weight).shape == (0, 24)
    assert fp32_linear(x, weight).shape == (0, 24)
    assert fp8_linear(rows, stored, dtype=torch.float32).shape == (0, 24)
    assert grouped_linear(torch.zeros(0, 128), stored, num_groups=2).shape == (0, 24)


def test_a_wrong_argument_is_named() -> None:
    x, weight = torch.zeros(3, 64), torch.zeros(24, 64)
    values = weight.to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"^weight: expected shape \('any', 64\), got \(24, 32\)"):
        linear(x, weight[:, :32].contiguous())
    with pytest.raises(ValueError, match=r"^weight: expected dtype"):
        linear(x, weight.bfloat16())
    with pytest.raises(ValueError, match=r"^weight.scales: expected shape \(1, 2\), got \(1, 1\)"):
        fp8_linear(x, Fp8Weight(values, torch.zeros(1, 1, dtype=torch.uint8)), dtype=torch.float32)
    with pytest.raises(ValueError, match=r"^num_groups: expected a divisor of 64, got 3"):
        grouped_linear(x, weight, num_groups=3)
    with pytest.raises(ValueError, match=r"^dtype: expected"):
        fp8_linear(x, Fp8Weight(values, torch.zeros(1, 2, dtype=torch.uint8)), dtype=torch.float16)


def test_aligned_scales_keep_every_value() -> None:
    """Rows of tiles whose scales differ by a little, tiles of zeros, and a tile that cannot move."""
    g = torch.Generator().manual_seed(5)
    values = (torch.randn(70, 160, generator=g) * 60).to(torch.float8_e4m3fn)
    values[:32, 32:64] = 0
    values[32:64, :32] = 2.0**-9
    scales = torch.randint(118, 122, (3, 5), generator=g, dtype=torch.uint8)
    scales[0, 1], scales[1, 0] = 0, 100
    weight = Fp8Weight(values, scales)
    aligned = align_scales(weight)
    assert torch.equal(aligned.widened(), weight.widened())
    assert aligned.values.shape == values.shape
    spread = [len(set(row)) for row in aligned.scales.tolist()]
    assert spread[0] < len(set(scales[0].tolist()))
    assert len(set(aligned.scales[0, :4].tolist())) == 1
    assert aligned.scales[1, 0] != aligned.scales[1, 1]


def test_scales_that_are_aligned_with_rounding_are_even_and_move_no_value_far() -> None:
    g = torch.Generator().manual_seed(6)
    weight = fp8_weight(256, 1280, g, torch.device("cpu"))
    assert not align_scales(weight).is_even, "nothing to round"
    aligned = align_scales(weight, rounding=ROUNDING)
    assert aligned.is_even
    groups = aligned.scales.unflatten(1, (-1, 4))
    assert torch.equal(groups, groups[..., :1].expand_as(groups))
    tiles, moved = (w.widened().unflatten(1, (-1, 32)).unflatten(0, (-1, 32)) for w in (weight, aligned))
    assert bool(((moved - tiles).abs().amax((1, 3)) <= ROUNDING * tiles.abs().amax((1, 3))).all())
    assert 0 < float((moved != tiles).float().mean()) < 1e-3


def test_a_group_whose_scales_lie_too_far_apart_stays_uneven() -> None:
    values = torch.full((32, 128), 1.0).to(torch.float8_e4m3fn)
    weight = Fp8Weight(values, torch.tensor([[100, 127, 127, 127]], dtype=torch.uint8))
    aligned = align_scales(weight, rounding=ROUNDING)
    assert not aligned.is_even
    assert torch.equal(aligned.widened(), weight.widened())


@pytest.mark.parametrize("config", HOPPER_TILES)
def test_tiles_fit_in_shared_memory(config: HopperConfig) -> None:
    stages = config.num_stages * 128 * (config.block_out + config.block_rows)
    used = stages + 2 * config.block_out * min(128, config.block_rows) + 1024
    assert config.per_processor * (used + 1024) <= 228 * 1024


@pytest.mark.gpu
@pytest.mark.parametrize("spread", [0, 1, 12])
@pytest.mark.parametrize(("num_in", "num_out"), [(384, 192), (1280, 1280), (128, 64)])
def test_all_tiles_give_equal_bytes(
    monkeypatch: pytest.MonkeyPatch, num_in: int, num_out: int, spread: int
) -> None:
    """fp8 and bfloat16 operands; an odd number of steps, tiles beyond the last output, scales that differ.

    Where they do not, the products of even weights too.
    """
    if not runs_on_hopper_kernel(num_out, num_in, 1, "fp8", torch.cuda.get_device_capability()):
        pytest.skip("no Hopper GPU")
    g = torch.Generator("cuda").manual_seed(num_in + spread)
    x = torch.randn(521, num_in, generator=g, device="cuda").bfloat16()
    values = (torch.randn(num_out, num_in, generator=g, device="cuda") * 60).to(torch.float8_e4m3fn)
    scales = torch.randint(
        115, 116 + spread, (num_out // 32, num_in // 32), generator=g, device="cuda", dtype=torch.uint8
    )
    wide = dequantise_fp8_weight(values, scales).bfloat16()
    rows = quantise_activations(x, mode="row")
    found = []
    for config in HOPPER_TILES:
        monkeypatch.setattr("kernels.linear.op.choose_hopper_config", lambda *_, config=config: config)
        for is_even in (False, True) if spread == 0 else (False,):
            weight = Fp8Weight(values, scales, is_even)
            found.append((fp8_linear(rows, weight, dtype=torch.bfloat16), linear(x, wide)))
    expected = dequantise_activations(rows, torch.float64) @ dequantise_fp8_weight(values, scales).double().T
    assert errors_of(found[0][0], expected)[0] < 2.5e-3
    for fp8, bf16 in found[1:]:
        assert equal_bytes(fp8, found[0][0])
        assert equal_bytes(bf16, found[0][1])


def test_only_the_weights_shape_chooses_the_kernel() -> None:
    assert runs_on_hopper_kernel(5120, 8192, 1, "fp8", (9, 0))
    assert runs_on_hopper_kernel(1024, 4096, 8, "bf16", (9, 0))
    assert not runs_on_hopper_kernel(5120, 8192, 1, "fp8", (10, 0))
    assert not runs_on_hopper_kernel(5120, 8160, 1, "fp8", (9, 0))
    assert not runs_on_hopper_kernel(64, 4096, 8, "bf16", (9, 0))
    assert not runs_on_hopper_kernel(512, 5120, 1, "fp32", (9, 0))


def test_tiles_follow_the_work() -> None:
    """Few rows of a wide weight, few tiles spread over all processors, many rows."""
    assert choose_hopper_config(32768, 16, 132).block_rows == 16
    assert choose_hopper_config(32768, 64, 132)[:2] == (64, 64)
    assert choose_hopper_config(1280, 64, 132)[:2] == (64, 16)
    assert choose_hopper_config(1280, 257, 132)[:2] == (64, 64)
    assert choose_hopper_config(512, 4096, 132)[:2] == (128, 128)
    assert choose_hopper_config(5120, 4096, 132)[:2] == (128, 256)

"""Linear layers: the contract, tile choice, empty launches, argument checks."""

from __future__ import annotations

import pytest
import torch

from kernels.linear import (
    Fp8Weight,
    choose_config,
    choose_sum_order,
    fp8_linear,
    grouped_linear,
    head_logits,
    linear,
)
from kernels.number_formats import QuantisedRows
from tests.kernels.contract import Gate, OpCase, contract_device, contract_params
from tests.kernels.linear_cases import CASES


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
    assert head_logits(x, weight).shape == (0, 24)
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

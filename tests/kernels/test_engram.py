"""Engram's gather and gate: the contract and argument checks."""

from __future__ import annotations

import pytest
import torch

from kernels.engram import engram_gate, engram_gather
from tests.kernels.contract import Gate, OpCase, contract_device, contract_params
from tests.kernels.engram_cases import CASES


@pytest.mark.parametrize(("case", "gate"), contract_params(CASES))
def test_contract(case: OpCase, gate: Gate) -> None:
    gate(case, contract_device())


def test_a_wrong_argument_is_named() -> None:
    table = torch.zeros(5, 32)
    with pytest.raises(ValueError, match=r"^table: expected dtype torch.float8_e4m3fn"):
        engram_gather(
            table,
            torch.zeros(5, 1, dtype=torch.uint8),
            torch.zeros(2, 3, dtype=torch.int64),
            dtype=torch.float32,
        )
    with pytest.raises(ValueError, match=r"^table: expected device meta or page-locked host memory, got cpu"):
        engram_gather(table, None, torch.zeros(2, 3, dtype=torch.int64, device="meta"), dtype=torch.float32)
    streams, weight = torch.zeros(2, 4, 32), torch.zeros(4, 32)
    with pytest.raises(ValueError, match=r"^value: expected shape \(2, 32\), got \(3, 32\)"):
        engram_gate(streams, streams, torch.zeros(3, 32), weight, weight, eps=1e-6)

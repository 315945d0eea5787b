"""RMSNorm: the contract and its argument checks."""

from __future__ import annotations

import pytest
import torch

from kernels.rms_norm import choose_config, rms_norm
from tests.kernels.contract import Gate, OpCase, contract_device, contract_params
from tests.kernels.rms_norm_cases import CASES


@pytest.mark.parametrize(("case", "gate"), contract_params(CASES))
def test_contract(case: OpCase, gate: Gate) -> None:
    gate(case, contract_device())


def test_block_covers_the_row() -> None:
    assert choose_config(5120).block == 8192
    assert choose_config(100).block == 128


def test_a_wrong_argument_is_named() -> None:
    x = torch.zeros(3, 8)
    with pytest.raises(ValueError, match=r"^weight: expected shape \(8,\), got \(7,\)"):
        rms_norm(x, torch.zeros(7), eps=1e-6)
    with pytest.raises(ValueError, match=r"^x: expected dtype"):
        rms_norm(x.half(), torch.zeros(8), eps=1e-6)

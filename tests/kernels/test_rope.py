"""Rotation of queries: the contract, what stays untouched, argument checks."""

from __future__ import annotations

import pytest
import torch

from kernels.rope import choose_rotate_config, rotate_queries
from tests.kernels.contract import Gate, OpCase, contract_device, contract_params
from tests.kernels.rope_cases import CASES


@pytest.mark.parametrize(("case", "gate"), contract_params(CASES))
def test_contract(case: OpCase, gate: Gate) -> None:
    gate(case, contract_device())


def test_rotates_in_place_where_heads_lie_apart() -> None:
    device = contract_device()
    whole = torch.ones(2, 3, 40, device=device)
    x = whole[:, :, :32]
    out = rotate_queries(x, torch.zeros(2, 4, device=device), torch.ones(2, 4, device=device))
    assert out is x
    assert whole[1, 2].tolist() == [1.0] * 24 + [-1.0, 1.0] * 4 + [1.0] * 8


def test_tiles_cover_heads_and_pairs() -> None:
    assert choose_rotate_config(64, 32)[:2] == (32, 32)
    assert choose_rotate_config(3, 12)[:2] == (4, 16)


def test_a_wrong_argument_is_named() -> None:
    x, angles = torch.zeros(2, 3, 32), torch.zeros(2, 17)
    with pytest.raises(ValueError, match=r"^cos: expected at most 16 angles, got 17"):
        rotate_queries(x, angles, angles)
    with pytest.raises(ValueError, match=r"^sin: expected shape \(2, 4\), got \(2, 17\)"):
        rotate_queries(x, angles[:, :4].contiguous(), angles)
    empty = rotate_queries(x[:0], angles[:0, :4].contiguous(), angles[:0, :4].contiguous())
    assert empty.shape == (0, 3, 32)

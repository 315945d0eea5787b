"""Attention over cached keys: the contract, its argument checks and its tile choice."""

from __future__ import annotations

import pytest
import torch

from kernels.sparse_attention import choose_config, paged_sparse_attention
from tests.kernels.contract import Gate, OpCase, contract_device, contract_params
from tests.kernels.sparse_attention_cases import CASES, attention_inputs


@pytest.mark.parametrize(("case", "gate"), contract_params(CASES))
def test_contract(case: OpCase, gate: Gate) -> None:
    gate(case, contract_device())


def test_tiles_follow_from_the_shape_alone() -> None:
    release = choose_config(64, 512, torch.bfloat16)
    assert (release.block_heads, release.block_keys) == (64, 64)
    assert choose_config(8, 64, torch.bfloat16).block_heads == 16


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("window_rows", lambda x: x[:-1]),
        ("window_rows", lambda x: x.to(torch.float32)),
        ("ring", lambda x: x[:, :-1]),
        ("entries", lambda x: x.t().contiguous().t()),
        ("sink", lambda x: x[:3]),
        ("slots", lambda x: x.to(torch.int64)),
    ],
)
def test_a_wrong_argument_is_named(name, change) -> None:  # type: ignore[no-untyped-def]
    inputs = attention_inputs(
        0, torch.device("cpu"), num_rows=3, num_heads=4, head_dim=64, window=32, num_selected=8,
        num_slots=9, dtype=torch.float32, is_packed=True,
    )  # fmt: skip
    inputs[name] = change(inputs[name])
    with pytest.raises(ValueError, match=f"^{name}: expected"):
        paged_sparse_attention(**inputs)

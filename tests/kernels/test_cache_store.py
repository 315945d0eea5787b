"""What enters the caches: the contract, decoded values, exact codes on a grid, argument checks."""

from __future__ import annotations

import pytest
import torch

from kernels.cache_store import compress_and_store, store_index_keys, store_window_kv
from kernels.number_formats import pack_fp4_entry, pack_fp4_index, pack_fp8
from tests.kernels.cache_store_cases import CASES, EPS, store_inputs
from tests.kernels.contract import Gate, OpCase, contract_device, contract_params, equal_bytes


@pytest.mark.parametrize(("case", "gate"), contract_params(CASES))
def test_contract(case: OpCase, gate: Gate) -> None:
    gate(case, contract_device())


@pytest.mark.parametrize(
    ("dim", "dtype"),
    [(64, torch.float32), pytest.param(512, torch.bfloat16, marks=pytest.mark.gpu)],
    ids=["small", "release"],
)
def test_packed_bytes_are_the_reference_packing_of_the_plain_rows(dim: int, dtype: torch.dtype) -> None:
    i = store_inputs(9, contract_device(), 40, dim, dtype)
    norm = (i["weight"], i["cos"], i["sin"])
    is_kept = i["slots"] >= 0
    slots = i["slots"][is_kept]

    def pool(width: int, store: torch.dtype) -> torch.Tensor:
        return torch.zeros(80, width, dtype=store, device=i["rows"].device)

    plain = store_window_kv(i["rows"], *norm, eps=EPS, is_packed=False)
    packed = store_window_kv(i["rows"], *norm, eps=EPS, is_packed=True)
    assert equal_bytes(packed, pack_fp8(plain))

    keys = pool(dim // 2 + dim // 32, torch.uint8)
    store_index_keys(i["rows"], *norm, i["slots"], keys, eps=EPS)
    assert equal_bytes(keys[slots], pack_fp4_index(plain)[is_kept])

    entries, plain_entries = pool(dim // 2 + dim // 16, torch.uint8), pool(dim, dtype)
    for target in (entries, plain_entries):
        compress_and_store(
            i["keys_and_gates"],
            i["open_groups"],
            i["group_rows"],
            *norm,
            i["slots"],
            target,
            eps=EPS,
            dtype=dtype,
        )
    assert equal_bytes(entries[slots], pack_fp4_entry(plain_entries[slots]))


def test_a_wrong_argument_is_named() -> None:
    i = store_inputs(0, torch.device("cpu"), 4, 64, torch.float32)
    arguments = [i["rows"], i["weight"], i["cos"], i["sin"]]
    with pytest.raises(ValueError, match=r"^pool: expected shape"):
        store_index_keys(*arguments, i["slots"], torch.zeros(9, 35, dtype=torch.uint8), eps=EPS)
    with pytest.raises(ValueError, match=r"^open_groups: expected a tensor at ratio 2"):
        compress_and_store(
            i["keys_and_gates"], None, i["group_rows"], *arguments[1:], i["slots"], torch.zeros(9, 36, dtype=torch.uint8),
            eps=EPS, dtype=torch.float32,
        )  # fmt: skip

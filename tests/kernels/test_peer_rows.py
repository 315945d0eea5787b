"""Rows stored into other ranks' memory: every byte of all inboxes, argument checks.

Ranks are tensors of one process here; what the kernels are told are addresses in any case.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.moe import Routes
from kernels.number_formats import ActivationMode, QuantisedRows, quantise_activations_reference
from kernels.peer_rows import InboxLayout, send_rows, send_rows_reference
from tests.kernels.contract import contract_device, equal_bytes
from tests.kernels.moe_cases import uneven_ids

HIDDEN, TOP_K, NUM_OWN = 96, 3, 4


def build_rows(
    seed: int, num_rows: int, num_experts: int, mode: ActivationMode, dtype: torch.dtype
) -> tuple[QuantisedRows | Tensor, Routes]:
    """One rank's rows, and experts anywhere."""
    device = contract_device()
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(num_rows, HIDDEN, generator=g).to(device, dtype)
    ids = uneven_ids(g, num_rows, TOP_K, num_experts).to(device)
    rows = x if mode == "none" else quantise_activations_reference(x, mode=mode)
    return rows, Routes(ids, torch.rand(num_rows, TOP_K, generator=g).to(device))


def addresses(memories: list[Tensor]) -> Tensor:
    return torch.tensor([m.data_ptr() for m in memories], dtype=torch.int64, device=memories[0].device)


@pytest.mark.parametrize("mode", ["none", "row", "release"])
@pytest.mark.parametrize("counts", [(5,), (3, 0), (1, 4, 4, 0)])
@pytest.mark.parametrize("poison", [0xFF, 0xA5])
def test_rows_arrive_where_the_reference_puts_them_and_no_other_byte_is_touched(
    mode: ActivationMode, counts: tuple[int, ...], poison: int
) -> None:
    size, most = len(counts), max(counts) + 1
    sent = [build_rows(seed, n, size * NUM_OWN, mode, torch.float32) for seed, n in enumerate(counts)]
    layout = InboxLayout.of(sent[0][0], TOP_K, size=size, most=most)
    device = contract_device()

    def inboxes() -> list[Tensor]:
        num_bytes = layout.num_bytes + 64
        return [torch.full((num_bytes,), poison, dtype=torch.uint8, device=device) for _ in counts]

    got, wanted = inboxes(), inboxes()
    for rank, (rows, routes) in enumerate(sent):
        send_rows(rows, routes, addresses(got), layout, rank=rank, num_own=NUM_OWN)
        send_rows_reference(rows, routes, wanted, layout, rank=rank, num_own=NUM_OWN)
    for one, other in zip(got, wanted, strict=True):
        assert equal_bytes(one, other)


def test_ranks_without_an_expert_are_sent_its_absence_alone() -> None:
    rows, routes = build_rows(0, 6, NUM_OWN, "row", torch.float32)  # all experts are the first rank's
    layout = InboxLayout.of(rows, TOP_K, size=2, most=6)
    inboxes = [
        torch.full((layout.num_bytes,), 7, dtype=torch.uint8, device=contract_device()) for _ in range(2)
    ]
    send_rows(rows, routes, addresses(inboxes), layout, rank=1, num_own=NUM_OWN)
    assert isinstance(rows, QuantisedRows)
    arrived = layout.rows(inboxes[0], rows.values.dtype)
    assert equal_bytes(arrived[0][6:], rows.values)
    assert equal_bytes(arrived[1][6:], rows.scales)
    assert equal_bytes(layout.routes(inboxes[0]).expert_ids[6:], routes.expert_ids)
    assert bool((layout.routes(inboxes[1]).expert_ids[6:] == -1).all())
    unwritten = inboxes[1].clone()
    layout.routes(unwritten).expert_ids.view(torch.uint8).fill_(7)
    layout.routes(inboxes[1]).expert_ids[6:].view(torch.uint8).fill_(7)
    assert bool((inboxes[1] == 7).all()), "its absence alone"


def test_a_wrong_argument_is_named() -> None:
    rows, routes = build_rows(0, 4, NUM_OWN, "none", torch.float32)
    assert isinstance(rows, Tensor)
    layout = InboxLayout.of(rows, TOP_K, size=1, most=4)
    inbox = torch.zeros(layout.num_bytes, dtype=torch.uint8, device=contract_device())
    to = addresses([inbox])
    for rank in (-1, 1):
        with pytest.raises(ValueError, match=rf"^rank: expected 0 to 0, got {rank}"):
            send_rows(rows, routes, to, layout, rank=rank, num_own=NUM_OWN)
    few = InboxLayout.of(rows, TOP_K, size=1, most=3)
    with pytest.raises(ValueError, match=r"^layout: expected one of these 4 rows"):
        send_rows(rows, routes, to, few, rank=0, num_own=NUM_OWN)
    narrow = rows[:, :3].contiguous()
    narrow_layout = InboxLayout.of(narrow, TOP_K, size=1, most=4)
    with pytest.raises(ValueError, match=r"^rows: expected whole 16 bytes a row, got 12"):
        send_rows(narrow, routes, to, narrow_layout, rank=0, num_own=NUM_OWN)

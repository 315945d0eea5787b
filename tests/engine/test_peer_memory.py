"""Whole exchanges of ranks that write into each other's memory, all in one process: one rank's slots, bit by bit.

Kernels run in the interpreter where there is no GPU; real ranks on real GPUs are ``test_parallel``'s.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from engine.peer_memory import ExchangeSize, PeerMemory
from kernels.moe import Routes, expert_mlp, expert_mlp_at_homes
from kernels.number_formats import ActivationMode, QuantisedRows, quantise_activations_reference
from tests.kernels.contract import contract_device, equal_bytes
from tests.kernels.moe_cases import uneven_ids

HIDDEN, INNER, TOP_K, NUM_EXPERTS, MOST = 64, 32, 3, 8, 6


class SimulatedGroup:
    """Ranks whose memory is ordinary tensors; what each does between two waits is done in turn."""

    def __init__(self, num_ranks: int, mode: ActivationMode, dtype: torch.dtype) -> None:
        self.device = contract_device()
        self.options: dict[str, Any] = {"limit": 7.0, "mode": mode, "dtype": dtype}
        self.size = ExchangeSize(num_rows=MOST, hidden=HIDDEN, top_k=TOP_K, dtype=dtype, mode=mode)
        self.num_own, self.num_waits = NUM_EXPERTS // num_ranks, 0
        memories = [
            torch.full((self.size.num_bytes(num_ranks),), 0xFF, dtype=torch.uint8, device=self.device)
            for _ in range(num_ranks)
        ]
        self.ranks = [
            PeerMemory(memories, rank=rank, num_own=self.num_own, size=self.size, wait=self._wait)
            for rank in range(num_ranks)
        ]
        g = torch.Generator().manual_seed(5)
        self.w13 = torch.randn(NUM_EXPERTS, 2 * INNER, HIDDEN, generator=g).to(self.device, dtype)
        self.w2 = torch.randn(NUM_EXPERTS, HIDDEN, INNER, generator=g).to(self.device, dtype)

    def _wait(self) -> None:
        self.num_waits += 1

    def slots(self, rows: QuantisedRows | Tensor, routes: Routes) -> Tensor:
        """What one rank with all experts computes."""
        return expert_mlp(rows, routes, self.w13, self.w2, **self.options)

    def exchange(self, given: list[tuple[QuantisedRows | Tensor, Routes]]) -> list[Tensor]:
        most = max(len(routes.expert_ids) for _, routes in given)
        arrived = [peer.dispatch(*one, most) for peer, one in zip(self.ranks, given, strict=True)]
        # All have sent: what arrived is whole.
        for rank, (rows, here) in enumerate(arrived):
            own = slice(rank * self.num_own, (rank + 1) * self.num_own)
            homes = self.ranks[rank].homes
            expert_mlp_at_homes(rows, here, self.w13[own], self.w2[own], homes, **self.options)
        return [
            peer.collect(len(routes.expert_ids)) for peer, (_, routes) in zip(self.ranks, given, strict=True)
        ]


def build_rows(
    seed: int, num_rows: int, experts: int, mode: ActivationMode, dtype: torch.dtype
) -> tuple[QuantisedRows | Tensor, Routes]:
    """Rows whose experts are among the first so many."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(num_rows, HIDDEN, generator=g).to(contract_device(), dtype)
    routes = Routes(uneven_ids(g, num_rows, TOP_K, experts), torch.rand(num_rows, TOP_K, generator=g))
    rows = x if mode == "none" else quantise_activations_reference(x, mode=mode)
    return rows, Routes(*(part.to(x.device) for part in routes))


@pytest.mark.parametrize("mode", ["none", "row", "release"])
@pytest.mark.parametrize(
    "steps",
    [
        [(4, 1), (0, 2), (6, 6), (1, 0)],
        [(0, 3, 1, 0), (2, 0, 6, 1)],
    ],
    ids=["2 ranks", "4 ranks"],
)
def test_slots_are_those_of_one_rank_step_after_step(
    mode: ActivationMode, steps: list[tuple[int, ...]]
) -> None:
    group = SimulatedGroup(len(steps[0]), mode, torch.float32)
    for number, counts in enumerate(steps):
        # In the second step all experts are the first ranks'.
        experts = group.num_own if number == 1 and group.num_own >= TOP_K else NUM_EXPERTS
        given = [build_rows(10 * number + r, n, experts, mode, torch.float32) for r, n in enumerate(counts)]
        for found, (rows, routes) in zip(group.exchange(given), given, strict=True):
            assert found.shape == (len(routes.expert_ids), TOP_K, HIDDEN)
            if len(found):
                assert equal_bytes(found, group.slots(rows, routes))
    assert group.num_waits == 2 * len(steps) * len(steps[0])


def test_more_rows_than_there_is_memory_for_are_refused() -> None:
    group = SimulatedGroup(2, "none", torch.float32)
    rows, routes = build_rows(0, MOST + 1, NUM_EXPERTS, "none", torch.float32)
    with pytest.raises(AssertionError, match="7 rows in a step, memory for 6"):
        group.ranks[0].dispatch(rows, routes, MOST + 1)

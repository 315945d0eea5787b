"""Contract cases of outputs that are returned to the ranks of their rows, all of them in one process."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.peer_rows import return_slots, return_slots_reference
from tests.kernels.contract import EXACT, Inputs, OpCase, Outputs


def return_case(
    size: int, most: int, top_k: int, hidden: int, dtype: torch.dtype, row_counts: tuple[int, ...]
) -> OpCase:
    """``return_slots`` of one rank to ``size`` ranks, whose slots lie one behind the other.

    A row of the contract is a slot; a launch of some is one in which all others are another rank's.
    """
    num_slots = size * most * top_k

    def build(seed: int, device: torch.device) -> Inputs:
        g = torch.Generator().manual_seed(seed)
        slots = torch.randn(size * most, top_k, hidden, generator=g).to(device, dtype)
        # Every other slot, whatever the seed: both seeds write the same places.
        ids = torch.arange(num_slots).view(size * most, top_k) % 3 - 1
        return {"ids": ids.to(device).flatten(), "slots": slots}

    def homes(slots: Tensor) -> list[Tensor]:
        return [
            slots[most * top_k * home :][: most * top_k].view(most, top_k, hidden) for home in range(size)
        ]

    def run(inputs: Inputs, out: Outputs) -> None:
        there = out["slots"]
        step = most * top_k * hidden * there.element_size()
        addresses = torch.arange(size, device=there.device) * step + there.data_ptr()
        return_slots(inputs["slots"], inputs["ids"].view(-1, top_k), addresses)

    def reference(inputs: Inputs) -> Outputs:
        slots = inputs["slots"].new_zeros(num_slots, hidden)
        return_slots_reference(inputs["slots"], inputs["ids"].view(-1, top_k), homes(slots))
        return {"slots": slots[inputs["ids"] >= 0]}

    def take(inputs: Inputs, rows: Tensor) -> Inputs:
        ids = torch.full_like(inputs["ids"], -1)
        ids[rows] = inputs["ids"][rows]
        return {**inputs, "ids": ids}

    return OpCase(
        name=f"return-{size}x{most}x{top_k}x{hidden}-{str(dtype)[6:]}",
        build=build,
        row_inputs=("ids",),
        outputs=lambda i, n: {"slots": torch.empty(n, hidden, dtype=dtype, device=i["slots"].device)},
        run=run,
        reference=reference,
        tolerances={"slots": EXACT},
        written_rows=lambda i: torch.where(
            i["ids"] >= 0, torch.arange(num_slots, device=i["ids"].device), -1
        ),
        take=take,
        row_counts=row_counts,
        needs_gpu=False,
    )


CASES = [
    return_case(1, 3, 2, 8, torch.float32, (1, 3)),
    return_case(2, 5, 3, 24, torch.bfloat16, (1, 2, 7)),
    return_case(4, 2, 2, 2080, torch.float32, (1, 3)),
]

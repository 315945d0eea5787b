"""Where slots go when their rows are other ranks': memories of several devices, written by one launch.

Owns the type and its checks. Who may write to a memory, and when it may be read, is the caller's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.argument_checks import expect_tensor

ALIGNMENT = 16
"""Bytes of one access. Every address, and every row of what is stored at one, is a multiple of it."""


class SlotHomes(NamedTuple):
    """One memory a rank; rows of a launch come rank by rank, as many of each."""

    memories: tuple[Tensor, ...]  # [most or more, top_k, hidden] each, rows of whole ``ALIGNMENT``s
    addresses: Tensor  # [num_ranks] int64, on the device that writes

    @classmethod
    def of(cls, memories: Sequence[Tensor], device: torch.device) -> SlotHomes:
        """Of such memories, all of which ``device`` can write to."""
        addresses = [memory.data_ptr() for memory in memories]
        return cls(tuple(memories), torch.tensor(addresses, dtype=torch.int64, device=device))

    def expect(self, num_rows: int, top_k: int, width: int, dtype: torch.dtype, *, like: Tensor) -> None:
        """Refuse homes that do not fit a launch of so many rows. Raises ``ValueError``."""
        size = len(self.memories)
        expect_tensor("homes.addresses", self.addresses, (size,), (torch.int64,), like=like)
        if num_rows % size:
            raise ValueError(f"homes: expected as many rows of each of {size} ranks, got {num_rows}")
        for memory in self.memories:
            expect_tensor("homes.memories", memory, (None, top_k, width), (dtype,))
            if len(memory) < num_rows // size:
                raise ValueError(f"homes: expected memory for {num_rows // size} rows, got {len(memory)}")
        if width * dtype.itemsize % ALIGNMENT:
            raise ValueError(f"homes: expected whole {ALIGNMENT} bytes a slot, got {width} of {dtype}")

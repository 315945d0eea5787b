"""Rows of a layer exchanged through memory that the ranks of one node write for each other.

Owns a rank's buffers, who may reach whose, and the order of writes and reads. It knows neither what ranks
agree on before a step, nor layers.

A layer waits twice for all ranks, on the device. (1) Rows are in every inbox: experts may read. (2) Outputs,
which experts store at their rows' homes, are in every home's slots: they may be summed. That suffices, as all
of a rank's work on them is on one stream, in order. An inbox is written again by the next layer's rows, sent
by a rank that passed (2); all ranks came to (2) after their experts had read their inbox. Slots are written
again by the next layer's experts, on a rank that passed (1) of that layer; all ranks came to it after their
sum over this layer's slots.

A rank that dies or stands still leaves the others waiting on their devices. Such a wait fails after the time
that the group has for any answer, and the group tells that from a failure of the device's own. Whoever owns
the processes must not rely on it: in whole jobs on H200s some had not failed twice as long after they began.
"""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _symmetric_memory as symmetric_memory

from engine.config import padded
from engine.models.deepseek_v41_config import DeepseekV41Config
from kernels.moe import ALIGNMENT, Routes, SlotHomes
from kernels.number_formats import SCALE_BLOCK, ActivationMode, QuantisedRows
from kernels.peer_rows import InboxLayout, send_rows

KEY_BYTES = 32
NO_KEY = bytes(KEY_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeSize:
    """The most that one rank gives to a layer's experts in a step, and what a row is made of."""

    num_rows: int
    hidden: int
    top_k: int
    dtype: torch.dtype
    mode: ActivationMode

    @classmethod
    def of(
        cls, config: DeepseekV41Config, max_num_rows: int, *, dtype: torch.dtype, mode: ActivationMode
    ) -> ExchangeSize:
        """For a model's layers, of steps that have so many rows at most, and their padding."""
        return cls(
            num_rows=padded(max_num_rows),
            hidden=config.hidden_size,
            top_k=config.num_experts_per_tok,
            dtype=dtype,
            mode=mode,
        )

    def inbox_bytes(self, num_ranks: int) -> int:
        """Of the rows that so many ranks send."""
        is_rounded = self.mode != "none"
        layout = InboxLayout(
            size=num_ranks,
            most=self.num_rows,
            value_bytes=self.hidden * (1 if is_rounded else self.dtype.itemsize),
            top_k=self.top_k,
            num_scales=self.hidden // SCALE_BLOCK if is_rounded else 0,
        )
        return -(-layout.num_bytes // 256) * 256

    def num_bytes(self, num_ranks: int) -> int:
        """Of an inbox and of the slots of own rows behind it."""
        return self.inbox_bytes(num_ranks) + self.num_rows * self.top_k * self.hidden * self.dtype.itemsize


class PeerMemory:
    """One rank's inbox and slots, and its ways to everyone's.

    ``memories`` are all ranks' in this process, bytes of ``size.num_bytes`` each. ``wait`` has the device
    wait until every rank's device got there.
    """

    def __init__(
        self,
        memories: Sequence[Tensor],
        *,
        rank: int,
        num_own: int,
        size: ExchangeSize,
        wait: Callable[[], None],
    ) -> None:
        self._rank, self._num_own, self._size, self._wait = rank, num_own, size, wait
        self._num_ranks = len(memories)
        for memory in memories:
            assert memory.numel() == size.num_bytes(self._num_ranks), "memory of another size"
            assert memory.data_ptr() % ALIGNMENT == 0, "memory that is not aligned"
        inbox_bytes = size.inbox_bytes(self._num_ranks)
        slots = [
            memory[inbox_bytes:].view(size.dtype).view(size.num_rows, size.top_k, size.hidden)
            for memory in memories
        ]
        device = memories[rank].device
        self._inbox, self._slots = memories[rank][:inbox_bytes], slots[rank]
        addresses = [memory.data_ptr() for memory in memories]
        self._inboxes = torch.tensor(addresses, dtype=torch.int64, device=device)
        self.homes = SlotHomes.of(slots, device)

    @property
    def num_bytes(self) -> int:
        """What it holds of this rank's device."""
        return self._size.num_bytes(self._num_ranks)

    def dispatch(
        self, rows: QuantisedRows | Tensor, routes: Routes, most: int
    ) -> tuple[QuantisedRows | Tensor, Routes]:
        """All ranks' rows, ``most`` of each, where they were written: valid until ``collect`` has returned.

        This rank's experts are numbered from 0; all others are -1, and a row with none of them is anything.
        """
        assert most <= self._size.num_rows, f"{most} rows in a step, memory for {self._size.num_rows}"
        rows = rows.contiguous() if isinstance(rows, Tensor) else rows
        routes = Routes(*(part.contiguous() for part in routes))
        layout = InboxLayout.of(rows, routes.expert_ids.shape[1], size=self._num_ranks, most=most)
        assert layout.num_bytes <= self._inbox.numel(), "rows are wider than was agreed on"
        send_rows(rows, routes, self._inboxes, layout, rank=self._rank, num_own=self._num_own)
        self._wait()
        dtype = rows.values.dtype if isinstance(rows, QuantisedRows) else rows.dtype
        return layout.rows(self._inbox, dtype), layout.routes(self._inbox)

    def collect(self, num_rows: int) -> Tensor:
        """All experts' outputs of own rows, [num_rows, top_k, hidden], once all ranks' are in ``homes``.

        The result is valid until the next layer's experts run.
        """
        self._wait()
        return self._slots[:num_rows]


def device_key(index: int) -> bytes:
    """What tells a GPU of this node, as this container sees it, apart from any other anywhere."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8")
    uuid = torch.cuda.get_device_properties(index).uuid
    return hashlib.blake2b(f"{socket.gethostname()} {boot} {uuid}".encode(), digest_size=KEY_BYTES).digest()


def can_reach(device: torch.device, others: Sequence[bytes]) -> bool:
    """Whether this rank's GPU can write to those that have these keys."""
    visible = {device_key(index): index for index in range(torch.cuda.device_count())}
    return all(
        key in visible
        and visible[key] != device.index
        and torch.cuda.can_device_access_peer(device, visible[key])
        for key in others
    )


def open_peer_memory(
    device: torch.device, *, rank: int, num_ranks: int, num_own: int, size: ExchangeSize, timeout_s: float
) -> PeerMemory:
    """Allocate this rank's memory and map the others', together with all ranks of the default group.

    Raises ``RuntimeError`` where that cannot be done.
    """
    # Nothing here is sent to all ranks at once by the switch, and its set-up is not sound on every machine.
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    memory = symmetric_memory.empty(size.num_bytes(num_ranks), dtype=torch.uint8, device=device)
    group = dist.group.WORLD
    assert group is not None, "the ranks have not met"
    handle = symmetric_memory.rendezvous(memory, group)
    # Every rank's memory lies as far into its allocation as this one's.
    start = memory.data_ptr() - handle.buffer_ptrs[rank]
    # An allocation lives as long as the tensor that it was made for: the own one is kept, not a view of it.
    memories = [
        memory if other == rank else handle.get_buffer(other, memory.shape, memory.dtype, start)
        for other in range(num_ranks)
    ]
    found = [memory.data_ptr() for memory in memories]
    assert found == [address + start for address in handle.buffer_ptrs], "views of other places"

    def wait() -> None:
        handle.barrier(channel=0, timeout_ms=int(1e3 * timeout_s))

    return PeerMemory(memories, rank=rank, num_own=num_own, size=size, wait=wait)

"""The expert-parallel group: ranks that hold a part of the experts each, and rows of their own.

Owns the rendezvous, what ranks agree on before each step, and the exchange of a layer's rows. It knows
neither layers nor sequences, nor who starts ranks and ends them.

What ranks agree on, and rows where they have no memory in common, travel by one primitive, an all-to-all of
equal blocks whose sizes the host knows: nothing waits for the device, and over gloo every rank sees at once
that another one has died. GPUs of one node write rows into each other's memory instead (``peer_memory``).
Which of the two it is, the ranks agree on once, when they meet.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from engine.config import ExchangePath, ReplicaPlace
from engine.errors import ConfigError, PeerLost
from engine.peer_memory import (
    KEY_BYTES,
    NO_KEY,
    ExchangeSize,
    PeerMemory,
    can_reach,
    device_key,
    open_peer_memory,
)
from kernels.moe import Routes, SlotHomes
from kernels.number_formats import QuantisedRows

logger = logging.getLogger(__name__)

_WHOLE_WAIT = 0.99  # of its length: a device counts time by a clock of its own


def host_rendezvous(host: str) -> TCPStore:
    """Where one group's ranks will find each other, on a free port. It lives as long as what is returned."""
    # Bound here, because a store that binds by itself listens on every address of the machine.
    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


class ExpertGroup:
    """One rank's view of its group. ``connect`` comes after loading, before the first step."""

    def __init__(
        self,
        place: ReplicaPlace,
        *,
        num_experts: int,
        num_layers: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if num_experts % place.num_ranks:
            raise ConfigError(f"{num_experts} experts cannot be split evenly among {place.num_ranks} ranks")
        self.place = place
        self.size = place.num_ranks
        self.num_own = num_experts // place.num_ranks
        self.own_experts = range(place.rank * self.num_own, (place.rank + 1) * self.num_own)
        self.peers: PeerMemory | None = None
        self.wants_stop = False
        self.is_over = False
        self.is_busy = False
        self._clock = clock
        self._agreed_at = math.inf
        self._num_steps = 0
        self._most_rows = (0,) * num_layers

    @property
    def path(self) -> ExchangePath:
        """How rows travel, once the ranks have met."""
        return "all_to_all" if self.peers is None else "peer_memory"

    def connect(self, device: torch.device, settings: str, size: ExchangeSize | None = None) -> None:
        """Wait for all ranks and meet them: in each other's memory where they have kernels and can reach it.

        ``size`` is what to prepare for; None where no kernel writes to a peer. Raises ``PeerLost`` if a rank
        does not come, ``ConfigError`` if ``settings`` differ.
        """
        place = self.place
        try:
            store = TCPStore(place.host, place.port, timeout=timedelta(seconds=place.timeout_s))
            store.set(f"ready-{place.rank}", "")
            # Ranks load at different speeds: this wait is longer than any later one.
            ready = [f"ready-{rank}" for rank in range(self.size)]
            store.wait(ready, timedelta(seconds=place.start_timeout_s))
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if device.type == "cuda" else "cpu:gloo",
                store=store,
                rank=place.rank,
                world_size=self.size,
                timeout=timedelta(seconds=place.timeout_s),
            )
            digest = hashlib.blake2b(settings.encode(), digest_size=KEY_BYTES).digest()
            if any(other != digest for other in self._tell_all(digest)):
                raise ConfigError("the ranks of a replica must have the same model and engine settings")
            self.peers = self._meet_in_memory(device, size)
            if self.peers is None:
                # NCCL takes its memory at the first exchange: before what is left is counted.
                self.swap(torch.zeros(self.size, 1, dtype=torch.uint8, device=device))
        except RuntimeError as error:
            raise PeerLost(f"the ranks of the replica did not find each other: {error}") from error

    def _meet_in_memory(self, device: torch.device, size: ExchangeSize | None) -> PeerMemory | None:
        """The one choice between the ways that rows can take: None unless all ranks can do without NCCL."""
        is_able = device.type == "cuda" and size is not None
        keys = self._tell_all(device_key(device.index) if is_able else NO_KEY)
        others = [key for rank, key in enumerate(keys) if rank != self.place.rank]
        found: PeerMemory | None = None
        if self._do_all(is_able and can_reach(device, others)):
            assert size is not None
            try:
                found = open_peer_memory(
                    device,
                    rank=self.place.rank,
                    num_ranks=self.size,
                    num_own=self.num_own,
                    size=size,
                    timeout_s=self.place.timeout_s,
                )
            except RuntimeError as error:
                logger.warning("no memory in common with the other ranks, rows go over NCCL: %s", error)
            if not self._do_all(found is not None):
                found = None
        return found

    def _tell_all(self, told: bytes) -> list[bytes]:
        """What each rank tells; all tell as many bytes."""
        mine = torch.frombuffer(bytearray(told), dtype=torch.uint8)
        return [bytes(other.tolist()) for other in self.swap(mine.repeat(self.size, 1))]

    def _do_all(self, does_own: bool) -> bool:
        """Whether every rank says yes."""
        return all(answer == b"\x01" for answer in self._tell_all(bytes([does_own])))

    def disconnect(self) -> None:
        """Leave; other ranks that still step will fail."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def abandon(self) -> None:
        """Leave after a failure: what is under way ends, and nothing is waited for."""
        if dist.is_initialized():
            with contextlib.suppress(RuntimeError):  # the failure before it is what is told
                dist.distributed_c10d._get_default_group().abort()
                dist.destroy_process_group()

    def agree(self, rows: Sequence[int], *, has_work: bool) -> None:
        """Begin a step together: how many rows each layer's experts will be given here.

        Sets ``is_busy`` when any rank has work, ``is_over`` when all want to stop and none has.
        """
        self._num_steps += 1
        mine = torch.tensor([self._num_steps, has_work, self.wants_stop, *rows], dtype=torch.int64)
        everyone = self.swap(mine.repeat(self.size, 1))
        steps, works, stops = (everyone[:, column] for column in range(3))
        if bool((steps != self._num_steps).any()):
            raise RuntimeError(f"ranks are at different steps: {steps.tolist()}")
        self.is_busy = bool(works.any())
        self.is_over = bool(stops.all()) and not self.is_busy
        self._most_rows = tuple(everyone[:, 3:].amax(0).tolist())
        self._agreed_at = self._clock()

    @property
    def has_waited_in_vain(self) -> bool:
        """Whether a device that fails now did so because another rank did not come to where it waited.

        Such a wait begins after the ranks have agreed on the step, and fails like anything else that a device
        is asked for. What goes wrong on this rank's own device does so sooner, but for a step that takes as
        long as a rank is waited for.
        """
        waited_s = self._clock() - self._agreed_at
        return self.peers is not None and waited_s >= _WHOLE_WAIT * self.place.timeout_s

    def most_rows(self, layer: int) -> int:
        """Rows of the rank that gives most to this layer's experts in this step."""
        return self._most_rows[layer]

    def swap(self, blocks: Tensor) -> Tensor:
        """Block r goes to rank r: [size, ...] -> [size, ...], block r from rank r. Raises ``PeerLost``."""
        received = torch.empty_like(blocks)
        try:
            dist.all_to_all_single(received, blocks)
        except RuntimeError as error:
            if blocks.device.type != "cpu":
                raise  # it may tell of what this device was asked before
            raise PeerLost(f"another rank of the replica is gone: {error}") from error
        return received


class ExpertExchange:
    """One layer's rows on their way to the ranks of their experts, and back.

    A buffer has a place for each row and slot of the fullest rank. Every rank is sent all rows, because with
    a handful of slots a row has an expert on most ranks anyway; every slot's output comes back to the place
    of its (row, slot), from the one rank that has the expert. What other ranks send for it is never read.
    Between ranks that write into each other's memory only what is read travels, and outputs do while experts
    are still at work.
    """

    def __init__(self, group: ExpertGroup, layer: int) -> None:
        self._group = group
        self._layer = layer

    @property
    def has_rows(self) -> bool:
        """Whether any rank has rows here in this step."""
        return self._group.most_rows(self._layer) > 0

    def dispatch(self, rows: QuantisedRows | Tensor, routes: Routes) -> tuple[QuantisedRows | Tensor, Routes]:
        """All ranks' rows, rank by rank, with this rank's experts numbered from 0 and all others -1."""
        if self._group.peers is not None:
            return self._group.peers.dispatch(rows, routes, self._group.most_rows(self._layer))
        is_quantised = isinstance(rows, QuantisedRows)
        values, scales = rows if isinstance(rows, QuantisedRows) else (rows, None)
        # The widest items first, so that each part's bytes lie on a boundary of its own.
        parts = [values, *routes] + ([scales] if scales is not None else [])
        sent = [part.contiguous().view(torch.uint8) for part in parts]
        widths = [part.shape[1] for part in sent]
        num_rows, most = len(values), self._group.most_rows(self._layer)
        block = torch.zeros(most, sum(widths), dtype=torch.uint8, device=values.device)
        block[num_rows:, widths[0] : widths[0] + widths[1]] = 255  # expert -1
        block[:num_rows] = torch.cat(sent, dim=1)
        received = self._group.swap(block.repeat(self._group.size, 1, 1)).flatten(0, 1)
        found = [
            part.contiguous().view(like.dtype)
            for part, like in zip(torch.split(received, widths, dim=1), parts, strict=True)
        ]
        own = self._group.own_experts
        is_own = (found[1] >= own.start) & (found[1] < own.stop)
        here = Routes(torch.where(is_own, found[1] - own.start, -1), found[2])
        return (QuantisedRows(found[0], found[3]) if is_quantised else found[0]), here

    @property
    def homes(self) -> SlotHomes | None:
        """Where experts store their outputs; None where ``combine`` is to be given them."""
        return None if self._group.peers is None else self._group.peers.homes

    def collect(self, num_rows: int) -> Tensor:
        """All experts' outputs of own rows, stored at ``homes``: [num_rows, top_k, hidden]."""
        assert self._group.peers is not None, "these ranks have no memory in common"
        return self._group.peers.collect(num_rows)

    def combine(self, slots: Tensor, routes: Routes) -> Tensor:
        """Own experts' outputs for all rows to all experts' for own rows: [num_rows, top_k, hidden].

        ``slots`` are [size * most, top_k, hidden], ``routes`` the own rows' as before ``dispatch``.
        """
        group = self._group
        num_rows, top_k = routes.expert_ids.shape
        blocks = slots.view(torch.uint8).view(group.size, -1)
        found = group.swap(blocks).view(slots.dtype).view(group.size, -1, top_k, slots.shape[-1])
        row = torch.arange(num_rows, device=slots.device)[:, None]
        slot = torch.arange(top_k, device=slots.device)
        return found[routes.expert_ids // group.num_own, row, slot]

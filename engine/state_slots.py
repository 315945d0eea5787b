"""StateSlots: who owns which state slot (window rings and open groups), on the device and in host memory.

Host slots hold preempted sequences' states and snapshots at prefix ends; a snapshot without a reader
gives way, least recently used first. What a slot contains is the device's business.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from engine.prefix_cache import PrefixNode
from engine.sequence import Sequence


class StateSlots:
    """Two pools of slot numbers. Pending host slots are targets of a snapshot not taken yet."""

    def __init__(self, num_device: int, num_host: int) -> None:
        self.num_device = num_device
        self.num_host = num_host
        self._device_free = list(reversed(range(num_device)))
        self._host_free = list(reversed(range(num_host)))
        self._snapshots: OrderedDict[PrefixNode, None] = OrderedDict()

    @property
    def num_snapshots(self) -> int:
        """Snapshots kept now."""
        return len(self._snapshots)

    def take_device(self) -> int:
        """A free device slot; the caller has made sure there is one."""
        return self._device_free.pop()

    def free_device(self, slot: int) -> None:
        """Give a device slot back."""
        self._device_free.append(slot)

    def try_take_host(self) -> int | None:
        """A free host slot, if need be the least recently used snapshot's."""
        if not self._host_free and self._snapshots:
            self.drop_snapshot(next(iter(self._snapshots)))
        return self._host_free.pop() if self._host_free else None

    def free_host(self, slot: int) -> None:
        """Give a host slot back."""
        self._host_free.append(slot)

    def keep_snapshot(self, node: PrefixNode, slot: int) -> None:
        """``slot`` now holds the state at ``node``'s end; a node that has one already keeps the older."""
        if node.snapshot is None:
            node.snapshot = slot
        else:
            self.free_host(slot)
        self._snapshots[node] = None
        self._snapshots.move_to_end(node)

    def read_snapshot(self, node: PrefixNode) -> int:
        """The slot of ``node``'s snapshot, which becomes the most recently used."""
        assert node.snapshot is not None, "there is no snapshot here"
        self._snapshots.move_to_end(node)
        return node.snapshot

    def drop_snapshot(self, node: PrefixNode) -> None:
        """Forget ``node``'s snapshot, if it has one."""
        if node.snapshot is not None:
            del self._snapshots[node]
            self.free_host(node.snapshot)
            node.snapshot = None

    def check_integrity(self, sequences: Iterable[Sequence], pending: Iterable[int]) -> None:
        """Every slot is free or owned exactly once."""
        owners = list(sequences)
        device = self._device_free + [seq.state_slot for seq in owners if seq.state_slot is not None]
        assert sorted(device) == list(range(self.num_device)), "device state slots are lost or shared"
        host = self._host_free + [seq.host_state for seq in owners if seq.host_state is not None]
        host += [node.snapshot for node in self._snapshots if node.snapshot is not None]
        assert sorted([*host, *pending]) == list(range(self.num_host)), "host state slots are lost or shared"

"""Which ranks make one replica, and which of them is to blame when it ends.

Owns that judgement. It must not know rows, leases or processes, nor what follows from blame.

Ranks of a replica step together, so one's death ends the step on all: most of those that report a death
only lost another rank. Whoever dies without saying so, or says nothing at all, is the one that they lost.
"""

from __future__ import annotations

_PATIENCE_S = 10.0  # ranks see at once that another one is gone; its own end is known a moment later


class Replicas:
    """Slots 0 to ``size`` - 1 are a replica, and so on. One rank alone is a replica too."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._bereft: dict[int, float] = {}

    def slots_of(self, slot: int) -> range:
        """All slots of this one's replica."""
        first = slot // self._size * self._size
        return range(first, first + self._size)

    def note_lost_peer(self, slot: int, now_s: float) -> None:
        """The rank of a slot is dead because it lost another rank, it says."""
        self._bereft.setdefault(slot, now_s)

    def has_lost_peer(self, slot: int) -> bool:
        """Whether the rank of a slot is dead for that reason: it moves no more, and does not hang."""
        return slot in self._bereft

    def silent_slots(self, slot: int, now_s: float) -> list[int] | None:
        """Those that the bereft ranks of a replica lost; None when there are none, or one may yet say more.

        None of them is silent when the ranks only lost sight of each other.
        """
        slots = self.slots_of(slot)
        since = [self._bereft[mate] for mate in slots if mate in self._bereft]
        if not since or (len(since) < len(slots) and now_s - min(since) <= _PATIENCE_S):
            return None
        return [mate for mate in slots if mate not in self._bereft]

    def forget(self, slot: int) -> None:
        """The replica of a slot has ended."""
        for mate in self.slots_of(slot):
            self._bereft.pop(mate, None)

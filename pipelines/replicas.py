"""Which ranks make one replica, which of them is to blame when it ends, and when it is given up.

Owns those judgements. It must not know rows, leases or processes, nor what follows from blame.

Ranks of a replica step together, so one's death ends the step on all: most of those that report a death
only lost another rank. Whoever dies without saying so, or says nothing at all, is the one that they lost.
"""

from __future__ import annotations

from collections import Counter

MAX_BARREN_DEATHS = 3
"""A replica that died so often in a row without finishing a row is given up."""

MAX_DEATHS_OF_SUSPECTS = 8
"""The same of deaths with suspects, where a row may be to blame."""

_PATIENCE_S = 10.0  # ranks see at once that another one is gone; its own end is known a moment later


class Replicas:
    """Slots 0 to ``size`` - 1 are a replica, and so on. One rank alone is a replica too."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._bereft: dict[int, float] = {}
        self._num_barren_deaths: Counter[int] = Counter()
        self._num_deaths_of_suspects: Counter[int] = Counter()

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

    def end(self, slot: int, *, is_barren: bool, had_suspects: bool) -> bool:
        """The replica of a slot has ended; whether that was once too often in a row, and it is given up.

        ``is_barren``: it finished no row, and no row explains that. ``had_suspects``: it held suspects.
        """
        mates = self.slots_of(slot)
        for mate in mates:
            self._bereft.pop(mate, None)
        first = mates.start
        if not is_barren:
            del self._num_barren_deaths[first], self._num_deaths_of_suspects[first]
        elif had_suspects:
            self._num_deaths_of_suspects[first] += 1
        else:
            self._num_barren_deaths[first] += 1
        return (
            self._num_barren_deaths[first] >= MAX_BARREN_DEATHS
            or self._num_deaths_of_suspects[first] >= MAX_DEATHS_OF_SUSPECTS
        )

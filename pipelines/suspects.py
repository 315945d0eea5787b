"""Rows that were in flight when a rank died, and how they are tried again: apart from all others.

Owns at how many deaths each row was there, who saw them, and which go together. It must not know shards
but by number, nor leases, files or time.

Most deaths have nothing to do with a row, so a first death's rows are tried again together, as many as a
rank runs at once. Those of a second death go in small groups, those of a third one by one: then a death
has one culprit. Whatever happens costs no row that was never there.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping

Place = tuple[int, int]
"""A shard's number and a row in it."""

_DEATHS_TO_SPLIT = 2
_DEATHS_TO_BE_ALONE = 3


class Suspects:
    """``deaths`` says at how many deaths of ranks a row was there in earlier runs."""

    def __init__(self, deaths: Mapping[Place, int] | None = None) -> None:
        self._num_deaths: dict[Place, int] = dict(deaths or {})
        # Which slots saw it; those of earlier runs were other processes.
        self._slots: dict[Place, set[int]] = {}
        self._waiting: dict[Place, None] = {}

    def __contains__(self, place: Place) -> bool:
        """Whether the row was there at any death."""
        return place in self._num_deaths

    def note_death(self, place: Place, slot: int) -> int:
        """The row was in flight when the rank of ``slot`` died; at how many deaths it was there now."""
        self._slots.setdefault(place, set()).add(slot)
        self._num_deaths[place] = self._num_deaths.get(place, 0) + 1
        return self._num_deaths[place]

    def put(self, places: Iterable[Place]) -> None:
        """Rows that wait to be tried again."""
        self._waiting.update(dict.fromkeys(places))

    def waiting_rows(self, shard_index: int) -> list[int]:
        """The rows of a shard that wait."""
        return [row for index, row in self._waiting if index == shard_index]

    def next_group(self, slot: int, slots: Collection[int], capacity: int) -> tuple[tuple[Place, ...], bool]:
        """Rows for the rank of ``slot``, which runs ``capacity`` at once, and whether one at a time.

        Those that were there at most deaths come first, being the slowest. A row that saw two is
        tried on a slot that it has not seen die, if there is one of ``slots``: it may be the slot's fault.
        """
        able = [place for place in self._waiting if self._may_try(place, slot, slots)]
        most = max((self._num_deaths[place] for place in able), default=0)
        size = capacity if most < _DEATHS_TO_SPLIT else math.isqrt(capacity - 1) + 1
        group = [place for place in able if self._num_deaths[place] == most][:size]
        return tuple(group), most >= _DEATHS_TO_BE_ALONE

    def take(self, places: Iterable[Place]) -> None:
        """The rows of a group are being tried now."""
        for place in places:
            del self._waiting[place]

    def forget(self, shard_index: int) -> None:
        """The shard is published."""
        for place in [place for place in self._num_deaths if place[0] == shard_index]:
            del self._num_deaths[place]
            self._slots.pop(place, None)

    def _may_try(self, place: Place, slot: int, slots: Collection[int]) -> bool:
        if self._num_deaths[place] < _DEATHS_TO_SPLIT:
            return True
        seen = self._slots.get(place, set())
        return slot not in seen or not set(slots) - {slot} - seen

"""Rows that were in flight when a rank died: who is to blame, and how the others are tried again.

Owns at which deaths each row was there, how far it was, who saw it, and which go together. It must not know
shards but by number, nor leases, files or time.

A row's tokens depend on that row alone, so one that kills its rank kills the next one at the same token.
What is noted of a death is therefore how many tokens each row had that was in the rank's last step. All of
them are tried again at once, beside other rows, but whenever one is that far again the step is its alone
(``jobs.rows_in_flight``), while the others wait. If the rank dies in that step, this row killed both and is
quarantined, and of no other is anything noted. Any other death had another cause, or a row did it for the
first time: it is noted like the first. Most deaths are nobody's fault, and their rows just finish.

The wrong row is blamed only if something that is no row, like a lost machine, ends the rank in the very step
that a suspect has to itself. So that a broken device is not taken for a row, suspects go to a slot that they
have not seen die, if there is one.

A row may also kill at another token each time, like one that a machine runs out of memory with. So those of a
second death that nothing explains go on in small groups, those of a third one by one with nothing else in
flight: who is alone at another death is to blame.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence

Place = tuple[int, int]
"""A shard's number and a row in it."""

NO_STEP_YET = -1
"""Instead of a number of tokens: a row that was being read and rendered, and no step's business."""

_DEATHS_TO_SPLIT = 2
_DEATHS_TO_BE_ALONE = 3


class Suspects:
    """``deaths``: how many tokens a row had at each death of a rank in earlier runs; None: nobody knows."""

    def __init__(self, deaths: Mapping[Place, Sequence[int | None]] | None = None) -> None:
        self._deaths: dict[Place, list[int | None]] = {place: list(d) for place, d in (deaths or {}).items()}
        # Which slots saw it; those of earlier runs were other processes.
        self._slots: dict[Place, set[int]] = {}
        self._waiting: dict[Place, None] = {}

    def __contains__(self, place: Place) -> bool:
        """Whether the row was there at any death."""
        return place in self._deaths

    def tokens_at_deaths(self, place: Place) -> frozenset[int]:
        """How many tokens the row had when ranks died, as far as is known."""
        return frozenset(tokens for tokens in self._deaths[place] if tokens is not None)

    def find_culprit(self, in_flight: Mapping[Place, int | None]) -> Place | None:
        """A rank died with these rows, which had so many tokens: which of them did it, if one must have."""
        again = [
            place
            for place, tokens in in_flight.items()
            if tokens is not None and tokens in self._deaths.get(place, ())
        ]
        # Rows are read and rendered side by side: whoever of them ended the rank need not be one seen before.
        if sum(tokens == NO_STEP_YET for tokens in in_flight.values()) > 1:
            again = [place for place in again if in_flight[place] != NO_STEP_YET]
        if len(again) == 1:
            return again[0]
        if len(in_flight) != 1:
            return None
        (alone,) = in_flight
        return alone if len(self._deaths.get(alone, ())) >= _DEATHS_TO_BE_ALONE else None

    def note_death(self, in_flight: Mapping[Place, int | None], slot: int) -> None:
        """The rank of ``slot`` died with these rows, and none of them must have done it."""
        for place, tokens in in_flight.items():
            self._slots.setdefault(place, set()).add(slot)
            self._deaths.setdefault(place, []).append(tokens)

    def put(self, places: Iterable[Place]) -> None:
        """Rows that wait to be tried again."""
        self._waiting.update(dict.fromkeys(places))

    def waiting_rows(self, shard_index: int) -> list[int]:
        """The rows of a shard that wait."""
        return [row for index, row in self._waiting if index == shard_index]

    def next_group(
        self, slot: int, slots: Collection[int], capacity: int, *, is_solo: bool
    ) -> tuple[Place, ...]:
        """Rows for the rank of ``slot``, which runs ``capacity`` at once: those that run alone, or others.

        Those that were there at most deaths come first, being the slowest. ``slots`` are all that live.
        """
        able = [
            place
            for place in self._waiting
            if (len(self._deaths[place]) >= _DEATHS_TO_BE_ALONE) is is_solo
            and self._may_try(place, slot, slots)
        ]
        most = max((len(self._deaths[place]) for place in able), default=0)
        size = capacity if most < _DEATHS_TO_SPLIT else math.isqrt(capacity - 1) + 1
        return tuple([place for place in able if len(self._deaths[place]) == most][:size])

    def take(self, places: Iterable[Place]) -> None:
        """The rows of a group are being tried now."""
        for place in places:
            del self._waiting[place]

    def forget(self, shard_index: int) -> None:
        """The shard is published."""
        for place in [place for place in self._deaths if place[0] == shard_index]:
            del self._deaths[place]
            self._slots.pop(place, None)

    def _may_try(self, place: Place, slot: int, slots: Collection[int]) -> bool:
        seen = self._slots.get(place, set())
        return slot not in seen or not set(slots) - {slot} - seen

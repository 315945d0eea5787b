"""How many rows a rank is given, and of which kind: a full batch always, and near the end a fair share.

Owns that choice and the speeds that it is weighed by. It must not know ranks but by number and capacity,
nor how leases are kept.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Mapping

from pipelines.ledger import Ledger
from pipelines.rank_protocol import Lease

_HALF_LIFE_S = 300.0
_MIN_MEASURED_S = 30.0
_NOISE = 0.75
_LEAST_WEIGHT = 0.05


def choose_leases(
    ledger: Ledger,
    slot: int,
    capacities: Mapping[int, int],
    starting: Collection[int] = (),
    weights: Mapping[int, float] | None = None,
) -> tuple[Lease, ...]:
    """What the rank of ``slot`` is to be given now. ``capacities``: rows at once of every rank that is ready.

    A rank holds its batch and another behind it: rows of one length end all at once, and the next batch must
    be there then, before the driver hears of it. Towards the end that would leave rows waiting on one rank
    while others idle, so a rank is given nothing beyond its part of all the work that is left, counted in
    tokens: the last rows go out in ever smaller leases.
    ``starting`` are the ranks that will be ready later. ``weights``: what part of a full share each rank is
    worth, less than 1 for a slow one, which holds the less behind its batch; None: 1 for all.
    """
    capacity = capacities[slot]
    outstanding = ledger.num_outstanding(slot)
    slots = {*capacities, *starting}
    if _is_for_solo_suspects(ledger, slot, slots, starting):
        # They run with nothing else, so the rank takes no other row until it is empty.
        return ledger.try_lease_suspects(slot, slots, capacity, is_solo=True) if outstanding == 0 else ()
    held = ledger.leases_of(slot)
    if any(lease.is_solo for lease in held):
        return ()
    leases: list[Lease] = []
    if outstanding <= _low(capacity) and not any(lease.is_of_suspects for lease in held):
        # Other rows run beside these, and a rank has one group of them at a time: they should part.
        leases += ledger.try_lease_suspects(slot, slots, capacity)
        outstanding += sum(lease.num_rows for lease in leases)
    own = {other: ledger.num_outstanding_tokens(other) for other in capacities}
    num_left = ledger.num_unleased_tokens + sum(own.values())
    weight = 1.0 if weights is None else weights[slot]
    # Those that start later have a part too: what the first took beyond its own would not come back.
    num_late = len(slots) - len(capacities)
    part = weight / (num_late + sum(1.0 if weights is None else weights[other] for other in capacities))
    most = capacity + math.ceil(capacity * weight)
    while outstanding <= most and (next_tokens := ledger.peek_tokens()) is not None:
        room = num_left * part - own[slot]
        is_emptiest = slot == _emptiest(ledger, own, capacities) and not (num_late and outstanding)
        if next_tokens > room and not is_emptiest:
            break
        share = ledger.num_unleased_tokens * part / 2
        num_rows = min(most + math.ceil(capacity / 2) + 1 - outstanding, capacity)
        lease = ledger.try_lease(slot, num_rows, min(share, room))
        assert lease is not None, "there was a row to look at"
        leases.append(lease)
        outstanding += lease.num_rows
        own[slot] = ledger.num_outstanding_tokens(slot)
    return tuple(leases)


class RankSpeeds:
    """How fast each rank is while it has as many rows as it can run: what its leases are weighed by.

    Old measurements fade, so that a node may become slow, and recover.
    """

    def __init__(self) -> None:
        self._seen: dict[int, tuple[int, float]] = {}
        self._done: dict[int, tuple[float, float]] = {}

    def begin(self, slot: int) -> None:
        """Another rank is in this slot, maybe on another node."""
        self._seen.pop(slot, None)
        self._done.pop(slot, None)

    def take(self, slot: int, num_tokens: int, now_s: float, *, is_full: bool) -> None:
        """The rank of ``slot`` has answered rows of ``num_tokens`` in all; whether its batch was full."""
        before = self._seen.get(slot)
        self._seen[slot] = (num_tokens, now_s)
        if before is None or not is_full:
            return
        seconds = now_s - before[1]
        kept = 0.5 ** (seconds / _HALF_LIFE_S)
        done, lasted = self._done.get(slot, (0.0, 0.0))
        self._done[slot] = (done * kept + num_tokens - before[0], lasted * kept + seconds)

    def weights(self, slots: Iterable[int]) -> dict[int, float]:
        """1 for a rank about as fast as the median, less for one that is slower by more than noise."""
        rates = {
            slot: self._done[slot][0] / self._done[slot][1]
            for slot in slots
            if slot in self._done and self._done[slot][1] >= _MIN_MEASURED_S
        }
        usual = statistics.median_high(rates.values()) if len(rates) > 1 else 0.0
        shares = {slot: rate / usual for slot, rate in rates.items()} if usual else {}
        return {
            slot: 1.0 if (share := shares.get(slot, 1.0)) > _NOISE else max(share, _LEAST_WEIGHT)
            for slot in slots
        }


def _low(capacity: int) -> int:
    """With so many rows a rank is still asked whether it wants more."""
    return 2 * capacity


def _emptiest(ledger: Ledger, own: Mapping[int, int], capacities: Mapping[int, int]) -> int | None:
    """The rank with the least work of those that take rows: a row that is more than anybody's part is its."""
    able = [slot for slot in own if ledger.num_outstanding(slot) <= _low(capacities[slot])]
    return min(able, key=lambda slot: (own[slot], slot), default=None)


def _is_for_solo_suspects(
    ledger: Ledger, slot: int, slots: Collection[int], starting: Collection[int]
) -> bool:
    """Whether this rank is to empty itself for suspects that run alone: the emptiest is, the others go on."""
    able = [other for other in slots if ledger.has_solo_suspects(other, slots)]
    return slot in able and slot == min(
        able, key=lambda other: (ledger.num_outstanding(other), other in starting, other)
    )

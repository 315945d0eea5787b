"""How many rows a rank is given, and of which kind: a full batch always, and near the end a fair share.

Owns that choice alone. It must not know ranks but by number and capacity, nor how leases are kept.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from pipelines.ledger import Lease, Ledger


def choose_leases(
    ledger: Ledger, slot: int, capacities: Mapping[int, int], starting: Collection[int] = ()
) -> tuple[Lease, ...]:
    """What the rank of ``slot`` is to be given now. ``capacities``: rows at once of every rank that is ready.

    A rank holds its batch and another behind it: rows of one length end all at once, and the next batch must
    be there then, before the driver hears of it. Towards the end that would leave rows waiting on one rank
    while others idle, so a rank is given nothing beyond its part of all the work that is left, counted in
    tokens: the last rows go out in ever smaller leases.
    ``starting`` are the ranks that will be ready later.
    """
    capacity = capacities[slot]
    outstanding = ledger.num_outstanding(slot)
    if _is_for_suspects(ledger, slot, capacities, starting):
        # Suspects run with nothing else, so the rank takes no other row until it is empty.
        slots = {*capacities, *starting}
        return ledger.try_lease_suspects(slot, slots, capacity) if outstanding == 0 else ()
    if any(lease.is_apart for lease in ledger.leases_of(slot)):
        return ()
    leases: list[Lease] = []
    own = {other: ledger.num_outstanding_tokens(other) for other in capacities}
    num_left = ledger.num_unleased_tokens + sum(own.values())
    while outstanding <= _low(capacity) and (next_tokens := ledger.peek_tokens()) is not None:
        room = num_left / len(capacities) - own[slot]
        if next_tokens > room and slot != _emptiest(ledger, own, capacities):
            break
        share = ledger.num_unleased_tokens / (2 * len(capacities))
        num_rows = min(2 * capacity + math.ceil(capacity / 2) + 1 - outstanding, capacity)
        lease = ledger.try_lease(slot, num_rows, min(share, room))
        assert lease is not None, "there was a row to look at"
        leases.append(lease)
        outstanding += lease.num_rows
        own[slot] = ledger.num_outstanding_tokens(slot)
    return tuple(leases)


def _low(capacity: int) -> int:
    """With so many rows a rank is still asked whether it wants more."""
    return 2 * capacity


def _emptiest(ledger: Ledger, own: Mapping[int, int], capacities: Mapping[int, int]) -> int | None:
    """The rank with the least work of those that take rows: a row that is more than anybody's part is its."""
    able = [slot for slot in own if ledger.num_outstanding(slot) <= _low(capacities[slot])]
    return min(able, key=lambda slot: (own[slot], slot), default=None)


def _is_for_suspects(
    ledger: Ledger, slot: int, capacities: Mapping[int, int], starting: Collection[int]
) -> bool:
    """Whether this rank is to empty itself for suspects: the emptiest is, and the others go on.

    That is the one which is started in a dead one's place, as a rule: nobody has to empty itself then.
    """
    slots = {*capacities, *starting}
    able = [other for other in slots if ledger.has_suspects(other, slots)]
    return slot in able and slot == min(
        able, key=lambda other: (ledger.num_outstanding(other), other in starting, other)
    )

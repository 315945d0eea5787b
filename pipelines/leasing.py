"""How many rows a rank is given, and of which kind: a full batch always, and near the end a fair share.

Owns that choice alone. It must not know ranks but by number and capacity, nor how leases are kept.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from pipelines.ledger import Lease, Ledger


def choose_leases(ledger: Ledger, slot: int, capacities: Mapping[int, int]) -> tuple[Lease, ...]:
    """What the rank of ``slot`` is to be given now. ``capacities``: rows at once of every live rank.

    A rank holds its batch and a little more, so that it never waits for the driver. Towards the end that
    would leave rows waiting on one rank while others idle, so a rank is given nothing beyond its part of
    all the work that is left, counted in tokens: the last rows go out in ever smaller leases.
    """
    capacity = capacities[slot]
    outstanding = ledger.num_outstanding(slot)
    if _is_for_suspects(ledger, slot, capacities):
        # Suspects run with nothing else, so the rank takes no other row until it is empty.
        lease = ledger.try_lease_suspects(slot, list(capacities)) if outstanding == 0 else None
        return (lease,) if lease is not None else ()
    if any(lease.is_solo for lease in ledger.leases_of(slot)):
        return ()
    leases: list[Lease] = []
    own = {other: ledger.num_outstanding_tokens(other) for other in capacities}
    num_left = ledger.num_unleased_tokens + sum(own.values())
    while outstanding <= _low(capacity) and (next_tokens := ledger.peek_tokens()) is not None:
        room = num_left / len(capacities) - own[slot]
        if next_tokens > room and slot != _emptiest(ledger, own, capacities):
            break
        share = ledger.num_unleased_tokens / (2 * len(capacities))
        num_rows = min(capacity + math.ceil(capacity / 2) + 1 - outstanding, capacity)
        lease = ledger.try_lease(slot, num_rows, min(share, room))
        assert lease is not None, "there was a row to look at"
        leases.append(lease)
        outstanding += lease.num_rows
        own[slot] = ledger.num_outstanding_tokens(slot)
    return tuple(leases)


def _low(capacity: int) -> int:
    """With so many rows a rank is still asked whether it wants more."""
    return capacity + math.ceil(capacity / 4)


def _emptiest(ledger: Ledger, own: Mapping[int, int], capacities: Mapping[int, int]) -> int | None:
    """The rank with the least work of those that take rows: a row that is more than anybody's part is its."""
    able = [slot for slot in own if ledger.num_outstanding(slot) <= _low(capacities[slot])]
    return min(able, key=lambda slot: (own[slot], slot), default=None)


def _is_for_suspects(ledger: Ledger, slot: int, live: Mapping[int, int]) -> bool:
    """Whether this rank is to empty itself for suspects: the emptiest is, and the others go on."""
    slots: Sequence[int] = list(live)
    able = [other for other in slots if ledger.has_suspects(other, slots)]
    return slot in able and slot == min(able, key=lambda other: (ledger.num_outstanding(other), other))

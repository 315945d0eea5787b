"""Who works on which rows now: leases, their loss, and one equation.

Owns the state of every row between the plan and its part, in memory and for open shards only; it must
not know files, processes or time.

A row that was in flight on a rank that died is a suspect: it is tried again in a lease of suspects, and
quarantined when another death is its doing (``pipelines.suspects``).

Rows that nobody holds wait in a queue, which knows what they cost and has them in order
(``pipelines.row_queue``).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from pipelines.manifest import Tally
from pipelines.rank_protocol import Lease, LeaseReport
from pipelines.row_costs import RowCosts, find_early
from pipelines.row_queue import RowQueue, join_rows
from pipelines.sink import JournalState
from pipelines.source import Shard
from pipelines.suspects import Suspects


@dataclass(slots=True)
class _OpenShard:
    shard: Shard
    leases: set[int] = field(default_factory=set)
    num_ok: int = 0
    num_error: int = 0


@dataclass(slots=True)
class _HeldLease:
    lease: Lease
    slot: int
    num_tokens: int
    num_read: int = 0
    num_ok: int = 0
    num_error: int = 0

    @property
    def num_left(self) -> int:
        return self.lease.num_rows - self.num_ok - self.num_error


class Ledger:
    """Rows of the unpublished shards. ``resumed`` holds what journals of earlier runs already answer.

    ``deaths``: how many tokens (shard, row) had at each death of a rank in earlier runs.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        resumed: Mapping[int, JournalState],
        deaths: Mapping[tuple[int, int], Sequence[int | None]] | None = None,
    ) -> None:
        self._unopened = deque(shard for shard in shards if shard.index not in resumed)
        self._open: dict[int, _OpenShard] = {}
        self._held: dict[int, _HeldLease] = {}
        self._suspects = Suspects(deaths)
        self._queue = RowQueue()
        self._complete: deque[int] = deque()
        self._next_lease_id = 1
        self.num_read = 0
        self.num_ok = 0
        self.num_error = 0
        self.num_unleased = sum(shard.num_rows for shard in shards)
        self._num_unleased_tokens = self.num_unleased
        for shard in shards:
            if shard.index in resumed:
                self._open_shard(shard, resumed[shard.index].finished)

    @property
    def num_in_flight(self) -> int:
        """Rows read by a live rank and not finished."""
        return sum(held.num_read - held.num_ok - held.num_error for held in self._held.values())

    def num_outstanding(self, slot: int) -> int:
        """Leased rows that the rank of ``slot`` has not finished."""
        return sum(held.num_left for held in self._held.values() if held.slot == slot)

    def num_outstanding_tokens(self, slot: int) -> int:
        """What those rows cost, about: which rows of a lease are finished is not known here."""
        return sum(
            math.ceil(held.num_tokens * held.num_left / held.lease.num_rows)
            for held in self._held.values()
            if held.slot == slot
        )

    @property
    def num_unleased_tokens(self) -> int:
        """What the rows that nobody holds cost; their number, as long as costs are not known."""
        return self._num_unleased_tokens

    def missing_shards(self) -> list[Shard]:
        """The shards that have rows to lease."""
        opened = [
            opened.shard
            for index, opened in self._open.items()
            if self._queue.has_rows(index) or self._suspects.waiting_rows(index)
        ]
        return opened + [shard for shard in self._unopened if shard.num_rows]

    def set_costs(self, costs: Mapping[int, RowCosts], num_lanes: int) -> None:
        """Put the rows in order, before any is leased. ``num_lanes``: how many rows run at once in all.

        ``costs`` has every one of ``missing_shards``.
        """
        assert not self._held, "rows are put in order before any is leased"
        rows: dict[int, Sequence[int]] = {
            index: waiting for index in self._open if (waiting := self._queue.rows_of(index))
        }
        rows |= {shard.index: range(shard.num_rows) for shard in self._unopened if shard.num_rows}
        early = [place for place in find_early(costs, rows, num_lanes) if place not in self._suspects]
        self._queue.set_costs(costs, early)
        self._num_unleased_tokens = sum(self._queue.cost(index, own) for index, own in rows.items())
        for index in self._open:
            self._num_unleased_tokens += self._queue.cost(index, self._suspects.waiting_rows(index))

    def leases_of(self, slot: int) -> list[Lease]:
        """What the rank of ``slot`` holds."""
        return [held.lease for held in self._held.values() if held.slot == slot]

    def take_lease_id(self) -> int:
        """A lease number that this run has not used."""
        self._next_lease_id += 1
        return self._next_lease_id - 1

    def peek_tokens(self) -> int | None:
        """What the row costs that ``try_lease`` would begin with; None when there is none."""
        place = self._next_place()
        return None if place is None else self._queue.cost(place[0], place[1:])

    def try_lease(self, slot: int, max_num_rows: int, max_num_tokens: float = math.inf) -> Lease | None:
        """Lease up to ``max_num_rows`` untried rows of one shard, one at least; None when there are none.

        Rows are added as long as they cost no more than ``max_num_tokens`` together.
        """
        place = self._next_place()
        if place is None:
            return None
        opened = self._open.get(place[0])
        if opened is None:  # rows that are early go before their shard's turn
            shard = next(shard for shard in self._unopened if shard.index == place[0])
            self._unopened.remove(shard)
            opened = self._open_shard(shard, {})
        return self._hold(opened, slot, self._queue.take(max_num_rows, max_num_tokens))

    def _next_place(self) -> tuple[int, int] | None:
        """The (shard, row) to lease next; shards are opened until there is one."""
        while (place := self._queue.peek()) is None and self._unopened:
            self._open_shard(self._unopened.popleft(), {})
        return place

    def has_solo_suspects(self, slot: int, slots: Collection[int]) -> bool:
        """Whether a suspect that runs alone waits for the rank of ``slot``. ``slots`` are all that live."""
        return bool(self._suspects.next_group(slot, slots, 1, is_solo=True))

    def try_lease_suspects(
        self, slot: int, slots: Collection[int], capacity: int, *, is_solo: bool = False
    ) -> tuple[Lease, ...]:
        """Lease suspects that go together, to a rank that holds no other; if solo ones, nothing at all."""
        places = self._suspects.next_group(slot, slots, capacity, is_solo=is_solo)
        self._suspects.take(places)
        together: dict[int, dict[int, frozenset[int]]] = {}
        for index, row in places:
            together.setdefault(index, {})[row] = self._suspects.tokens_at_deaths((index, row))
        return tuple(
            self._hold(self._open[index], slot, list(own), tokens_at_deaths=own, is_solo=is_solo)
            for index, own in together.items()
        )

    def record(self, report: LeaseReport) -> None:
        """Take in how far a lease is; a late word about a lost lease is ignored."""
        held = self._held.get(report.lease_id)
        if held is None:
            return
        opened = self._open[held.lease.shard_index]
        self.num_read += report.num_read - held.num_read
        ok, error = report.num_ok - held.num_ok, report.num_error - held.num_error
        self._count(opened, ok, error)
        held.num_read, held.num_ok, held.num_error = report.num_read, report.num_ok, report.num_error
        if report.is_done:
            assert held.num_ok + held.num_error == held.lease.num_rows, report
            self._release(opened, held)

    def recount(self, lease_id: int, state: JournalState) -> None:
        """The lease's journal says ``state``, which may be more than its rank has said."""
        held = self._held[lease_id]
        num_ok = sum(state.finished.values())
        num_error = len(state.finished) - num_ok
        num_read = max(held.num_read, num_ok + num_error)
        self.record(LeaseReport(lease_id=lease_id, num_read=num_read, num_ok=num_ok, num_error=num_error))

    def lose_rank(
        self, slot: int, states: Mapping[int, JournalState], *, may_blame: bool = True
    ) -> tuple[Lease, int] | None:
        """The rank of ``slot`` died, leaving journals that say ``states``, one for each lease that it held.

        Finished rows stay finished, untouched ones can be leased again. If the death is the doing of one
        row, its lease and it are returned: the caller journals an error row for it and calls
        ``quarantine``. Otherwise, and without ``may_blame``, started rows become suspects.
        """
        lost = [held for held in self._held.values() if held.slot == slot]
        in_flight = {
            (held.lease.shard_index, row): num_tokens
            for held in lost
            for row, num_tokens in states[held.lease.lease_id].tokens_of_suspects.items()
        }
        culprit = self._suspects.find_culprit(in_flight) if may_blame else None
        if culprit is None:
            self._suspects.note_death(in_flight, slot)
        found: tuple[Lease, int] | None = None
        for held in lost:
            guilty = None
            if culprit is not None and culprit[0] == held.lease.shard_index and culprit[1] in held.lease.rows:
                guilty = culprit[1]
                found = held.lease, guilty
            self._give_back(held, states[held.lease.lease_id], guilty)
        return found

    def _give_back(self, held: _HeldLease, state: JournalState, guilty: int | None) -> None:
        lease = held.lease
        del self._held[lease.lease_id]
        opened = self._open[lease.shard_index]
        index = opened.shard.index
        ok = sum(state.finished.values())
        error = len(state.finished) - ok
        self._count(opened, ok - held.num_ok, error - held.num_error)
        self.num_read += ok + error - held.num_read
        again = [row for row in lease.rows if row not in state.finished and row != guilty]
        self._suspects.put((index, row) for row in again if (index, row) in self._suspects)
        self._queue.put(index, (row for row in again if (index, row) not in self._suspects))
        self.num_unleased += len(again)
        self._num_unleased_tokens += self._queue.cost(index, again)
        opened.leases.discard(lease.lease_id)
        if guilty is None:
            self._notice_complete(opened)
        else:
            opened.leases.add(-lease.lease_id)  # it holds its shard open until it is journaled

    def quarantine(self, lease: Lease) -> None:
        """The row that ``lose_rank`` returned with a lease is an error row in a journal now."""
        opened = self._open[lease.shard_index]
        opened.leases.discard(-lease.lease_id)
        self.num_read += 1
        self._count(opened, 0, 1)
        self._notice_complete(opened)

    def take_complete(self) -> list[int]:
        """Open the shards that need no row, and return those that can be published, each once."""
        while self._unopened and self._unopened[0].num_rows == 0:
            self._open_shard(self._unopened.popleft(), {})
        complete = list(self._complete)
        self._complete.clear()
        return complete

    def commit(self, shard_index: int, tally: Tally) -> None:
        """A shard's part is published with ``tally``: it must hold every row, and is forgotten.

        The part has the last word on outcomes: a rank that was given up may have journaled an answer
        after all, to a row that was answered again elsewhere.
        """
        opened = self._open.pop(shard_index)
        assert self._is_complete(opened), opened
        assert tally.num_rows == opened.shard.num_rows == opened.num_ok + opened.num_error, (opened, tally)
        self.num_ok += tally.num_ok - opened.num_ok
        self.num_error += tally.num_error - opened.num_error
        self._queue.forget(shard_index)
        self._suspects.forget(shard_index)
        self.check()

    def check(self) -> None:
        """The equation that holds at every commit: rows read = ok + error + in flight."""
        assert self.num_read == self.num_ok + self.num_error + self.num_in_flight, vars(self)

    def _open_shard(self, shard: Shard, finished: Mapping[int, bool]) -> _OpenShard:
        index = shard.index
        missing = [row for row in range(shard.num_rows) if row not in finished]
        self._open[index] = opened = _OpenShard(shard=shard)
        self._queue.put(index, (row for row in missing if (index, row) not in self._suspects))
        self._suspects.put((index, row) for row in missing if (index, row) in self._suspects)
        ok = sum(finished.values())
        self.num_unleased -= len(finished)
        self._num_unleased_tokens -= self._queue.cost(index, finished)
        self.num_read += len(finished)
        self._count(opened, ok, len(finished) - ok)
        self._notice_complete(opened)
        return opened

    def _hold(
        self,
        opened: _OpenShard,
        slot: int,
        rows: Sequence[int],
        *,
        tokens_at_deaths: Mapping[int, frozenset[int]] | None = None,
        is_solo: bool = False,
    ) -> Lease:
        # A file is read forwards: in a lease, order costs a reader more than it can win an engine.
        ranges = tuple(join_rows(sorted(rows)))
        index = opened.shard.index
        lease = Lease(
            lease_id=self.take_lease_id(),
            shard_index=index,
            ranges=ranges,
            tokens_at_deaths=tokens_at_deaths or {},
            is_solo=is_solo,
        )
        opened.leases.add(lease.lease_id)
        num_tokens = self._queue.cost(index, rows)
        self._held[lease.lease_id] = _HeldLease(lease=lease, slot=slot, num_tokens=num_tokens)
        self.num_unleased -= lease.num_rows
        self._num_unleased_tokens -= num_tokens
        return lease

    def _release(self, opened: _OpenShard, held: _HeldLease) -> None:
        del self._held[held.lease.lease_id]
        opened.leases.discard(held.lease.lease_id)
        self._notice_complete(opened)

    def _count(self, opened: _OpenShard, ok: int, error: int) -> None:
        opened.num_ok += ok
        opened.num_error += error
        self.num_ok += ok
        self.num_error += error

    def _is_complete(self, opened: _OpenShard) -> bool:
        index = opened.shard.index
        return not (self._queue.has_rows(index) or opened.leases or self._suspects.waiting_rows(index))

    def _notice_complete(self, opened: _OpenShard) -> None:
        if self._is_complete(opened):
            self._complete.append(opened.shard.index)

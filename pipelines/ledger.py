"""Who works on which rows now: leases, their loss, and one equation.

Owns the state of every row between the plan and its part, in memory and for open shards only; it must
not know files, processes or time.

A row that was in flight on a rank that died is a suspect: it is tried again in a lease of suspects, and
quarantined when another death is its doing (``pipelines.suspects``).

Rows are leased in the order of what they cost, as far as the ledger was told: those that would hold up
the end first, then shard by shard, in each the longest first.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pipelines.manifest import Tally
from pipelines.rank_protocol import Lease, LeaseReport
from pipelines.row_costs import RowCosts, find_early, order_rows
from pipelines.sink import JournalState
from pipelines.source import Shard
from pipelines.suspects import Suspects


@dataclass(slots=True)
class _OpenShard:
    shard: Shard
    ranges: deque[tuple[int, int]]
    early: set[int] = field(default_factory=set)
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
        self._costs: dict[int, RowCosts] = {}
        self._early: deque[tuple[int, int]] = deque()
        self._early_of: dict[int, set[int]] = {}
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

    @property
    def is_settled(self) -> bool:
        """Whether no row is left to lease or to wait for."""
        return not self._unopened and not self._held and all(map(self._is_complete, self._open.values()))

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
            if opened.ranges or self._suspects.waiting_rows(index)
        ]
        return opened + [shard for shard in self._unopened if shard.num_rows]

    def set_costs(self, costs: Mapping[int, RowCosts], num_lanes: int) -> None:
        """Put the rows in order, before any is leased. ``num_lanes``: how many rows run at once in all.

        ``costs`` has every one of ``missing_shards``.
        """
        assert not self._held, "rows are put in order before any is leased"
        self._costs = dict(costs)
        rows: dict[int, Sequence[int]] = {
            opened.shard.index: _rows_of(opened.ranges) for opened in self._open.values() if opened.ranges
        }
        rows |= {shard.index: range(shard.num_rows) for shard in self._unopened if shard.num_rows}
        self._early.extend(
            place for place in find_early(costs, rows, num_lanes) if place not in self._suspects
        )
        for shard_index, row in self._early:
            self._early_of.setdefault(shard_index, set()).add(row)
        self._num_unleased_tokens = sum(self._cost(index, own) for index, own in rows.items())
        for index, opened in self._open.items():
            self._num_unleased_tokens += self._cost(index, self._suspects.waiting_rows(index))
            self._put_in_order(opened)

    def leases_of(self, slot: int) -> list[Lease]:
        """What the rank of ``slot`` holds."""
        return [held.lease for held in self._held.values() if held.slot == slot]

    def take_lease_id(self) -> int:
        """A lease number that this run has not used."""
        self._next_lease_id += 1
        return self._next_lease_id - 1

    def peek_tokens(self) -> int | None:
        """What the row costs that ``try_lease`` would begin with; None when there is none."""
        if self._early:
            shard_index, row = self._early[0]
            return self._cost(shard_index, (row,))
        opened = self._next_shard()
        return None if opened is None else self._cost(opened.shard.index, (opened.ranges[0][0],))

    def try_lease(self, slot: int, max_num_rows: int, max_num_tokens: float = math.inf) -> Lease | None:
        """Lease up to ``max_num_rows`` untried rows of one shard, one at least; None when there are none.

        Rows are added as long as they cost no more than ``max_num_tokens`` together.
        """
        if self._early:
            return self._lease_early(slot, max_num_rows, max_num_tokens)
        opened = self._next_shard()
        if opened is None:
            return None
        index = opened.shard.index
        rows: list[int] = []
        num_tokens = 0
        while opened.ranges and len(rows) < max_num_rows:
            start, stop = opened.ranges.popleft()
            row = start
            while row < stop and len(rows) < max_num_rows:
                num_tokens += self._cost(index, (row,))
                if rows and num_tokens > max_num_tokens:
                    break
                rows.append(row)
                row += 1
            if row < stop:
                opened.ranges.appendleft((row, stop))
                break
        return self._hold(opened, slot, rows)

    def _next_shard(self) -> _OpenShard | None:
        opened = next((s for s in self._open.values() if s.ranges), None)
        while opened is None and self._unopened:
            opened = self._open_shard(self._unopened.popleft(), {})
            opened = opened if opened.ranges else None
        return opened

    def _lease_early(self, slot: int, max_num_rows: int, max_num_tokens: float) -> Lease:
        """The longest row, and those behind it as long as they are of its shard."""
        index = self._early[0][0]
        opened = self._open.get(index)
        if opened is None:
            shard = next(shard for shard in self._unopened if shard.index == index)
            self._unopened.remove(shard)
            opened = self._open_shard(shard, {})
        rows: list[int] = []
        num_tokens = 0
        while self._early and self._early[0][0] == index and len(rows) < max_num_rows:
            row = self._early[0][1]
            num_tokens += self._cost(index, (row,))
            if rows and num_tokens > max_num_tokens:
                break
            rows.append(row)
            self._early.popleft()
        opened.early.difference_update(rows)
        return self._hold(opened, slot, sorted(rows))

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
        opened.ranges.extend((row, row + 1) for row in again if (index, row) not in self._suspects)
        self.num_unleased += len(again)
        self._num_unleased_tokens += self._cost(index, again)
        self._put_in_order(opened)
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
        self._costs.pop(shard_index, None)
        self._suspects.forget(shard_index)
        self.check()

    def check(self) -> None:
        """The equation that holds at every commit: rows read = ok + error + in flight."""
        assert self.num_read == self.num_ok + self.num_error + self.num_in_flight, vars(self)

    def _open_shard(self, shard: Shard, finished: Mapping[int, bool]) -> _OpenShard:
        index = shard.index
        missing = [row for row in range(shard.num_rows) if row not in finished]
        ranges = _ranges(row for row in missing if (index, row) not in self._suspects)
        self._open[index] = opened = _OpenShard(shard=shard, ranges=deque(ranges))
        self._suspects.put((index, row) for row in missing if (index, row) in self._suspects)
        ok = sum(finished.values())
        self.num_unleased -= len(finished)
        self._num_unleased_tokens -= self._cost(index, finished)
        self.num_read += len(finished)
        self._count(opened, ok, len(finished) - ok)
        self._put_in_order(opened)
        self._notice_complete(opened)
        return opened

    def _put_in_order(self, opened: _OpenShard) -> None:
        opened.early |= self._early_of.pop(opened.shard.index, set())
        rows = [row for row in sorted(_rows_of(opened.ranges)) if row not in opened.early]
        costs = self._costs.get(opened.shard.index)
        opened.ranges = deque(_ranges(rows if costs is None else order_rows(costs, rows)))

    def _cost(self, shard_index: int, rows: Iterable[int]) -> int:
        costs = self._costs.get(shard_index)
        return sum(1 if costs is None else costs.tokens[row] for row in rows)

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
        ranges = tuple(_ranges(sorted(rows)))
        index = opened.shard.index
        lease = Lease(
            lease_id=self.take_lease_id(),
            shard_index=index,
            ranges=ranges,
            tokens_at_deaths=tokens_at_deaths or {},
            is_solo=is_solo,
        )
        opened.leases.add(lease.lease_id)
        num_tokens = self._cost(index, rows)
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
        waiting = self._suspects.waiting_rows(opened.shard.index)
        return not (opened.ranges or opened.early or opened.leases or waiting)

    def _notice_complete(self, opened: _OpenShard) -> None:
        if self._is_complete(opened):
            self._complete.append(opened.shard.index)


def _rows_of(ranges: Iterable[tuple[int, int]]) -> list[int]:
    return [row for start, stop in ranges for row in range(start, stop)]


def _ranges(rows: Iterable[int]) -> list[tuple[int, int]]:
    """Rows in their order as half-open ranges, each row that follows the one before it joined to it."""
    ranges: list[tuple[int, int]] = []
    for row in rows:
        if ranges and ranges[-1][1] == row:
            ranges[-1] = (ranges[-1][0], row + 1)
        else:
            ranges.append((row, row + 1))
    return ranges

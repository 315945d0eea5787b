"""Rows that no rank holds, in the order in which they are leased.

Owns that order: those that would hold up the end first, then shard by shard, in each those that begin alike
together and the longest first, as far as costs are known. It must not know ranks, leases or deaths: suspects
wait elsewhere (``pipelines.suspects``).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice, takewhile

from pipelines.row_costs import RowCosts, order_rows


class RowQueue:
    """Rows that wait: those of the shards that were opened, and early ones, which go first, of any shard."""

    def __init__(self) -> None:
        self._ranges: dict[int, deque[tuple[int, int]]] = {}
        self._early: deque[tuple[int, int]] = deque()
        self._early_of: dict[int, set[int]] = {}
        self._costs: dict[int, RowCosts] = {}

    def cost(self, shard_index: int, rows: Iterable[int]) -> int:
        """What rows of a shard cost; their number, as long as costs are not known."""
        costs = self._costs.get(shard_index)
        return sum(1 if costs is None else costs.tokens[row] for row in rows)

    def set_costs(self, costs: Mapping[int, RowCosts], early: Sequence[tuple[int, int]]) -> None:
        """Put the rows in order. ``early``: (shard, row) of those to be leased first, in their order."""
        self._costs = dict(costs)
        self._early.extend(early)
        for shard_index, row in early:
            self._early_of.setdefault(shard_index, set()).add(row)
        for shard_index in self._ranges:
            self.put(shard_index, ())

    def put(self, shard_index: int, rows: Iterable[int]) -> None:
        """Have rows of a shard wait with those that do; the shard is open from here on."""
        early = self._early_of.get(shard_index, ())
        waiting = sorted(row for row in [*self.rows_of(shard_index), *rows] if row not in early)
        costs = self._costs.get(shard_index)
        in_order = waiting if costs is None else order_rows(costs, waiting)
        self._ranges[shard_index] = deque(join_rows(in_order))

    def rows_of(self, shard_index: int) -> list[int]:
        """The rows of a shard that wait, without early ones."""
        return [row for start, stop in self._ranges.get(shard_index, ()) for row in range(start, stop)]

    def has_rows(self, shard_index: int) -> bool:
        """Whether any row of a shard waits."""
        return bool(self._ranges.get(shard_index) or self._early_of.get(shard_index))

    def peek(self) -> tuple[int, int] | None:
        """The (shard, row) that comes next, None if none waits. Its shard is open, or the row early."""
        if self._early:
            return self._early[0]
        return next(((index, ranges[0][0]) for index, ranges in self._ranges.items() if ranges), None)

    def take(self, max_num_rows: int, max_num_tokens: float = math.inf) -> list[int]:
        """The row of ``peek`` and those behind it, of its shard, which must be open by now.

        Rows are added as long as they cost no more than ``max_num_tokens`` together.
        """
        place = self.peek()
        assert place is not None, "there was a row to look at"
        index = place[0]
        if self._early:
            ahead = (row for _, row in takewhile(lambda early: early[0] == index, self._early))
            rows = self._affordable(index, islice(ahead, max_num_rows), max_num_tokens)
            for row in rows:
                self._early.popleft()
                self._early_of[index].remove(row)
            return rows
        ranges = self._ranges[index]
        ahead = (row for start, stop in ranges for row in range(start, stop))
        rows = self._affordable(index, islice(ahead, max_num_rows), max_num_tokens)
        num_left = len(rows)
        while num_left:
            start, stop = ranges.popleft()
            if stop - start > num_left:
                ranges.appendleft((start + num_left, stop))
            num_left -= min(num_left, stop - start)
        return rows

    def forget(self, shard_index: int) -> None:
        """No row of the shard will wait again."""
        assert not self.has_rows(shard_index), shard_index
        for of_shards in (self._ranges, self._early_of, self._costs):
            of_shards.pop(shard_index, None)

    def _affordable(self, shard_index: int, rows: Iterable[int], max_num_tokens: float) -> list[int]:
        found: list[int] = []
        num_tokens = 0
        for row in rows:
            num_tokens += self.cost(shard_index, (row,))
            if found and num_tokens > max_num_tokens:
                break
            found.append(row)
        return found


def join_rows(rows: Iterable[int]) -> list[tuple[int, int]]:
    """Rows in their order as half-open ranges, each row that follows the one before it joined to it."""
    ranges: list[tuple[int, int]] = []
    for row in rows:
        if ranges and ranges[-1][1] == row:
            ranges[-1] = (ranges[-1][0], row + 1)
        else:
            ranges.append((row, row + 1))
    return ranges

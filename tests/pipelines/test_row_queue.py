"""Rows that nobody holds: what comes next, and how much of it at once."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence

import pytest

from pipelines.row_costs import RowCosts
from pipelines.row_queue import RowQueue, join_rows


def each_alone(tokens: Sequence[int]) -> RowCosts:
    return RowCosts(array("q", tokens), array("i", range(len(tokens))))


def test_without_costs_rows_come_shard_by_shard_in_their_order() -> None:
    queue = RowQueue()
    queue.put(1, [0, 1, 2])
    queue.put(0, [4, 3])
    assert (queue.peek(), queue.cost(1, [0, 2])) == ((1, 0), 2)
    assert queue.take(2) == [0, 1]
    queue.put(1, [0])
    assert queue.take(9) == [0, 2], "what is given back waits with the others, and a take ends with its shard"
    assert (queue.peek(), queue.take(9), queue.peek()) == ((0, 3), [3, 4], None)


def test_with_costs_the_longest_come_first_and_early_ones_before_all() -> None:
    queue = RowQueue()
    queue.put(0, range(4))
    queue.set_costs({0: each_alone([1, 2, 4, 8]), 1: each_alone([90, 1, 80])}, [(1, 0), (1, 2), (0, 3)])
    assert (queue.rows_of(0), queue.cost(1, [0, 2])) == ([2, 1, 0], 170)
    assert queue.peek() == (1, 0)
    assert queue.has_rows(1), "of a shard that is not open"
    queue.put(1, range(3))
    assert queue.rows_of(1) == [1], "early ones wait elsewhere"
    assert queue.take(9, max_num_tokens=5) == [0], "one at least"
    assert queue.take(9) == [2]
    queue.put(1, [2])
    assert queue.take(9) == [3]
    assert queue.take(9, max_num_tokens=6) == [2, 1]
    assert queue.take(9) == [0]
    assert queue.take(9) == [2, 1], "a row is early once"
    queue.forget(0)
    assert queue.cost(0, [2]) == 1
    assert not queue.has_rows(1)


@pytest.mark.parametrize("seed", range(10))
def test_every_row_that_is_put_is_taken_once(seed: int) -> None:
    print("seed", seed)
    random_ = random.Random(seed)
    queue = RowQueue()
    sizes = [random_.randrange(1, 12) for _ in range(4)]
    waiting = {(index, row) for index, size in enumerate(sizes) for row in range(size)}
    for index, size in enumerate(sizes):
        queue.put(index, range(size))
    costs = {
        index: each_alone([random_.randrange(1, 50) for _ in range(size)]) for index, size in enumerate(sizes)
    }
    queue.set_costs(costs, random_.sample(sorted(waiting), random_.randrange(5)))
    while (place := queue.peek()) is not None:
        most = random_.randrange(1, 100)
        rows = queue.take(random_.randrange(1, 5), most)
        assert rows[0] == place[1]
        assert len(rows) == 1 or queue.cost(place[0], rows) <= most
        taken = {(place[0], row) for row in rows}
        assert len(taken) == len(rows)
        assert taken <= waiting
        back = {one for one in taken if random_.random() < 0.3}
        waiting -= taken - back
        queue.put(place[0], [row for _, row in back])
        for index in range(4):
            assert queue.has_rows(index) == any(one[0] == index for one in waiting)
    assert not waiting


def test_rows_join_in_their_order() -> None:
    assert join_rows([]) == []
    assert join_rows([3, 4, 5, 1, 7, 8]) == [(3, 6), (1, 2), (7, 9)]

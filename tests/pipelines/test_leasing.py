"""Leases over simulated ranks: the longest rows first, like beside like, and no rank waited for at the end."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence

import pytest

from pipelines.leasing import RankSpeeds, choose_leases
from pipelines.ledger import Ledger
from pipelines.rank_protocol import Lease, LeaseReport
from pipelines.row_costs import RowCosts
from pipelines.source import Shard

NEWS_EVERY = 10  # ticks of the clock between two exchanges with a rank


class SimulatedRank:
    """Works through its leases: ``is_serial`` one row after the other, as a long prefill goes, else one
    token of each running row a tick, as decoding goes."""

    def __init__(self, capacity: int, *, is_serial: bool) -> None:
        self._capacity, self._is_serial = capacity, is_serial
        self._rows: list[tuple[int, int]] = []  # (lease id, ticks left), in the order they came
        self._leases: dict[int, list[int]] = {}  # lease id -> [rows, finished]

    def give(self, lease: Lease, costs: RowCosts) -> None:
        self._leases[lease.lease_id] = [lease.num_rows, 0]
        self._rows += [(lease.lease_id, costs.tokens[row]) for row in lease.rows]

    @property
    def is_busy(self) -> bool:
        return bool(self._rows)

    def tick(self) -> None:
        num_running = 1 if self._is_serial else self._capacity
        for lease_id, left in self._rows[:num_running]:
            self._leases[lease_id][1] += left == 1
        moved = [(lease_id, left - 1) for lease_id, left in self._rows[:num_running]]
        self._rows = [row for row in moved if row[1]] + self._rows[num_running:]

    def report(self) -> list[LeaseReport]:
        reports = [
            LeaseReport(lease_id=i, num_read=done, num_ok=done, num_error=0, is_done=done == total)
            for i, (total, done) in self._leases.items()
        ]
        self._leases = {i: found for i, found in self._leases.items() if found[0] != found[1]}
        return reports


def make_job(*shards: Sequence[int]) -> tuple[Ledger, dict[int, RowCosts]]:
    costs = {
        index: RowCosts(array("q", tokens), array("i", range(len(tokens))))
        for index, tokens in enumerate(shards)
    }
    found = [Shard(index=i, path=str(i), start=0, stop=len(tokens)) for i, tokens in enumerate(shards)]
    return Ledger(found, {}), costs


def run(ledger: Ledger, costs: dict[int, RowCosts], num_ranks: int, capacity: int, *, is_serial: bool) -> int:
    """Run to the end; after how many ticks the last row was done."""
    ledger.set_costs(costs, num_lanes=num_ranks * capacity)
    ranks = [SimulatedRank(capacity, is_serial=is_serial) for _ in range(num_ranks)]
    capacities = dict.fromkeys(range(num_ranks), capacity)
    ticks = makespan = 0
    while ledger.num_unleased or any(map(ledger.num_outstanding, capacities)):
        for slot, rank in enumerate(ranks):
            if (ticks + slot) % NEWS_EVERY == 0 or ticks == 0:
                for report in rank.report():
                    ledger.record(report)
                for lease in choose_leases(ledger, slot, capacities):
                    rank.give(lease, costs[lease.shard_index])
        ticks += 1
        for rank in ranks:
            if rank.is_busy:
                rank.tick()
                makespan = ticks
    return makespan


@pytest.mark.parametrize("capacity", [4, 64])
@pytest.mark.parametrize("is_serial", [True, False], ids=["prefill", "decode"])
def test_one_long_row_placed_last_does_not_hold_up_the_end(capacity: int, is_serial: bool) -> None:
    ledger, costs = make_job([100] * 256 + [4000])
    ticks = run(ledger, costs, 4, capacity, is_serial=is_serial)
    total = 256 * 100 + 4000
    bound = max(4000, total / 4) if is_serial else max(4000, total / (4 * capacity))
    assert bound <= ticks <= 1.1 * bound


def test_a_long_row_in_the_last_of_many_shards_goes_first() -> None:
    ledger, costs = make_job(*[[10] * 100] * 9, [10] * 99 + [1800])
    assert run(ledger, costs, 2, 2, is_serial=False) <= 1.1 * max(1800, (9990 + 1800) / 4)


@pytest.mark.parametrize("seed", range(4))
def test_lengths_of_every_kind_end_within_a_tenth_of_the_bound(seed: int) -> None:
    print("seed", seed)
    random_ = random.Random(seed)
    shards = [[1 + int(random_.paretovariate(1.2) * 5) for _ in range(100)] for _ in range(5)]
    ledger, costs = make_job(*shards)
    bound = max(sum(map(sum, shards)) / 4, max(map(max, shards)))
    assert run(ledger, costs, 4, 8, is_serial=True) <= 1.1 * bound


def leased_rows(ledger: Ledger, max_num_rows: int) -> list[list[int]]:
    leases = []
    while (lease := ledger.try_lease(0, max_num_rows)) is not None:
        leases.append(lease.rows)
    return leases


def test_rows_of_one_group_are_leased_together_and_the_longest_first() -> None:
    ledger, costs = make_job([10] * 12)
    group = array("i", [0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2])
    tokens = array("q", [10, 10, 40] * 4)
    costs[0] = RowCosts(tokens, group)
    ledger.set_costs(costs, num_lanes=4)
    assert leased_rows(ledger, 4) == [[2, 5, 8, 11], [0, 3, 6, 9], [1, 4, 7, 10]]


def test_a_rank_that_is_not_ready_yet_keeps_its_part() -> None:
    given = {}
    for starting in ((), (1,), (1, 2, 3)):
        ledger, _ = make_job([100] * 208)
        leases = choose_leases(ledger, 0, {0: 64}, starting)
        given[len(starting)] = sum(lease.num_rows for lease in leases)
    assert given[0] > 128
    assert 64 <= given[1] <= 104
    assert 0 < given[3] <= 52


def test_rows_much_alike_stay_in_the_files_order() -> None:
    ledger, costs = make_job([10, 12, 9, 11, 15, 14])
    ledger.set_costs(costs, num_lanes=1)
    assert leased_rows(ledger, 2) == [[0, 1], [2, 3], [4, 5]]


def test_a_lease_ends_where_its_tokens_do() -> None:
    ledger, costs = make_job([10] * 8)
    ledger.set_costs(costs, num_lanes=8)
    first = ledger.try_lease(0, 8, max_num_tokens=35)
    second = ledger.try_lease(0, 8, max_num_tokens=1)
    assert first is not None
    assert second is not None
    assert (first.rows, second.rows) == ([0, 1, 2], [3])
    assert ledger.num_unleased_tokens == 40
    assert ledger.num_outstanding_tokens(0) == 40


def test_a_slow_rank_is_weighed_less_and_recovers() -> None:
    speeds = RankSpeeds()
    assert speeds.weights([0, 1, 2]) == {0: 1.0, 1: 1.0, 2: 1.0}
    rates = {0: 100, 1: 90, 2: 20}
    for second in range(61):
        for slot, rate in rates.items():
            speeds.take(slot, rate * second, float(second), is_full=True)
    weights = speeds.weights([0, 1, 2])
    assert (weights[0], weights[1]) == (1.0, 1.0)
    assert weights[2] == pytest.approx(20 / 90, rel=0.01)
    assert speeds.weights([2]) == {2: 1.0}, "alone, there is nothing to be slower than"
    done = {slot: rate * 60 for slot, rate in rates.items()}
    for second in range(61, 3600):
        for slot in rates:
            done[slot] += 100
            speeds.take(slot, done[slot], float(second), is_full=True)
    assert speeds.weights([0, 1, 2]) == {0: 1.0, 1: 1.0, 2: 1.0}
    speeds.begin(1)
    assert speeds.weights([1]) == {1: 1.0}


def test_an_empty_batch_says_nothing_of_a_ranks_speed() -> None:
    speeds = RankSpeeds()
    for second in range(100):
        speeds.take(0, 100 * second, float(second), is_full=True)
        speeds.take(1, second, float(second), is_full=False)
    assert speeds.weights([0, 1]) == {0: 1.0, 1: 1.0}

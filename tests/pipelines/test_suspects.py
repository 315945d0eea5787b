"""Rows of dead ranks as numbers: most deaths are nobody's fault, and a row that kills twice at one token is found."""

from __future__ import annotations

import random
from itertools import count

import pytest

from pipelines.leasing import choose_leases
from pipelines.ledger import Ledger
from pipelines.rank_protocol import Lease, LeaseReport
from pipelines.sink import JournalState
from pipelines.source import Shard
from pipelines.suspects import NO_STEP_YET, Suspects

CAPACITY = 64


class Ranks:
    """Ranks that run what they are given at once, or die of it: of a row in ``poison``.

    Rows of ``poison`` kill at the number of tokens it gives, None: at another one each time. All others are
    never found twice at one number.
    """

    def __init__(
        self, shard_sizes: list[int], num_slots: int, poison: dict[tuple[int, int], int | None]
    ) -> None:
        self.shards = [Shard(index=i, path=f"{i}", start=0, stop=n) for i, n in enumerate(shard_sizes)]
        self.ledger = Ledger(self.shards, {})
        self.capacities = dict.fromkeys(range(num_slots), CAPACITY)
        self.poison = poison
        self.num_deaths = self.num_batches = 0
        self.guilty: list[tuple[int, int]] = []
        self._others = count(1000)

    def run_batch(self, slot: int) -> list[Lease]:
        """One rank takes what it is given, and finishes it or dies."""
        leases = list(choose_leases(self.ledger, slot, self.capacities))
        if any(lease.is_solo for lease in leases):
            assert all(lease.is_solo for lease in leases), "who is to be alone has company"
            self._run_one_by_one(slot, leases)
        elif leases:
            self.num_batches += 1
            if any((lease.shard_index, row) in self.poison for lease in leases for row in lease.rows):
                self.kill(slot)
            else:
                for lease in leases:
                    self._finish(lease)
        return leases

    def _run_one_by_one(self, slot: int, leases: list[Lease]) -> None:
        for lease in leases:
            for number, row in enumerate(lease.rows):
                self.num_batches += 1
                if (lease.shard_index, row) in self.poison:
                    finished = dict.fromkeys(lease.rows[:number], True)
                    self._die(slot, {lease.lease_id: JournalState({*finished, row}, finished, {row: 0})})
                    return
            self._finish(lease)

    def kill(self, slot: int) -> None:
        """The rank dies with all that it holds in flight."""
        self._die(slot, {lease.lease_id: self._in_flight(lease) for lease in self.ledger.leases_of(slot)})

    def _in_flight(self, lease: Lease) -> JournalState:
        num_tokens = {}
        for row in lease.rows:
            own = self.poison.get((lease.shard_index, row))
            num_tokens[row] = next(self._others) if own is None else own
        return JournalState(started=set(lease.rows), num_tokens=num_tokens)

    def _die(self, slot: int, states: dict[int, JournalState]) -> None:
        self.num_deaths += 1
        untouched = {lease.lease_id: JournalState() for lease in self.ledger.leases_of(slot)}
        found = self.ledger.lose_rank(slot, untouched | states)
        if found is not None:
            lease, row = found
            self.guilty.append((lease.shard_index, row))
            self.ledger.quarantine(lease)

    def _finish(self, lease: Lease) -> None:
        n = lease.num_rows
        self.ledger.record(
            LeaseReport(lease_id=lease.lease_id, num_read=n, num_ok=n, num_error=0, is_done=True)
        )

    def finish(self, seed: int = 0) -> None:
        random_ = random.Random(seed)
        while self.ledger.num_unleased or any(map(self.ledger.num_outstanding, self.capacities)):
            self.run_batch(random_.choice(list(self.capacities)))
        self.ledger.check()


@pytest.mark.parametrize("num_slots", [1, 2, 4])
def test_the_rows_of_a_rank_that_was_killed_are_run_again_together(num_slots: int) -> None:
    ranks = Ranks([40, 40], num_slots, {})
    held = choose_leases(ranks.ledger, 0, ranks.capacities)
    num_rows = sum(lease.num_rows for lease in held)
    ranks.kill(0)
    again = ranks.run_batch(num_slots - 1)
    suspects = [lease for lease in again if lease.is_of_suspects]
    assert not any(lease.is_solo for lease in suspects)
    assert sum(lease.num_rows for lease in suspects) == min(num_rows, CAPACITY), "as many as it runs at once"
    ranks.finish()
    assert (ranks.num_deaths, ranks.guilty) == (1, [])


@pytest.mark.parametrize("num_slots", [1, 2, 4])
@pytest.mark.parametrize("seed", range(5))
def test_a_row_that_kills_two_ranks_is_found_and_no_other_is_quarantined(seed: int, num_slots: int) -> None:
    print("seed", seed)
    culprit = (random.Random(seed).randrange(3), random.Random(seed).randrange(70))
    ranks = Ranks([70, 70, 70], num_slots, {culprit: seed})
    ranks.finish(seed)
    assert ranks.guilty == [culprit]
    assert ranks.num_deaths == 2
    assert ranks.num_batches < 25, "no row was run alone"


@pytest.mark.parametrize("num_slots", [1, 2, 4])
@pytest.mark.parametrize("seed", range(5))
def test_a_row_that_kills_at_another_token_each_time_is_found_in_four_deaths(
    seed: int, num_slots: int
) -> None:
    print("seed", seed)
    culprit = (random.Random(seed).randrange(3), random.Random(seed).randrange(70))
    ranks = Ranks([70, 70, 70], num_slots, {culprit: None})
    ranks.finish(seed)
    assert ranks.guilty == [culprit]
    assert ranks.num_deaths == 4
    # Groups of eight, one of them row by row, beside the batches of the whole job.
    assert ranks.num_batches < 50


@pytest.mark.parametrize("seed", range(10))
def test_many_guilty_rows_are_all_found_and_no_other(seed: int) -> None:
    print("seed", seed)
    random_ = random.Random(seed)
    places = {(random_.randrange(2), random_.randrange(100)) for _ in range(random_.randrange(1, 12))}
    poison = {place: random_.choice([number, None]) for number, place in enumerate(sorted(places))}
    ranks = Ranks([100, 100], random_.choice([1, 3]), poison)
    ranks.finish(seed)
    assert sorted(ranks.guilty) == sorted(poison)


def test_no_rank_empties_itself_for_rows_of_a_dead_one() -> None:
    ledger = Ledger([Shard(index=0, path="0", start=0, stop=2000)], {})
    both = dict.fromkeys(range(2), CAPACITY)
    for slot in both:
        assert choose_leases(ledger, slot, both)
    held = ledger.leases_of(0)
    lost = {row for lease in held for row in lease.rows}
    ledger.lose_rank(0, {lease.lease_id: JournalState(started=set(lease.rows)) for lease in held})
    for lease in ledger.leases_of(1)[:1]:
        n = lease.num_rows
        ledger.record(LeaseReport(lease_id=lease.lease_id, num_read=n, num_ok=n, num_error=0, is_done=True))
    others = choose_leases(ledger, 1, {1: CAPACITY}, starting=[0])
    suspects = [lease for lease in others if lease.is_of_suspects]
    assert lost.issuperset(row for lease in suspects for row in lease.rows)
    assert suspects
    again = choose_leases(ledger, 1, both)
    assert not any(lease.is_of_suspects for lease in again), "one group of them at a time"
    fresh = choose_leases(ledger, 0, both)
    assert fresh
    assert not any(lease.is_of_suspects for lease in fresh), "they saw this slot die"


def test_a_row_is_tried_on_a_slot_that_it_has_not_seen_die() -> None:
    suspects = Suspects()
    suspects.note_death({(0, 5): 3}, 0)
    suspects.put([(0, 5)])
    assert suspects.next_group(0, [0, 1], CAPACITY, is_solo=False) == ()
    assert suspects.next_group(1, [0, 1], CAPACITY, is_solo=False) == ((0, 5),)
    assert suspects.next_group(0, [0], CAPACITY, is_solo=False) == ((0, 5),), "there is no other"


def test_who_is_where_it_was_at_an_earlier_death_is_to_blame_if_no_other_is() -> None:
    suspects = Suspects({(0, 1): [4, 9], (0, 2): [7], (0, 3): [None]})
    assert suspects.find_culprit({(0, 1): 9, (0, 2): 6, (0, 3): 0, (1, 1): 4}) == (0, 1)
    assert suspects.find_culprit({(0, 1): 9, (0, 2): 7}) is None, "either may have done it"
    assert suspects.find_culprit({(0, 1): 5, (0, 2): 8, (0, 3): None}) is None
    assert suspects.find_culprit({(0, 3): None}) is None, "alone by chance"
    suspects.note_death({(0, 3): 5}, 0)
    suspects.note_death({(0, 3): 6}, 0)
    assert suspects.find_culprit({(0, 3): 7}) == (0, 3), "alone because it was there so often"
    assert suspects.find_culprit({(0, 4): 0}) is None, "once is chance"
    assert suspects.find_culprit({}) is None


def test_of_rows_that_are_rendered_side_by_side_none_is_to_blame() -> None:
    suspects = Suspects({(0, 1): [NO_STEP_YET], (0, 2): [7]})
    assert suspects.find_culprit({(0, 1): NO_STEP_YET, (0, 2): 6}) == (0, 1)
    assert suspects.find_culprit({(0, 1): NO_STEP_YET, (0, 3): NO_STEP_YET}) is None
    assert suspects.find_culprit({(0, 1): NO_STEP_YET, (0, 3): NO_STEP_YET, (0, 2): 7}) == (0, 2)


def test_those_of_more_deaths_come_first_in_smaller_groups() -> None:
    suspects = Suspects({(0, row): [0] * (1 + (row > 70) + (row > 90)) for row in range(100)})
    suspects.put((0, row) for row in range(100))
    sizes = {}
    for is_solo in (True, False):
        sizes[is_solo] = []
        while group := suspects.next_group(0, [0], CAPACITY, is_solo=is_solo):
            suspects.take(group)
            sizes[is_solo].append(len(group))
    assert sizes == {True: [8, 1], False: [8, 8, 4, 64, 7]}

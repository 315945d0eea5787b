"""Rows of dead ranks as numbers: most deaths are nobody's fault, and a guilty row is found in four."""

from __future__ import annotations

import random

import pytest

from pipelines.leasing import choose_leases
from pipelines.ledger import Lease, LeaseReport, Ledger
from pipelines.sink import JournalState
from pipelines.source import Shard
from pipelines.suspects import Suspects

CAPACITY = 64


class Ranks:
    """Ranks that run what they are given at once, or die of it: of a row in ``poison``."""

    def __init__(self, shard_sizes: list[int], num_slots: int, poison: set[tuple[int, int]]) -> None:
        self.shards = [Shard(index=i, path=f"{i}", start=0, stop=n) for i, n in enumerate(shard_sizes)]
        self.ledger = Ledger(self.shards, {})
        self.capacities = dict.fromkeys(range(num_slots), CAPACITY)
        self.poison = poison
        self.num_deaths = self.num_batches = 0
        self.guilty: list[tuple[int, int]] = []

    def run_batch(self, slot: int) -> list[Lease]:
        """One rank takes what it is given, and finishes it or dies."""
        leases = list(choose_leases(self.ledger, slot, self.capacities))
        assert len({lease.is_apart for lease in leases}) <= 1, "suspects have company"
        for lease in leases if any(lease.is_solo for lease in leases) else []:
            for number, row in enumerate(lease.rows):
                if (lease.shard_index, row) in self.poison:
                    finished = dict.fromkeys(lease.rows[:number], True)
                    self._die(slot, {lease.lease_id: JournalState({*finished, row}, finished)})
                    return leases
                self.num_batches += 1
            self._finish(lease)
        if leases and not any(lease.is_solo for lease in leases):
            self.num_batches += 1
            if any((lease.shard_index, row) in self.poison for lease in leases for row in lease.rows):
                self.kill(slot)
            else:
                for lease in leases:
                    self._finish(lease)
        return leases

    def kill(self, slot: int) -> None:
        """The rank dies with all that it holds in flight."""
        held = self.ledger.leases_of(slot)
        self._die(slot, {lease.lease_id: JournalState(started=set(lease.rows)) for lease in held})

    def _die(self, slot: int, states: dict[int, JournalState]) -> None:
        self.num_deaths += 1
        held = {lease.lease_id: lease for lease in self.ledger.leases_of(slot)}
        is_alone = sum(len(state.suspects) for state in states.values()) == 1
        for lease_id, lease in held.items():
            state = states.get(lease_id, JournalState())
            for row in self.ledger.lose(lease_id, state, is_alone=is_alone):
                self.guilty.append((lease.shard_index, row))
                self.ledger.quarantine(lease_id, lease.shard_index, 1)

    def _finish(self, lease: Lease) -> None:
        n = lease.num_rows
        self.ledger.record(
            LeaseReport(lease_id=lease.lease_id, num_read=n, num_ok=n, num_error=0, is_done=True)
        )

    def finish(self, seed: int = 0) -> None:
        random_ = random.Random(seed)
        while not self.ledger.is_settled:
            self.run_batch(random_.choice(list(self.capacities)))
        self.ledger.check()


@pytest.mark.parametrize("num_slots", [1, 2, 4])
def test_the_rows_of_a_rank_that_was_killed_are_run_again_together(num_slots: int) -> None:
    ranks = Ranks([40, 40], num_slots, set())
    held = choose_leases(ranks.ledger, 0, ranks.capacities)
    num_rows = sum(lease.num_rows for lease in held)
    ranks.kill(0)
    again = ranks.run_batch(0)
    assert all(lease.is_apart and not lease.is_solo for lease in again)
    assert sum(lease.num_rows for lease in again) == min(num_rows, CAPACITY), "as many as it runs at once"
    ranks.finish()
    assert (ranks.num_deaths, ranks.guilty) == (1, [])


@pytest.mark.parametrize("num_slots", [1, 2, 4])
@pytest.mark.parametrize("seed", range(5))
def test_a_guilty_row_is_found_in_four_deaths_and_no_other_is_quarantined(seed: int, num_slots: int) -> None:
    print("seed", seed)
    culprit = (random.Random(seed).randrange(3), random.Random(seed).randrange(70))
    ranks = Ranks([70, 70, 70], num_slots, {culprit})
    ranks.finish(seed)
    assert ranks.guilty == [culprit]
    assert ranks.num_deaths == 4
    # Fifteen groups of eight, one of them row by row, beside the batches of the whole job.
    assert ranks.num_batches < 50


@pytest.mark.parametrize("seed", range(10))
def test_many_guilty_rows_are_all_found_and_no_other(seed: int) -> None:
    print("seed", seed)
    random_ = random.Random(seed)
    poison = {(random_.randrange(2), random_.randrange(100)) for _ in range(random_.randrange(1, 12))}
    ranks = Ranks([100, 100], random_.choice([1, 3]), poison)
    ranks.finish(seed)
    assert sorted(ranks.guilty) == sorted(poison)


def test_a_rank_that_is_started_in_a_dead_ones_place_tries_its_rows_and_nobody_waits_for_it() -> None:
    ledger = Ledger([Shard(index=0, path="0", start=0, stop=2000)], {})
    both = dict.fromkeys(range(2), CAPACITY)
    for slot in both:
        assert choose_leases(ledger, slot, both)
    for lease in ledger.leases_of(0):
        ledger.lose(lease.lease_id, JournalState(started=set(lease.rows)))
    for lease in ledger.leases_of(1):
        n = lease.num_rows
        ledger.record(LeaseReport(lease_id=lease.lease_id, num_read=n, num_ok=n, num_error=0, is_done=True))
        break
    others = choose_leases(ledger, 1, {1: CAPACITY}, starting=[0])
    assert others, "the rank that lives goes on"
    assert not any(lease.is_apart for lease in others)
    assert all(lease.is_apart for lease in choose_leases(ledger, 0, both))


def test_a_row_that_saw_two_deaths_on_one_slot_is_tried_on_another() -> None:
    suspects = Suspects()
    for _ in range(2):
        suspects.note_death((0, 5), 0)
    suspects.put([(0, 5)])
    assert suspects.next_group(0, [0, 1], CAPACITY) == ((), False)
    assert suspects.next_group(1, [0, 1], CAPACITY) == (((0, 5),), False)
    assert suspects.next_group(0, [0], CAPACITY) == (((0, 5),), False), "there is no other"


def test_those_of_more_deaths_come_first_in_smaller_groups() -> None:
    suspects = Suspects({(0, row): 1 + (row > 70) + (row > 90) for row in range(100)})
    suspects.put((0, row) for row in range(100))
    sizes = []
    while (group := suspects.next_group(0, [0], CAPACITY))[0]:
        suspects.take(group[0])
        sizes.append((len(group[0]), group[1]))
    assert sizes == [(8, True), (1, True), (8, False), (8, False), (4, False), (64, False), (7, False)]

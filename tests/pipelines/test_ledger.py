"""Leases as numbers: nothing is leased twice, nothing is forgotten, one row is to blame."""

from __future__ import annotations

import random

import pytest

from pipelines.ledger import Ledger
from pipelines.manifest import Tally
from pipelines.rank_protocol import Lease, LeaseReport
from pipelines.sink import JournalState
from pipelines.source import Shard


def make_shards(*sizes: int) -> list[Shard]:
    return [Shard(index=i, path=f"{i}", start=0, stop=size) for i, size in enumerate(sizes)]


def finish(ledger: Ledger, lease: Lease, *, num_error: int = 0) -> None:
    n = lease.num_rows
    ledger.record(
        LeaseReport(
            lease_id=lease.lease_id, num_read=n, num_ok=n - num_error, num_error=num_error, is_done=True
        )
    )


def test_leases_cover_every_row_once() -> None:
    ledger = Ledger(make_shards(7, 0, 5), {1: JournalState(), 0: JournalState(finished={2: True, 3: False})})
    seen = []
    while (lease := ledger.try_lease(0, 3)) is not None:
        seen += [(lease.shard_index, row) for row in lease.rows]
        assert lease.num_rows <= 3
        finish(ledger, lease)
    assert sorted(seen) == [(0, r) for r in (0, 1, 4, 5, 6)] + [(2, r) for r in range(5)]
    assert sorted(ledger.take_complete()) == [0, 1, 2]
    assert ledger.take_complete() == []
    ledger.commit(0, Tally(num_ok=6, errors={"x": 1}))
    ledger.commit(1, Tally())
    ledger.commit(2, Tally(num_ok=5))
    assert (ledger.num_read, ledger.num_ok, ledger.num_error, ledger.num_in_flight) == (12, 11, 1, 0)


def test_a_lost_lease_gives_back_what_was_not_finished() -> None:
    ledger = Ledger(make_shards(6), {})
    lease = ledger.try_lease(0, 6)
    assert lease is not None
    ledger.record(LeaseReport(lease_id=lease.lease_id, num_read=4, num_ok=1, num_error=0))
    assert (ledger.num_read, ledger.num_in_flight) == (4, 3)
    # The journal knows more than the last report did: row 1 is finished too.
    died = JournalState(started={0, 1, 2, 3}, finished={0: True, 1: False}, num_tokens={2: 5, 3: 0})
    assert ledger.lose_rank(0, {lease.lease_id: died}) is None
    ledger.check()
    assert (ledger.num_read, ledger.num_ok, ledger.num_error, ledger.num_unleased) == (2, 1, 1, 4)
    ledger.record(LeaseReport(lease_id=lease.lease_id, num_read=6, num_ok=6, num_error=0, is_done=True))
    assert ledger.num_ok == 1, "a late word about a lost lease counts for nothing"
    untouched = ledger.try_lease(0, 6)
    assert untouched is not None
    assert (untouched.rows, untouched.is_of_suspects) == ([4, 5], False)
    (suspects,) = ledger.try_lease_suspects(1, [0, 1], 4)
    assert suspects.tokens_at_deaths == {2: {5}, 3: {0}}
    assert (suspects.rows, suspects.is_solo) == ([2, 3], False)


def test_a_row_that_kills_twice_is_the_culprit_and_the_others_go_on() -> None:
    ledger = Ledger(make_shards(5), {})
    lease = ledger.try_lease(0, 4)
    assert lease is not None
    died = JournalState(started={0, 1, 2}, num_tokens={0: 8, 1: 9, 2: 0})
    assert ledger.lose_rank(0, {lease.lease_id: died}) is None
    (suspects,) = ledger.try_lease_suspects(0, [0], 4)
    beside = ledger.try_lease(0, 1)
    assert beside is not None
    assert (suspects.rows, beside.rows) == ([0, 1, 2], [3])
    states = {
        suspects.lease_id: JournalState({0, 1, 2}, finished={2: True}, num_tokens={0: 3, 1: 9}),
        beside.lease_id: JournalState(started={3}, num_tokens={3: 9}),
    }
    assert ledger.lose_rank(0, states) == (suspects, 1)
    ledger.quarantine(suspects)
    (suspects,) = ledger.try_lease_suspects(0, [0], 4)
    assert suspects.tokens_at_deaths == {0: {8}}, "the death that is explained marks nobody"
    finish(ledger, suspects)
    rest = ledger.try_lease(0, 9)
    assert rest is not None
    assert rest.rows == [3, 4]
    finish(ledger, rest)
    assert ledger.take_complete() == [0]
    ledger.commit(0, Tally(num_ok=4, errors={"engine_crash": 1}))


def test_a_quarantined_row_holds_its_shard_until_it_is_journaled() -> None:
    ledger = Ledger(make_shards(1), {})
    lease = ledger.try_lease(0, 1)
    assert lease is not None
    assert ledger.lose_rank(0, {lease.lease_id: JournalState({0}, num_tokens={0: 4})}) is None, (
        "once is chance"
    )
    (lease,) = ledger.try_lease_suspects(0, [0], 4)
    guilty = ledger.lose_rank(0, {lease.lease_id: JournalState({0}, num_tokens={0: 4})})
    assert guilty == (lease, 0)
    assert ledger.take_complete() == []
    ledger.quarantine(lease)
    assert ledger.take_complete() == [0]


@pytest.mark.parametrize("seed", range(20))
def test_random_histories_keep_the_equation(seed: int) -> None:
    print("seed", seed)
    random_ = random.Random(seed)
    shards = make_shards(*(random_.randrange(0, 9) for _ in range(random_.randrange(1, 6))))
    ledger = Ledger(shards, {})
    truth: dict[int, dict[int, bool]] = {shard.index: {} for shard in shards}
    held: list[tuple[int, Lease]] = []
    committed: set[int] = set()
    num_guilty = 0
    while len(committed) < len(shards):
        slot = random_.randrange(3)
        leases = list(ledger.try_lease_suspects(slot, [0, 1, 2], random_.randrange(1, 5)))
        leases = leases or list(
            ledger.try_lease_suspects(slot, [0, 1, 2], random_.randrange(1, 5), is_solo=True)
        )
        lease = None if leases else ledger.try_lease(slot, random_.randrange(1, 5))
        held += [(slot, one) for one in ([lease] if lease is not None else leases)]
        if held and random_.random() < 0.7:
            slot, lease = held.pop(random_.randrange(len(held)))
            outcomes = {row: random_.random() < 0.8 for row in lease.rows}
            if random_.random() < 0.6:
                truth[lease.shard_index].update(outcomes)
                finish(ledger, lease, num_error=sum(not ok for ok in outcomes.values()))
            else:
                states = {}
                for one in [lease, *(other for number, other in held if number == slot)]:
                    kept = {row: random_.random() < 0.8 for row in one.rows if random_.random() < 0.5}
                    started = set(kept) | set(random_.sample(one.rows, random_.randrange(2)))
                    num_tokens = {row: random_.randrange(4) for row in started}
                    truth[one.shard_index].update(kept)
                    states[one.lease_id] = JournalState(started, kept, num_tokens)
                held = [(number, other) for number, other in held if number != slot]
                guilty = ledger.lose_rank(slot, states)
                if guilty is not None:
                    num_guilty += 1
                    truth[guilty[0].shard_index][guilty[1]] = False
                    ledger.quarantine(guilty[0])
        ledger.check()
        for index in ledger.take_complete():
            assert index not in committed
            committed.add(index)
            assert len(truth[index]) == shards[index].num_rows
            num_ok = sum(truth[index].values())
            ledger.commit(index, Tally(num_ok=num_ok, errors={"x": len(truth[index]) - num_ok}))
    print("guilty", num_guilty)
    assert not any(map(ledger.num_outstanding, range(3)))
    assert ledger.num_unleased == 0

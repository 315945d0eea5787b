"""What an engine is given before a step: enough to be full, suspects first, nothing that nobody waits for."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest

from engine import EngineConfig, Request, RequestRejected, SamplingParams
from jobs.feeder import Feeder
from jobs.lease_run import LeaseRun
from jobs.rows_in_flight import RowsInFlight
from pipelines.rank_protocol import Lease
from tests.fake_engine import REFUSED_ID, FakeEngine
from tests.small_jobs import TokenRenderer


class Rows:
    """A lease's rows, ready or not; row 7 is refused before the engine sees it."""

    def __init__(self, rows: Collection[int], num_tokens: int, *, is_ready: bool) -> None:
        self._rows, self._num_tokens, self._is_ready = iter(rows), num_tokens, is_ready
        self.num_begun = 0

    def begin(self, renderer: Any, look_ahead: int) -> None:
        self.num_begun += 1

    def try_take(self, renderer: Any, look_ahead: int, *, may_wait: bool) -> Any:
        if not (self._is_ready or may_wait):
            return None
        row = next(self._rows)
        if row == 7:
            return row, RequestRejected("x", "x")
        prompt = [REFUSED_ID if row == 8 else 1] * self._num_tokens
        sampling = SamplingParams(n=20)  # the longest of so many takes some steps
        return row, Request(request_id=f"{row}", prompt_token_ids=prompt, sampling=sampling)


class Journal:
    """Hears of steps, and forgets."""

    def note_step(self, number: int, num_tokens: Any) -> None:
        pass


def lease_run(
    start: int,
    stop: int,
    num_tokens: int = 1,
    *,
    is_ready: bool = True,
    is_suspect: bool = False,
    **options: Any,
) -> LeaseRun:
    deaths = dict.fromkeys(range(start, stop), frozenset([99])) if is_suspect else {}
    lease = Lease(lease_id=1, shard_index=0, ranges=((start, stop),), tokens_at_deaths=deaths, **options)
    parts: dict[str, Any] = {"rows": Rows(lease.rows, num_tokens, is_ready=is_ready), "journal": Journal()}
    return LeaseRun(lease=lease, **parts)


class Rank:
    """An engine of four rows and 16 tokens, and its feeder."""

    def __init__(self) -> None:
        self.engine = FakeEngine(EngineConfig(model="fake", max_num_seqs=4))
        self.in_flight = RowsInFlight()
        self.feeder = Feeder(
            self.engine, TokenRenderer(), self.in_flight, capacity=4, max_num_batched_tokens=16
        )


@pytest.mark.parametrize(("num_tokens", "num_added"), [(1, 6), (8, 2), (100, 2)])
def test_rows_are_added_until_the_step_is_sure_to_be_full(num_tokens: int, num_added: int) -> None:
    rank, run = Rank(), lease_run(10, 40, num_tokens)
    rank.feeder.feed([run])
    assert len(rank.in_flight) == run.num_read == num_added
    rank.feeder.feed([run])
    assert run.num_read == num_added, "nothing has changed"


def test_refused_rows_take_no_place() -> None:
    rank, run = Rank(), lease_run(5, 10)
    rank.feeder.feed([run])
    assert run.is_read
    assert len(rank.in_flight) == 3
    assert [(row.row, row.error) for row in run.finished] == [(7, "x"), (8, "kv_too_small")]
    assert run.num_left == 5, "not journaled yet"


def test_a_running_engine_does_not_wait_for_rows_and_an_idle_one_does() -> None:
    rank, late = Rank(), lease_run(10, 20, is_ready=False)
    rank.feeder.feed([lease_run(0, 1)])
    rank.in_flight.step(rank.engine)
    assert rank.engine.stats().num_running == 1
    rank.feeder.feed([late])
    assert late.num_read == 0
    idle = Rank()
    idle.feeder.feed([late])
    assert late.num_read == 6


def test_suspects_come_first_but_not_as_the_first_of_all() -> None:
    rank, others, suspects = Rank(), lease_run(10, 40), lease_run(50, 60, is_suspect=True)
    rank.feeder.feed([others, suspects])
    assert (others.num_read, suspects.num_read) == (1, 3), "no more in flight than run at once"


def test_a_solo_suspect_waits_until_it_is_alone() -> None:
    rank, solo = Rank(), lease_run(50, 53, is_suspect=True, is_solo=True)
    for num_read in (1, 2, 3):
        rank.feeder.feed([solo])
        rank.feeder.feed([solo])
        assert solo.num_read == num_read
        while rank.engine.has_unfinished():
            for output in rank.in_flight.step(rank.engine):
                rank.in_flight.remove(output.request_id)


def test_the_next_leases_rows_are_rendered_ahead_and_suspects_are_not() -> None:
    rank = Rank()
    runs = [lease_run(10, 40), lease_run(50, 60, is_suspect=True), lease_run(60, 70), lease_run(70, 80)]
    rank.feeder.feed(runs)
    begun = [run.rows.num_begun for run in runs if isinstance(run.rows, Rows)]
    assert begun == [1, 0, 1, 0]

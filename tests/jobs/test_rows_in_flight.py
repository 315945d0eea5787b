"""Steps of an engine with suspects among its rows: who is in each, and what the journals say before it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine import EngineConfig, Request, SamplingParams
from jobs.lease_run import LeaseRun
from jobs.rows_in_flight import RowsInFlight
from pipelines.rank_protocol import Lease
from pipelines.sink import NOT_IN_STEP
from tests.fake_engine import FakeEngine


class Journal:
    """Keeps the notes of steps."""

    def __init__(self) -> None:
        self.notes: list[tuple[int, dict[int, int]]] = []

    def note_step(self, number: int, num_tokens: Mapping[int, int]) -> None:
        self.notes.append((number, dict(num_tokens)))


def start(deaths: Mapping[int, int]) -> tuple[FakeEngine, RowsInFlight, Journal, Journal]:
    """An engine with rows 0 and 1, and behind them suspects that had so many tokens at a death."""
    engine = FakeEngine(EngineConfig(model="fake", max_num_seqs=8))
    in_flight = RowsInFlight()
    assert in_flight.is_before_first_step
    journals = Journal(), Journal()
    suspects = {row: frozenset([num_tokens]) for row, num_tokens in deaths.items()}
    for rows, of_suspects, journal in (([0, 1], {}, journals[0]), (list(suspects), suspects, journals[1])):
        lease = Lease(lease_id=1, shard_index=0, ranges=(), tokens_at_deaths=of_suspects)
        parts: dict[str, Any] = {"journal": journal, "rows": None}
        run = LeaseRun(lease=lease, **parts)
        for row in rows:
            sampling = SamplingParams(n=20)  # the longest of so many has some tokens
            request = Request(request_id=f"{row}", prompt_token_ids=[row], sampling=sampling)
            engine.add_request(request)
            in_flight.add(run, row, request)
    assert not in_flight.is_before_first_step
    return engine, in_flight, *journals


def test_rows_without_suspects_run_together_and_are_noted_before() -> None:
    engine, in_flight, journal, _ = start({})
    for _ in range(2):
        in_flight.step(engine)
    assert engine.tokens_at_steps == [{"0": 0, "1": 0}, {"0": 1, "1": 1}]
    assert journal.notes == [(0, {0: 0, 1: 0}), (1, {0: 1, 1: 1})]


def test_the_first_step_is_without_a_suspect_that_is_due_and_the_next_is_its_alone() -> None:
    engine, in_flight, others, suspects = start({2: 0})
    for _ in range(3):
        in_flight.step(engine)
    assert engine.tokens_at_steps == [{"0": 0, "1": 0}, {"2": 0}, {"0": 1, "1": 1, "2": 1}]
    assert suspects.notes == [(0, {2: NOT_IN_STEP}), (1, {2: 0}), (2, {2: 1})]
    assert others.notes == [(0, {0: 0, 1: 0}), (1, {0: NOT_IN_STEP, 1: NOT_IN_STEP}), (2, {0: 1, 1: 1})]


def test_of_two_suspects_that_are_due_each_has_a_step_of_its_own() -> None:
    engine, in_flight, others, suspects = start({2: 1, 3: 1})
    for _ in range(4):
        in_flight.step(engine)
    assert [sorted(rows) for rows in engine.tokens_at_steps[1:]] == [["2"], ["3"], ["0", "1", "2", "3"]]
    assert suspects.notes[1:3] == [(1, {2: 1, 3: NOT_IN_STEP}), (2, {2: NOT_IN_STEP, 3: 1})]
    assert others.notes[1:3] == [(number, {0: NOT_IN_STEP, 1: NOT_IN_STEP}) for number in (1, 2)]


def test_a_row_that_is_answered_is_in_flight_no_more() -> None:
    engine, in_flight, journal, _ = start({})
    num_left = 2
    while engine.has_unfinished():
        for output in in_flight.step(engine):
            assert in_flight.remove(output.request_id).row == int(output.request_id)
            num_left -= 1
        assert len(in_flight) == num_left
    assert not in_flight.is_before_first_step
    assert journal.notes[-1][1].keys() <= {0, 1}

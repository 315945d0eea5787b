"""Who is to blame when a replica ends: whoever did not say that it lost another rank."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest

from pipelines.driver import JobFailed, Outcome
from pipelines.manifest import OutputFolder
from pipelines.rank_protocol import Orders, RankDied
from pipelines.replicas import MAX_BARREN_DEATHS, MAX_DEATHS_OF_SUSPECTS, Replicas
from pipelines.report import read_runs
from tests.fake_engine import POISON_ID
from tests.small_jobs import (
    check_answers,
    error_codes,
    make_plan,
    random_prompts,
    read_output,
    start_run,
    write_prompts,
)


def test_the_silent_rank_is_the_one_that_was_lost() -> None:
    replicas = Replicas(3)
    assert replicas.slots_of(4) == range(3, 6)
    assert replicas.silent_slots(4, 100.0) is None, "nothing happened"
    replicas.note_lost_peer(3, 100.0)
    assert replicas.silent_slots(5, 105.0) is None, "a rank's own end may be known a moment later"
    assert replicas.silent_slots(1, 200.0) is None, "another replica"
    assert replicas.silent_slots(5, 111.0) == [4, 5]
    replicas.note_lost_peer(5, 111.0)
    assert replicas.silent_slots(3, 112.0) == [4]
    replicas.note_lost_peer(4, 112.0)
    assert replicas.silent_slots(3, 112.0) == [], "they lost sight of each other"
    replicas.end(3, is_barren=False, had_suspects=False)
    assert replicas.silent_slots(3, 200.0) is None


def test_a_replica_is_given_up_after_deaths_in_a_row_that_nothing_explains() -> None:
    for had_suspects, most in ((False, MAX_BARREN_DEATHS), (True, MAX_DEATHS_OF_SUSPECTS)):
        replicas = Replicas(2)
        for _ in range(3):
            for _ in range(most - 1):
                assert not replicas.end(3, is_barren=True, had_suspects=had_suspects)
            assert not replicas.end(2, is_barren=False, had_suspects=had_suspects), "counting begins anew"
        for _ in range(most - 1):
            assert not replicas.end(2, is_barren=True, had_suspects=had_suspects)
            assert not replicas.end(0, is_barren=True, had_suspects=had_suspects), "of another replica"
        assert not replicas.end(3, is_barren=True, had_suspects=not had_suspects), "deaths of another kind"
        assert replicas.end(3, is_barren=True, had_suspects=had_suspects)


class OneDies:
    """Lets one rank die while it and its mate have rows in flight, and tells of it in some order."""

    def __init__(self, fleet: Any, is_mate_told_first: bool, is_silent: bool) -> None:
        self._wait, self._fleet = fleet.wait, fleet
        self._is_mate_told_first, self._is_silent = is_mate_told_first, is_silent
        self.num_calls = 0
        self.in_flight: dict[int, set[str]] = {}
        fleet.wait = self.wait

    def wait(self, timeout_s: float) -> list[Any]:
        events = self._wait(timeout_s)
        if self.in_flight:
            return [event for event in events if event[0] != 1 or 1 not in self._dead]
        rows = {slot: set(worker._in_flight._rows) for slot, worker in self._fleet.workers.items()}
        if not (rows.get(0) and rows.get(1)):
            return events
        self.in_flight, self._dead = rows, {1}
        mate, own = (0, RankDied("lost a rank", has_lost_peer=True)), (1, RankDied("killed by the test"))
        told = [mate] if self._is_silent else [mate, own] if self._is_mate_told_first else [own, mate]
        start = self._fleet.start

        def start_anew(slot: int) -> None:
            self._dead.discard(slot)
            start(slot)

        self._fleet.start = start_anew
        return told + [event for event in events if event[0] not in (0, 1)]


@pytest.mark.parametrize(
    ("is_mate_told_first", "is_silent", "patience_s"),
    [
        (True, False, 0.2),
        (False, False, 0.2),
        (True, True, 0.2),
        pytest.param(True, True, 600.0, id="silent until it counts as hanging"),
    ],
)
def test_a_replica_ends_with_one_of_its_ranks_whose_rows_alone_are_suspects(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_mate_told_first: bool,
    is_silent: bool,
    patience_s: float,
) -> None:
    monkeypatch.setattr("pipelines.replicas._PATIENCE_S", patience_s)
    folder = OutputFolder(tmp_path / "out")
    prompts = random_prompts(random.Random(1), 120)
    write_prompts(tmp_path / "in.parquet", prompts)
    driver, fleet = start_run(
        folder, make_plan(tmp_path / "in.parquet", 40), num_slots=4, ranks_per_replica=2
    )
    if patience_s > 1:
        driver._stall_timeout_s = 2.0
        # The rank that lost its mate is dead and silent too.
        monkeypatch.setattr("pipelines.driver._SILENCE_S", 0.2)
    death = OneDies(fleet, is_mate_told_first, is_silent)
    assert driver.run() is Outcome.COMMITTED
    output = read_output(folder.path)
    check_answers(output, prompts)
    assert set(output.column("status").to_pylist()) == {"ok"}
    assert fleet.num_started == 6, "both ranks of the replica, and no other"
    (run,) = read_runs(folder)
    assert sorted(loss.rank for loss in run.losses) == [0, 1]
    assert [loss.reason for loss in run.losses if loss.rank == 0] == ["rank 1 of its replica died"]
    lines = [path.read_text() for path in folder.deaths.glob("*.jsonl")]
    records = [json.loads(line) for line in "".join(lines).splitlines() if line]
    suspects = {f"in.parquet#{40 * one['shard'] + row}" for one in records for row in one["rows"]}
    assert death.in_flight[1] <= suspects, "those of the rank that died"
    assert not suspects & death.in_flight[0]


class OneHangs:
    """Both ranks of the first replica stand still with rows in flight; one of them answers all the same."""

    def __init__(self, fleet: Any, answers: int) -> None:
        self._wait, self._start, self._fleet, self._answers = fleet.wait, fleet.start, fleet, answers
        self.in_flight: dict[int, set[str]] = {}
        self._is_over = False
        fleet.wait, fleet.start = self.wait, self.start

    def start(self, slot: int) -> None:
        self._is_over |= bool(self.in_flight)
        self._start(slot)

    def wait(self, timeout_s: float) -> list[Any]:
        if self._is_over or not self.in_flight:
            events = self._wait(timeout_s)
            rows = {slot: set(worker._in_flight._rows) for slot, worker in self._fleet.workers.items()}
            if not self.in_flight and rows.get(0) and rows.get(1):
                self.in_flight = rows
                self._last = self._fleet.workers[self._answers].exchange(Orders(), 0.0)
            return events
        asked = self._fleet._asked
        held = [slot for slot in (0, 1) if asked.pop(slot, None) is not None]
        time.sleep(0.01)
        return [*self._wait(timeout_s), *((slot, self._last) for slot in held if slot == self._answers)]


@pytest.mark.parametrize("hanging", [0, 1])
def test_of_ranks_that_stand_still_the_one_that_says_nothing_is_blamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hanging: int
) -> None:
    monkeypatch.setattr("pipelines.driver._SILENCE_S", 0.5)
    folder = OutputFolder(tmp_path / "out")
    prompts = random_prompts(random.Random(2), 120)
    write_prompts(tmp_path / "in.parquet", prompts)
    plan = make_plan(tmp_path / "in.parquet", 40)
    driver, fleet = start_run(folder, plan, num_slots=2, ranks_per_replica=2)
    driver._stall_timeout_s = 1.5
    hang = OneHangs(fleet, answers=1 - hanging)
    assert driver.run() is Outcome.COMMITTED
    check_answers(read_output(folder.path), prompts)
    (run,) = read_runs(folder)
    reasons = {loss.rank: loss.reason for loss in run.losses}
    assert reasons[1 - hanging] == f"rank {hanging} of its replica died"
    assert "stood still" in reasons[hanging]
    lines = [path.read_text() for path in folder.deaths.glob("*.jsonl")]
    records = [json.loads(line) for line in "".join(lines).splitlines() if line]
    suspects = {f"in.parquet#{40 * one['shard'] + row}" for one in records for row in one["rows"]}
    assert suspects & hang.in_flight[hanging]
    assert not suspects & hang.in_flight[1 - hanging]


@pytest.mark.parametrize("seed", range(4))
def test_a_poison_row_of_a_replica_is_quarantined_and_no_other(tmp_path: Path, seed: int) -> None:
    print("seed", seed)
    folder = OutputFolder(tmp_path / "out")
    prompts = random_prompts(random.Random(seed), 90)
    poison = random.Random(seed).randrange(90)
    prompts[poison] = [5, POISON_ID]
    write_prompts(tmp_path / "in.parquet", prompts)
    plan = make_plan(tmp_path / "in.parquet", 20)
    driver, _ = start_run(
        folder, plan, num_slots=(2, 6)[seed % 2], ranks_per_replica=2, random_=random.Random(seed)
    )
    assert driver.run() is Outcome.COMMITTED
    output = read_output(folder.path)
    check_answers(output, prompts)
    assert error_codes(output) == {f"in.parquet#{poison}": "engine_crash"}


@pytest.mark.parametrize("seed", range(6))
def test_replicas_that_die_at_random_lose_and_double_nothing(tmp_path: Path, seed: int) -> None:
    print("seed", seed)
    random_ = random.Random(seed)
    folder = OutputFolder(tmp_path / "out")
    prompts = random_prompts(random_, random_.randrange(20, 80))
    write_prompts(tmp_path / "in.parquet", prompts)
    plan = make_plan(tmp_path / "in.parquet", rows_per_shard=random_.randrange(5, 30))
    size = random_.choice([2, 3])
    driver, fleet = start_run(
        folder, plan, num_slots=2 * size, ranks_per_replica=size, capacity=3, random_=random_, chance=0.01
    )
    assert driver.run() is Outcome.COMMITTED
    check_answers(read_output(folder.path), prompts)
    (run,) = read_runs(folder)
    assert run.num_rank_deaths % size == 0
    assert fleet.num_started >= 2 * size


def test_ranks_that_never_find_each_other_end_the_job(tmp_path: Path) -> None:
    folder = OutputFolder(tmp_path / "out")
    write_prompts(tmp_path / "in.parquet", [[1], [2]])
    driver, fleet = start_run(folder, make_plan(tmp_path / "in.parquet"), num_slots=2, ranks_per_replica=2)
    fleet._exchange = lambda slot, orders: RankDied("found nobody", has_lost_peer=True)  # type: ignore[method-assign]
    with pytest.raises(JobFailed, match="ranks lost each other"):
        driver.run()
    assert fleet.num_started == 6

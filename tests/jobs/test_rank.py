"""The rank's loop, turned by hand: how it feeds, what it journals, how it ends."""

from __future__ import annotations

import errno
import random
import re
import threading
import time
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from engine import (
    ConfigError,
    EngineConfig,
    EngineDead,
    PeerLost,
    Request,
    RequestOutput,
    SamplingParams,
)
from jobs.worker import RankWorker, Serving
from pipelines.driver import JobFailed
from pipelines.manifest import OutputFolder, write_plan
from pipelines.plan import Plan
from pipelines.rank_protocol import Lease, Orders, RankReport
from pipelines.report import read_status
from pipelines.sink import read_journal_state, read_lease_state
from pipelines.source import InputUnreadable
from pipelines.suspects import NO_STEP_YET
from tests.fake_engine import POISON_ID, REFUSED_ID, FakeEngine, expected_token_ids
from tests.small_jobs import (
    InlineExecutor,
    TokenRenderer,
    check_answers,
    make_plan,
    random_prompts,
    read_output,
    start_run,
    write_prompts,
)

CONFIG = EngineConfig(model="fake", max_num_seqs=4)


class Rank:
    """A worker, its fake engine and its folder."""

    def __init__(
        self, tmp_path: Path, prompts: list[list[int] | None], *, capacity: int = 4, n: int = 1
    ) -> None:
        self.folder = OutputFolder(tmp_path / "out")
        write_prompts(tmp_path / "in.parquet", prompts)
        self.plan: Plan = make_plan(tmp_path / "in.parquet", 100, num_samples=n)
        write_plan(self.folder, self.plan)
        self.engine = FakeEngine(CONFIG)
        self.num_built = 0
        sampling = SamplingParams(n=n)

        def build() -> Serving:
            self.num_built += 1
            return Serving(
                engine=self.engine,
                renderer=TokenRenderer(sampling),
                capacity=capacity,
                max_num_batched_tokens=16,
            )

        inline = InlineExecutor()
        self.worker = RankWorker(
            self.folder, self.plan, 1, build, publisher=inline, syncer=inline, renderer=inline
        )

    def exchange(self, **orders: object) -> RankReport:
        return self.worker.exchange(Orders(**orders), 0.0)  # type: ignore[arg-type]

    def turn_until_idle(self) -> None:
        while self.worker.turn():
            pass


def lease(lease_id: int, *ranges: tuple[int, int], **options: Any) -> Lease:
    return Lease(lease_id=lease_id, shard_index=0, ranges=ranges, **options)


def deaths(num_rows: int, num_tokens: int = 0) -> dict[int, frozenset[int]]:
    return dict.fromkeys(range(num_rows), frozenset([num_tokens]))


def build_fake() -> Serving:
    return Serving(engine=FakeEngine(CONFIG), renderer=TokenRenderer(), capacity=4, max_num_batched_tokens=16)


def damage_column(file: Path, name: str) -> None:
    """Make a column unreadable, and leave the file's footer as it was."""
    metadata, content = pq.read_metadata(file), bytearray(file.read_bytes())
    group = metadata.row_group(0)
    (chunk,) = (c for c in map(group.column, range(group.num_columns)) if c.path_in_schema.startswith(name))
    start = chunk.dictionary_page_offset or chunk.data_page_offset
    content[start : start + chunk.total_compressed_size] = b"\xff" * chunk.total_compressed_size
    file.write_bytes(content)


def test_the_engine_is_built_when_it_is_needed_and_once(tmp_path: Path) -> None:
    rank = Rank(tmp_path, [[1]])
    rank.worker.turn()
    assert (rank.exchange().capacity, rank.num_built) == (0, 0)
    rank.exchange(prepare=True)
    rank.worker.turn()
    report = rank.exchange(prepare=True)
    assert (report.capacity, rank.num_built) == (4, 1)
    assert {"device", "torch", "triton", "python"} <= set(report.environment)


def test_leases_overlap_and_the_batch_stays_full(tmp_path: Path) -> None:
    rank = Rank(tmp_path, random_prompts(random.Random(1), 40))
    rank.exchange(prepare=True, leases=(lease(1, (0, 11)), lease(2, (20, 25), (11, 20))))
    rank.turn_until_idle()
    report = rank.exchange()
    assert [(r.lease_id, r.num_ok, r.is_done) for r in report.leases] == [(1, 11, True), (2, 14, True)]
    assert rank.exchange().leases == ()
    running = rank.engine.num_running_at_steps
    assert running == sorted(running, reverse=True), "the batch is full until the last rows are in it"
    assert running[0] == 4
    assert rank.engine.max_num_waiting <= 8, "rows are read ahead just enough"


def test_refused_rows_are_error_rows(tmp_path: Path) -> None:
    rank = Rank(tmp_path, [[1], None, [], [REFUSED_ID], [2]])
    rank.exchange(prepare=True, leases=(lease(1, (0, 5)),))
    rank.turn_until_idle()
    (report,) = rank.exchange().leases
    assert (report.num_read, report.num_ok, report.num_error, report.is_done) == (5, 2, 3, True)
    published = rank.exchange(publish=(0,)).published
    assert published[0][1].errors == {"empty_prompt": 1, "kv_too_small": 1, "null_prompt": 1}
    check_answers(read_output(rank.folder.path), [[1], None, [], [REFUSED_ID], [2]])


def test_a_solo_lease_has_one_row_in_flight(tmp_path: Path) -> None:
    rank = Rank(tmp_path, random_prompts(random.Random(2), 6))
    rank.exchange(prepare=True, leases=(lease(1, (0, 6), tokens_at_deaths=deaths(6), is_solo=True),))
    rank.turn_until_idle()
    assert rank.exchange().leases[0].is_done
    assert set(rank.engine.num_running_at_steps) == {1}


def test_rows_are_told_where_they_part_from_their_neighbours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared, other = [1] * 100, [2] * 80
    prompts: list[list[int] | None] = [
        [*shared, 3],
        [*other, 3],
        None,
        [*shared, 4],
        [*other, 4],
        [5] * 70,
        [6],
        [7],
    ]
    rank = Rank(tmp_path, prompts, capacity=10)
    added: list[tuple[str, tuple[int, ...]]] = []
    add_request = rank.engine.add_request

    def note(request: Request) -> None:
        added.append((request.request_id, request.prefix_ends))
        add_request(request)

    monkeypatch.setattr(rank.engine, "add_request", note)
    rank.exchange(prepare=True, leases=(lease(1, (0, 8)),))
    rank.turn_until_idle()
    rank.exchange(publish=(0,))
    check_answers(read_output(rank.folder.path), prompts)
    # Five rows are looked at together; the order in which they are added is the input's.
    ends = [(100,), (80,), (100,), (80,), (), (), ()]
    assert added == [(f"in.parquet#{row}", end) for row, end in zip([0, 1, 3, 4, 5, 6, 7], ends, strict=True)]


@pytest.mark.parametrize("seed", range(8))
def test_a_suspect_that_is_where_it_was_at_a_death_has_the_step_to_itself(tmp_path: Path, seed: int) -> None:
    print("seed", seed)
    random_ = random.Random(seed)
    prompts = random_prompts(random_, 60)
    at_deaths = {
        row: frozenset(random_.sample(range(8), random_.randrange(1, 3)))
        for row in random_.sample(range(60), random_.randrange(1, 25))
    }
    rank = Rank(tmp_path, prompts)
    fresh = [(row, row + 1) for row in range(60) if row not in at_deaths]
    suspects = lease(2, *((row, row + 1) for row in sorted(at_deaths)), tokens_at_deaths=at_deaths)
    rank.exchange(prepare=True, leases=(lease(1, *fresh), suspects))
    rank.turn_until_idle()
    assert all(report.is_done for report in rank.exchange().leases)
    shared = 0
    for step in rank.engine.tokens_at_steps:
        rows = {int(request_id.partition("#")[2]): number for request_id, number in step.items()}
        due = [row for row, number in rows.items() if number in at_deaths.get(row, ())]
        assert not due or len(rows) == 1
        shared += len(rows) > 1
    assert shared > 5, "all others run beside each other"


def test_a_death_says_nothing_of_rows_that_the_step_was_without(tmp_path: Path) -> None:
    prompts = random_prompts(random.Random(7), 12)
    prompts[3] = next(p for p in ([POISON_ID, i, i] for i in range(1, 99)) if len(expected_token_ids(p)) > 2)
    rank = Rank(tmp_path, prompts)
    own = {3: frozenset({2})}
    leases = (lease(1, (0, 3), (4, 12)), lease(2, (3, 4), tokens_at_deaths=own))
    rank.exchange(prepare=True, leases=leases)
    rank.turn_until_idle()
    with pytest.raises(EngineDead, match="poison"):
        rank.exchange()
    beside, alone = (read_lease_state(rank.plan, rank.folder.journal_file(0, 1, number)) for number in (1, 2))
    assert alone.tokens_of_suspects == {3: 2}
    assert len(beside.suspects) > 1
    assert set(beside.tokens_of_suspects.values()) <= {NO_STEP_YET}, "only who was being rendered"


class LateEngine(FakeEngine):
    """A step's failure is told by whatever waits for the device next."""

    has_failed = False

    def await_device(self) -> None:
        if self.has_failed:
            raise EngineDead("late")

    def step(self) -> list[RequestOutput]:
        self.await_device()
        return super().step()

    def try_step_only(self, request_ids: Collection[str]) -> list[RequestOutput] | None:
        self.await_device()
        return super().try_step_only(request_ids)


def test_what_fails_late_is_not_told_of_the_step_that_a_suspect_has_to_itself(tmp_path: Path) -> None:
    prompts = [next(p for p in ([i, i] for i in range(1, 99)) if len(expected_token_ids(p)) > 3), [7]]
    rank = Rank(tmp_path, prompts)
    rank.engine = engine = LateEngine(CONFIG)
    rank.exchange(prepare=True, leases=(lease(1, (0, 1)),))
    for _ in range(3):
        rank.worker.turn()
    engine.has_failed = True
    rank.exchange(leases=(lease(2, (1, 2), tokens_at_deaths={1: frozenset({0})}),))
    rank.worker.turn()
    with pytest.raises(EngineDead, match="late"):
        rank.exchange()
    earlier, own = (read_lease_state(rank.plan, rank.folder.journal_file(0, 1, number)) for number in (1, 2))
    assert earlier.tokens_of_suspects == {0: engine.num_generated_tokens()["in.parquet#0"] - 1}
    assert own.tokens_of_suspects == {1: NO_STEP_YET}, "no step was its own yet"


def test_what_a_rank_leaves_says_how_far_each_row_was(tmp_path: Path) -> None:
    prompts = random_prompts(random.Random(6), 20)
    prompts[1] = next(
        p for p in ([POISON_ID, i, i, i] for i in range(1, 99)) if len(expected_token_ids(p)) > 3
    )
    rank = Rank(tmp_path, prompts)
    rank.exchange(prepare=True, leases=(lease(1, (0, 12)), lease(2, (12, 20))))
    rank.turn_until_idle()
    with pytest.raises(EngineDead, match="poison"):
        rank.exchange()
    journal = rank.folder.journal_file(0, 1, 1)
    state = read_lease_state(rank.plan, journal)
    assert state.tokens_of_suspects[1] == 3
    assert set(state.tokens_of_suspects) == state.started - state.finished.keys()
    told = journal.with_suffix(".tokens")
    told.write_bytes(told.read_bytes()[:-1])
    assert read_lease_state(rank.plan, journal).tokens_of_suspects[1] is None
    told.unlink()
    assert read_lease_state(rank.plan, journal).tokens_of_suspects[1] is None


def test_a_look_ahead_is_bounded_and_makes_no_new_suspects_of_old_ones(tmp_path: Path) -> None:
    for is_suspect, most in ((False, 4 + 2 + 2), (True, 4)):
        rank = Rank(tmp_path / str(is_suspect), random_prompts(random.Random(5), 30))
        at_deaths = deaths(30) if is_suspect else {}
        rank.exchange(prepare=True, leases=(lease(1, (0, 30), tokens_at_deaths=at_deaths),))
        rank.worker.turn()
        state = read_journal_state(rank.plan, rank.folder.journal_file(0, 1, 1))
        assert 0 < len(state.started) <= most


def test_a_dead_engine_ends_the_rank_and_leaves_the_suspects_named(tmp_path: Path) -> None:
    rank = Rank(tmp_path, [[1], [POISON_ID], *([[i] for i in range(2, 30)])])
    rank.exchange(prepare=True, leases=(lease(1, (0, 30)),))
    rank.worker.turn()
    with pytest.raises(EngineDead, match="poison"):
        rank.exchange()
    state = read_journal_state(rank.plan, rank.folder.journal_file(0, 1, 1))
    assert 1 in state.started - state.finished.keys()
    assert len(state.started) < 30, "rows that were not touched are no suspects"


class Panic(BaseException):
    """What a library written in Rust raises when it breaks."""


@pytest.mark.parametrize("error", [Panic, MemoryError, SystemExit, RuntimeError])
def test_whatever_a_step_raises_ends_the_rank_aloud(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    rank = Rank(tmp_path, [[1]])

    def break_down() -> None:
        raise error("broken")

    monkeypatch.setattr(rank.engine, "step", break_down)
    rank.exchange(prepare=True, leases=(lease(1, (0, 1)),))
    rank.worker.run()
    with pytest.raises(EngineDead, match="broken"):
        rank.exchange()


def test_a_refusing_model_and_a_full_disk_are_the_jobs_business(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = Rank(tmp_path, [[1]])

    def refuse() -> Serving:
        raise ConfigError("unsupported")

    monkeypatch.setattr(rank.worker, "_build", refuse)
    rank.exchange(prepare=True)
    rank.worker.turn()
    assert rank.exchange().refused == "unsupported"

    rank = Rank(tmp_path / "b", [[1]])

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("jobs.worker.JournalWriter", full)
    rank.exchange(prepare=True, leases=(lease(1, (0, 1)),))
    rank.worker.turn()
    broken = rank.exchange().broken
    assert broken is not None
    assert "No space left" in broken


@pytest.mark.parametrize("column", ["note", "prompt_token_ids"])
def test_an_input_that_cannot_be_read_ends_the_job_by_its_name_and_blames_no_row(
    tmp_path: Path, column: str
) -> None:
    file, folder = tmp_path / "in.parquet", OutputFolder(tmp_path / "out")
    write_prompts(file, random_prompts(random.Random(5), 40), note=["x" * 100 + str(i) for i in range(40)])
    damage_column(file, column)
    plan = make_plan(file)
    told = f"input file '{file}' cannot be read: "
    for _ in range(2):
        driver, fleet = start_run(folder, plan)
        with pytest.raises((JobFailed, InputUnreadable), match=re.escape(told)):
            driver.run()
        assert (fleet.num_started, fleet.num_deaths) == (2, 0)
        assert not list((folder.state / "deaths").glob("*"))
        assert read_status(folder.path).num_error == 0
    worker = RankWorker(
        folder,
        plan,
        9,
        build_fake,
        publisher=InlineExecutor(),
        syncer=InlineExecutor(),
        renderer=InlineExecutor(),
    )
    worker.exchange(Orders(prepare=True, leases=(Lease(lease_id=1, shard_index=2, ranges=((0, 10),)),)), 0.0)
    while worker.turn():
        pass
    publish = (2,) if column == "note" else ()
    assert (worker.exchange(Orders(publish=publish), 0.0).broken or "").startswith(told)


def test_an_input_that_may_not_be_read_is_not_told_as_an_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = Rank(tmp_path, [[1]])

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("pipelines.source.ParquetRows", refuse)
    rank.exchange(prepare=True, leases=(lease(1, (0, 1)),))
    rank.worker.run()
    broken = rank.exchange().broken
    assert broken is not None
    assert broken.startswith(f"input file '{tmp_path}/in.parquet' cannot be read: ")


def test_draining_finishes_what_is_in_flight_and_starts_nothing(tmp_path: Path) -> None:
    rank = Rank(tmp_path, random_prompts(random.Random(3), 50))
    rank.exchange(prepare=True, leases=(lease(1, (0, 50)),))
    rank.worker.turn()
    rank.exchange(drain=True)
    rank.turn_until_idle()
    report = rank.exchange()
    assert report.is_drained
    assert report.leases[0].num_read == report.leases[0].num_ok < 50
    assert rank.exchange(stop=True).is_stopped


def test_samples_share_one_row(tmp_path: Path) -> None:
    rank = Rank(tmp_path, [[1], [2]], capacity=2, n=3)
    rank.exchange(prepare=True, leases=(lease(1, (0, 2)),))
    rank.turn_until_idle()
    rank.exchange()
    rank.exchange(publish=(0,))
    rows = read_output(rank.folder.path).to_pylist()
    assert [len(row["completion"]) for row in rows] == [3, 3]


def test_the_loop_and_the_exchange_run_side_by_side(tmp_path: Path) -> None:
    prompts = random_prompts(random.Random(4), 60)
    rank = Rank(tmp_path, prompts)
    with (
        ThreadPoolExecutor(1) as publisher,
        ThreadPoolExecutor(1) as syncer,
        ThreadPoolExecutor(1) as renderer,
    ):
        worker = RankWorker(
            rank.folder,
            rank.plan,
            1,
            rank.worker._build,
            publisher=publisher,
            syncer=syncer,
            renderer=renderer,
        )
        thread = threading.Thread(target=worker.run)
        thread.start()
        reports = [worker.exchange(Orders(prepare=True, leases=(lease(1, (0, 60)),)), 0.2)]
        deadline = time.monotonic() + 20
        while not (reports[-1].leases and reports[-1].leases[0].is_done) and time.monotonic() < deadline:
            reports.append(worker.exchange(Orders(), 0.2))
        reports.append(worker.exchange(Orders(publish=(0,)), 0.2))
        while not reports[-1].published and time.monotonic() < deadline:
            reports.append(worker.exchange(Orders(), 0.2))
        turns = reports[-1].num_turns
        time.sleep(0.1)
        assert worker.exchange(Orders(), 0.0).num_turns > turns, "an idle loop still turns"
        assert worker.exchange(Orders(stop=True), 0.2).is_stopped
        thread.join(10)
        assert not thread.is_alive()
    check_answers(read_output(rank.folder.path), prompts)


class SharedEngine(FakeEngine):
    """One of a group: others are at work while ``others_work``, until one of them is lost."""

    others_work = True
    is_lost = False

    @property
    def is_shared(self) -> bool:
        return True

    @property
    def is_group_busy(self) -> bool:
        return self.others_work

    def step(self) -> list[RequestOutput]:
        if self.is_lost:
            raise PeerLost("another rank is gone")
        return super().step()


def test_a_rank_without_rows_steps_with_its_group(tmp_path: Path) -> None:
    rank = Rank(tmp_path, random_prompts(random.Random(5), 8))
    rank.engine = engine = SharedEngine(CONFIG)
    rank.exchange(prepare=True)
    assert [rank.worker.turn() for _ in range(3)] == [True] * 3
    engine.others_work = False
    assert not rank.worker.turn(), "all of the group are idle"
    rank.exchange(leases=(lease(1, (0, 8)),))
    while engine.has_unfinished() or engine.num_steps < 5:
        rank.worker.turn()
    rank.exchange(drain=True)
    num_steps = engine.num_steps
    rank.worker.turn()
    assert rank.exchange().is_drained
    assert engine.num_steps == num_steps + 1, "others may need this rank's experts still"
    engine.is_lost = True
    rank.worker.turn()
    with pytest.raises(PeerLost, match="another rank is gone"):
        rank.exchange()

"""The driver over in-process ranks: whatever dies, every row comes out once with its own answer."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine import ConfigError, EngineConfig, EngineDead, RequestOutput
from pipelines.driver import Driver, JobFailed, Outcome, StopRequest
from pipelines.manifest import OutputFolder
from pipelines.rank_protocol import Orders, RankDied
from pipelines.report import read_runs, read_status
from pipelines.row_costs import RowCosts, estimate_costs
from pipelines.source import RowReader
from tests.fake_engine import POISON_ID, REFUSED_ID, FakeEngine, expected_token_ids
from tests.small_jobs import (
    InProcessFleet,
    check_answers,
    error_codes,
    make_plan,
    random_prompts,
    read_output,
    start_run,
    write_prompts,
)

CONFIG = EngineConfig(model="fake", max_num_seqs=4)


@pytest.fixture
def folder(tmp_path: Path) -> OutputFolder:
    return OutputFolder(tmp_path / "out")


def test_rows_come_out_once_in_input_order(tmp_path: Path, folder: OutputFolder) -> None:
    prompts = random_prompts(random.Random(1), 57)
    write_prompts(tmp_path / "in.parquet", prompts, tag=[f"t{i}" for i in range(57)])
    driver, _ = start_run(folder, make_plan(tmp_path / "in.parquet"), num_slots=3)
    assert driver.run() is Outcome.COMMITTED
    output = read_output(folder.path)
    check_answers(output, prompts)
    assert output.column("row_id").to_pylist() == [f"in.parquet#{i}" for i in range(57)]
    assert output.column("tag").to_pylist() == [f"t{i}" for i in range(57)]
    assert sorted(p.name for p in folder.path.iterdir())[0] == "_overnight"
    assert len(list(folder.path.glob("part-*-of-00006.parquet"))) == 6
    assert not list(folder.journals.iterdir())
    assert not list(folder.temporary.iterdir())


@pytest.mark.parametrize("seed", range(12))
def test_ranks_that_die_at_random_lose_and_double_nothing(
    tmp_path: Path, folder: OutputFolder, seed: int
) -> None:
    print("seed", seed)
    random_ = random.Random(seed)
    prompts = random_prompts(random_, random_.randrange(1, 80))
    for index in random_.sample(range(len(prompts)), len(prompts) // 8):
        prompts[index] = random_.choice([None, [], [REFUSED_ID]])
    write_prompts(tmp_path / "in.parquet", prompts)
    plan = make_plan(tmp_path / "in.parquet", rows_per_shard=random_.randrange(1, 30))
    driver, fleet = start_run(
        folder, plan, num_slots=random_.randrange(1, 4), capacity=3, random_=random_, chance=0.03
    )
    assert driver.run() is Outcome.COMMITTED
    output = read_output(folder.path)
    check_answers(output, prompts)
    status = read_status(folder.path)
    print("deaths", fleet.num_deaths, status)
    assert status.num_rank_deaths == fleet.num_deaths
    assert status.num_read == status.num_ok + status.num_error == len(prompts)
    assert status.num_error == output.column("status").to_pylist().count("error")


def test_c12a_a_rank_with_a_broken_engine_is_replaced(tmp_path: Path, folder: OutputFolder) -> None:
    prompts = random_prompts(random.Random(2), 120)
    write_prompts(tmp_path / "in.parquet", prompts)
    driver, fleet = start_run(
        folder,
        make_plan(tmp_path / "in.parquet", rows_per_shard=40),
        num_slots=4,
        make_engine=lambda number: FakeEngine(CONFIG, dies_at_step=10 if number == 2 else None),
    )
    assert driver.run() is Outcome.COMMITTED
    assert fleet.num_started == 5
    output = read_output(folder.path)
    check_answers(output, prompts)
    assert set(output.column("status").to_pylist()) == {"ok"}


@pytest.mark.parametrize("num_slots", [1, 3])
def test_c12b_a_poison_row_is_quarantined(tmp_path: Path, folder: OutputFolder, num_slots: int) -> None:
    prompts = random_prompts(random.Random(3), 60)
    prompts[17] = [5, POISON_ID]
    write_prompts(tmp_path / "in.parquet", prompts)
    driver, _ = start_run(folder, make_plan(tmp_path / "in.parquet", 20), num_slots=num_slots)
    assert driver.run() is Outcome.COMMITTED
    output = read_output(folder.path)
    check_answers(output, prompts)
    assert error_codes(output) == {"in.parquet#17": "engine_crash"}
    assert read_status(folder.path).num_rank_deaths == 2


def poison(num_tokens: int) -> list[int]:
    """A prompt that kills its rank when it has so many tokens."""
    prompts = ([POISON_ID, *[i] * num_tokens] for i in range(1, 1000))
    return next(prompt for prompt in prompts if len(expected_token_ids(prompt)) > num_tokens)


def check_quarantined(
    path: Path,
    folder: OutputFolder,
    prompts: list[list[int] | None],
    guilty: Collection[int],
    random_: random.Random,
) -> None:
    """Run a job on ranks of random number and size: these rows end as ``engine_crash``, and no other does."""
    write_prompts(path, prompts)
    driver, _ = start_run(
        folder,
        make_plan(path, random_.randrange(10, 80)),
        num_slots=random_.randrange(1, 4),
        capacity=random_.randrange(2, 9),
        random_=random_,
    )
    assert driver.run() is Outcome.COMMITTED
    output = read_output(folder.path)
    check_answers(output, prompts)
    assert error_codes(output) == {f"in.parquet#{row}": "engine_crash" for row in guilty}


@pytest.mark.parametrize("seed", range(30))
def test_a_row_that_kills_two_ranks_is_quarantined_and_no_other_is(
    tmp_path: Path, folder: OutputFolder, seed: int
) -> None:
    print("seed", seed)
    random_ = random.Random(seed)
    prompts = random_prompts(random_, 80)
    guilty = random_.randrange(80)
    prompts[guilty] = poison(random_.randrange(6))
    check_quarantined(tmp_path / "in.parquet", folder, prompts, [guilty], random_)
    assert read_status(folder.path).num_rank_deaths == 2


@pytest.mark.parametrize("seed", range(20))
def test_each_of_many_rows_that_kill_is_quarantined_in_two_deaths_of_its_own(
    tmp_path: Path, folder: OutputFolder, seed: int
) -> None:
    """Some at once, others a few tokens behind a death that another one caused."""
    print("seed", seed)
    random_ = random.Random(seed)
    prompts = random_prompts(random_, 120)
    guilty = random_.sample(range(120), random_.randrange(2, 20))
    latest = random_.randrange(6)
    for row in guilty:
        prompts[row] = poison(random_.randint(0, latest))
    check_quarantined(tmp_path / "in.parquet", folder, prompts, guilty, random_)
    assert read_status(folder.path).num_rank_deaths <= 2 * len(guilty)


def test_a_job_whose_ranks_never_start_fails(tmp_path: Path, folder: OutputFolder) -> None:
    write_prompts(tmp_path / "in.parquet", [[1], [2]])

    def broken(number: int) -> FakeEngine:
        raise RuntimeError("no device")

    driver, fleet = start_run(folder, make_plan(tmp_path / "in.parquet"), make_engine=broken)
    with pytest.raises(JobFailed, match="no device"):
        driver.run()
    assert fleet.num_started == 6
    assert not list(folder.path.glob("*.parquet"))


class DeadEngine(FakeEngine):
    """Is built, takes rows, and dies of the first step, whatever is in it."""

    def _step(self, only: Collection[str]) -> list[RequestOutput]:
        raise EngineDead("never steps")


def test_a_job_whose_ranks_all_die_at_work_fails_before_all_rows_are_blamed(
    tmp_path: Path, folder: OutputFolder
) -> None:
    write_prompts(tmp_path / "in.parquet", random_prompts(random.Random(9), 200))
    driver, fleet = start_run(
        folder,
        make_plan(tmp_path / "in.parquet"),
        num_slots=2,
        make_engine=lambda number: DeadEngine(CONFIG),
    )
    with pytest.raises(JobFailed, match="never steps"):
        driver.run()
    assert fleet.num_started <= 2 * (3 + 10)
    assert read_status(folder.path).num_error < 20


def test_a_model_that_a_rank_refuses_refuses_the_job(tmp_path: Path, folder: OutputFolder) -> None:
    write_prompts(tmp_path / "in.parquet", [[1], [2]])

    def refusing(number: int) -> FakeEngine:
        raise ConfigError("tensor x is missing")

    driver, _ = start_run(folder, make_plan(tmp_path / "in.parquet"), make_engine=refusing)
    with pytest.raises(ConfigError, match="tensor x is missing"):
        driver.run()


@pytest.mark.parametrize("how", [StopRequest.NOW, StopRequest.DRAIN])
def test_a_stopped_job_goes_on_where_it_was(tmp_path: Path, folder: OutputFolder, how: StopRequest) -> None:
    prompts = random_prompts(random.Random(4), 90)
    write_prompts(tmp_path / "in.parquet", prompts)
    plan = make_plan(tmp_path / "in.parquet", 15)
    driver, fleet = start_run(folder, plan)
    wait, num_waits = fleet.wait, 0

    def wait_and_stop(timeout_s: float) -> list:
        nonlocal num_waits
        num_waits += 1
        if num_waits == 12:
            driver.request_stop(how)
        return wait(timeout_s)

    fleet.wait = wait_and_stop  # type: ignore[method-assign]
    assert driver.run() is Outcome.STOPPED
    before = read_status(folder.path)
    assert 0 < before.num_read < 90
    again, _ = start_run(folder, plan)
    assert again.run() is Outcome.COMMITTED
    after = read_status(folder.path)
    assert (after.num_reused, after.num_run) == (before.num_ok, 90 - before.num_ok)
    check_answers(read_output(folder.path), prompts)


def test_a_stop_while_lengths_are_read_leaves_no_file_open_and_reads_no_more(
    tmp_path: Path, folder: OutputFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_prompts(tmp_path / "in.parquet", random_prompts(random.Random(5), 40))
    driver, _ = start_run(folder, make_plan(tmp_path / "in.parquet", 10))
    made: list[RowReader] = []

    def make(*arguments: Any, **options: Any) -> RowReader:
        made.append(RowReader(*arguments, **options))
        return made[-1]

    def estimate(*arguments: Any) -> RowCosts:
        driver.request_stop(StopRequest.DRAIN)
        return estimate_costs(*arguments)

    monkeypatch.setattr("pipelines.driver.RowReader", make)
    monkeypatch.setattr("pipelines.driver.estimate_costs", estimate)
    assert driver.run() is Outcome.STOPPED
    assert len(made) == 1
    links = [os.path.realpath(path) for path in Path("/proc/self/fd").iterdir()]
    assert str(tmp_path / "in.parquet") not in links


def after_exchanges(fleet: InProcessFleet, number: int, then: Callable[[], list]) -> None:
    """Have the fleet say what ``then`` says, from this exchange on."""
    wait, num_waits = fleet.wait, 0

    def wait_or_else(timeout_s: float) -> list:
        nonlocal num_waits
        num_waits += 1
        return wait(timeout_s) if num_waits < number else then()

    fleet.wait = wait_or_else  # type: ignore[method-assign]


def stop_all(driver: Driver, fleet: InProcessFleet, death: RankDied) -> None:
    """Have the driver be told to stop after some exchanges, and its ranks be ended by the same hand."""

    def end_all() -> list:
        driver.request_stop(StopRequest.NOW)
        return [(slot, death) for slot in fleet.workers]

    after_exchanges(fleet, 9, end_all)


@pytest.mark.parametrize("has_lost_peer", [False, True])
def test_ranks_that_end_with_a_stop_leave_no_suspects(
    tmp_path: Path, folder: OutputFolder, has_lost_peer: bool
) -> None:
    """A scheduler that ends a job tells the driver and each rank: rows in flight did nothing, however often."""
    prompts = random_prompts(random.Random(12), 60)
    write_prompts(tmp_path / "in.parquet", prompts)
    plan = make_plan(tmp_path / "in.parquet", 20)
    for _ in range(4):
        driver, fleet = start_run(folder, plan)
        stop_all(driver, fleet, RankDied("it was told to end", has_lost_peer))
        assert driver.run() is Outcome.STOPPED
        assert not folder.deaths.exists() or not list(folder.deaths.iterdir())
        assert read_status(folder.path).num_rank_deaths == 0
    assert start_run(folder, plan)[0].run() is Outcome.COMMITTED
    check_answers(read_output(folder.path), prompts)


def test_a_finished_job_run_again_starts_no_rank(tmp_path: Path, folder: OutputFolder) -> None:
    write_prompts(tmp_path / "in.parquet", [[1], [2]])
    plan = make_plan(tmp_path / "in.parquet")
    start_run(folder, plan)[0].run()
    again, fleet = start_run(folder, plan)
    assert again.run() is Outcome.COMMITTED
    assert fleet.num_started == 0


def test_what_only_waits_to_be_published_needs_no_engine(tmp_path: Path, folder: OutputFolder) -> None:
    prompts = random_prompts(random.Random(5), 20)
    write_prompts(tmp_path / "in.parquet", prompts)
    plan = make_plan(tmp_path / "in.parquet", 20)
    driver, _ = start_run(folder, plan, num_slots=1)
    orders_for = driver._orders_for

    def without_publishing(slot: int):  # the driver dies between the last row and the part
        orders = orders_for(slot)
        if orders.publish:
            raise KeyboardInterrupt
        return orders

    driver._orders_for = without_publishing  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        driver.run()

    def never(number: int) -> FakeEngine:
        raise AssertionError("built an engine for nothing")

    again, _ = start_run(folder, plan, num_slots=1, make_engine=never)
    assert again.run() is Outcome.COMMITTED
    check_answers(read_output(folder.path), prompts)
    assert read_status(folder.path).num_run == 0


def test_a_hanging_rank_is_ended(tmp_path: Path, folder: OutputFolder) -> None:
    prompts = random_prompts(random.Random(6), 30)
    write_prompts(tmp_path / "in.parquet", prompts)
    driver, fleet = start_run(folder, make_plan(tmp_path / "in.parquet"), num_slots=2)
    driver._stall_timeout_s = 0.5
    wait, kill = fleet.wait, fleet.kill
    stuck = {0}

    def wait_without_the_stuck(timeout_s: float) -> list:
        events = wait(timeout_s)
        # It built its engine and took rows; from then on it is silent.
        return [
            (slot, e)
            for slot, e in events
            if slot not in stuck or getattr(e, "capacity", 0) == 0 or not e.leases
        ]

    def kill_and_free(slot: int) -> None:
        stuck.discard(slot)
        kill(slot)

    fleet.wait, fleet.kill = wait_without_the_stuck, kill_and_free  # type: ignore[method-assign]
    assert driver.run() is Outcome.COMMITTED
    check_answers(read_output(folder.path), prompts)
    assert read_status(folder.path).num_rank_deaths == 1


def test_more_errors_than_allowed_stop_the_job_and_a_larger_allowance_goes_on(
    tmp_path: Path, folder: OutputFolder
) -> None:
    prompts = random_prompts(random.Random(7), 200)
    for index in range(0, 200, 10):
        prompts[index] = None
    write_prompts(tmp_path / "in.parquet", prompts)
    plan = make_plan(tmp_path / "in.parquet", 20)
    driver, _ = start_run(folder, plan, max_errors=3)
    assert driver.run() is Outcome.TOO_MANY_ERRORS
    stopped = read_status(folder.path)
    assert 3 < stopped.num_error <= stopped.num_read < 200
    again, fleet = start_run(folder, plan, max_errors=3)
    assert again.run() is Outcome.TOO_MANY_ERRORS
    assert fleet.num_started == 0
    assert read_status(folder.path).num_read == stopped.num_read
    last, _ = start_run(folder, plan, max_errors=20)
    assert last.run() is Outcome.COMMITTED
    check_answers(read_output(folder.path), prompts)


def test_a_row_keeps_its_death_when_the_driver_is_started_anew(tmp_path: Path, folder: OutputFolder) -> None:
    prompts = random_prompts(random.Random(8), 40)
    prompts[11] = [5, POISON_ID]
    write_prompts(tmp_path / "in.parquet", prompts)
    plan = make_plan(tmp_path / "in.parquet", 20)
    driver, fleet = start_run(folder, plan, num_slots=1)
    start = fleet.start

    def start_once(slot: int) -> None:
        if fleet.num_started:
            raise KeyboardInterrupt  # the driver goes with the first rank that the row kills
        start(slot)

    fleet.start = start_once  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        driver.run()
    again, fleet = start_run(folder, plan, num_slots=1)
    assert again.run() is Outcome.COMMITTED
    assert read_status(folder.path).num_rank_deaths == 2, "the first death counts"
    output = read_output(folder.path)
    check_answers(output, prompts)
    assert error_codes(output) == {"in.parquet#11": "engine_crash"}


def test_ranks_come_and_go_with_their_places(tmp_path: Path, folder: OutputFolder) -> None:
    prompts = random_prompts(random.Random(9), 120)
    write_prompts(tmp_path / "in.parquet", prompts)
    driver, fleet = start_run(folder, make_plan(tmp_path / "in.parquet", 20), num_slots=3)
    places, most = {0}, 0
    wait = fleet.wait

    def wait_and_change(timeout_s: float) -> list:
        nonlocal most
        done = driver._ledger.num_ok
        places.clear()
        places.update({0} if done < 20 else {0, 1, 2} if done < 60 else {2})
        most = max(most, len(fleet.workers))
        gone = [slot for slot in fleet.workers if slot not in places]
        events = [event for event in wait(timeout_s) if event[0] not in gone]
        return events + [(slot, RankDied("the node is gone\nwith all that was on it")) for slot in gone]

    fleet.wait = wait_and_change  # type: ignore[method-assign]
    fleet.has_place = lambda slot: slot in places  # type: ignore[method-assign]
    assert driver.run() is Outcome.COMMITTED
    check_answers(read_output(folder.path), prompts)
    assert most == 3
    (run,) = read_runs(folder)
    assert [(loss.rank, loss.reason) for loss in run.losses] == [
        (0, "the node is gone"),
        (1, "the node is gone"),
    ]
    assert all(loss.num_rows > 0 and loss.num_tokens > 0 and loss.rank_seconds > 0 for loss in run.losses)
    report = json.loads(folder.report_file.read_text())
    assert [loss["rank"] for loss in report["ranks_lost"]] == [0, 1]
    assert "the node is gone" in folder.page_file.read_text()


def test_too_few_places_for_too_long_are_a_clean_stop(tmp_path: Path, folder: OutputFolder) -> None:
    write_prompts(tmp_path / "in.parquet", random_prompts(random.Random(10), 100))
    driver, fleet = start_run(folder, make_plan(tmp_path / "in.parquet"), num_slots=2)
    driver._min_ranks, driver._place_timeout_s = 2, 0.2
    fleet.has_place = lambda slot: slot == 0  # type: ignore[method-assign]
    make_slow = FakeEngine(CONFIG, step_s=0.05)
    fleet._make_engine = lambda number: make_slow
    assert driver.run() is Outcome.STOPPED
    again, _ = start_run(folder, make_plan(tmp_path / "in.parquet"), num_slots=2)
    assert again.run() is Outcome.COMMITTED


def test_two_ranks_on_one_gpu_are_refused(tmp_path: Path, folder: OutputFolder) -> None:
    write_prompts(tmp_path / "in.parquet", random_prompts(random.Random(11), 40))
    for devices, is_refused in (({0: "GPU-a", 1: "GPU-a"}, True), ({0: "GPU-a", 1: "GPU-b"}, False)):
        driver, fleet = start_run(folder, make_plan(tmp_path / "in.parquet"), num_slots=2)
        exchange = fleet._exchange

        def with_device(slot: int, orders: Orders, exchange=exchange, devices=devices):
            report = exchange(slot, orders)
            return replace(report, device=devices[slot] if report.num_turns > 1 else "")

        fleet._exchange = with_device  # type: ignore[method-assign]
        if is_refused:
            with pytest.raises(ConfigError, match=r"ranks \d and \d were both given the GPU GPU-a"):
                driver.run()
        else:
            assert driver.run() is Outcome.COMMITTED


def test_a_gpu_whose_rank_died_may_be_given_again(tmp_path: Path, folder: OutputFolder) -> None:
    prompts = random_prompts(random.Random(12), 60)
    write_prompts(tmp_path / "in.parquet", prompts)
    driver, fleet = start_run(
        folder, make_plan(tmp_path / "in.parquet"), num_slots=2, random_=random.Random(12), chance=0.05
    )
    exchange = fleet._exchange

    def with_device(slot: int, orders: Orders):
        report = exchange(slot, orders)
        return report if isinstance(report, RankDied) else replace(report, device=f"GPU-{slot}")

    fleet._exchange = with_device  # type: ignore[method-assign]
    assert driver.run() is Outcome.COMMITTED
    assert fleet.num_deaths > 0
    check_answers(read_output(folder.path), prompts)


def stop_unheard(driver: Driver, fleet: InProcessFleet) -> None:
    """Have the driver stop after some exchanges, while its ranks work on and are not heard any more."""

    def work_on() -> list:
        driver.request_stop(StopRequest.NOW)
        for worker in fleet.workers.values():
            worker.turn()
        time.sleep(0.1)
        return []

    after_exchanges(fleet, 8, work_on)


def test_rows_that_a_rank_journals_after_its_last_word_are_counted(
    tmp_path: Path, folder: OutputFolder
) -> None:
    prompts = random_prompts(random.Random(10), 200)
    write_prompts(tmp_path / "in.parquet", prompts)
    plan = make_plan(tmp_path / "in.parquet", 100)
    before = 0
    for _ in range(2):  # the second run goes on with what the first left
        driver, fleet = start_run(folder, plan, num_slots=1)
        stop_unheard(driver, fleet)
        assert driver.run() is Outcome.STOPPED
        status = read_status(folder.path)
        assert (status.num_reused, status.num_run) == (before, status.num_ok - before)
        assert status.num_run > 0
        before = status.num_ok
    assert start_run(folder, plan)[0].run() is Outcome.COMMITTED
    check_answers(read_output(folder.path), prompts)

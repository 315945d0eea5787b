"""Slices of one job: drivers side by side on one output folder, and what they keep from each other."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

import pytest

from engine import ConfigError, EngineConfig
from pipelines.driver import Driver, Outcome
from pipelines.manifest import DriverLock, OutputFolder, check_folder, claim_run, is_driver_alive, write_plan
from pipelines.plan import Plan, slice_of_shards
from pipelines.report import read_status
from tests.fake_engine import FakeEngine
from tests.small_jobs import (
    InProcessFleet,
    check_answers,
    make_plan,
    random_prompts,
    read_output,
    write_prompts,
)

CONFIG = EngineConfig(model="fake", max_num_seqs=4)


def start_slice(
    folder: OutputFolder, plan: Plan, index: int, count: int, *, seed: int = 0, step_s: float = 0.0
) -> Driver:
    check_folder(folder, plan)
    write_plan(folder, plan)
    run = claim_run(folder)
    shards = slice_of_shards(len(plan.shards), index, count)
    fleet = InProcessFleet(
        folder,
        plan,
        run,
        2,
        make_engine=lambda number: FakeEngine(CONFIG, step_s=step_s),
        random_=random.Random(seed),
        chance=0.02,
    )
    return Driver(folder, plan, fleet, run=run, shards=shards)


@pytest.mark.parametrize(("num_shards", "count"), [(0, 3), (1, 3), (7, 3), (12, 4), (5, 1)])
def test_slices_are_all_shards_once(num_shards: int, count: int) -> None:
    slices = [slice_of_shards(num_shards, index, count) for index in range(count)]
    assert [shard for part in slices for shard in part] == list(range(num_shards))
    assert max(map(len, slices)) - min(map(len, slices)) <= 1


@pytest.mark.parametrize("seed", range(4))
def test_slices_side_by_side_write_every_row_once(tmp_path: Path, seed: int) -> None:
    print("seed", seed)
    folder = OutputFolder(tmp_path / "out")
    prompts = random_prompts(random.Random(seed), 130)
    write_prompts(tmp_path / "in.parquet", prompts)
    plan = make_plan(tmp_path / "in.parquet", rows_per_shard=10)
    outcomes: list[Outcome] = []
    write_plan(folder, plan)

    def work(index: int) -> None:
        with DriverLock(folder, slice_of_shards(len(plan.shards), index, 3)):
            outcomes.append(start_slice(folder, plan, index, 3, seed=seed * 3 + index).run())

    threads = [threading.Thread(target=work, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes == [Outcome.COMMITTED] * 3
    check_answers(read_output(folder.path), prompts)
    status = read_status(folder.path)
    assert status.is_finished
    assert not status.is_running
    assert status.num_runs == 3
    assert not list(folder.journals.iterdir())


def test_ranges_that_meet_exclude_each_other(tmp_path: Path) -> None:
    folder = OutputFolder(tmp_path / "out")
    write_prompts(tmp_path / "in.parquet", [[1]] * 12)
    plan = make_plan(tmp_path / "in.parquet", rows_per_shard=1)
    write_plan(folder, plan)

    def lock(index: int, count: int) -> DriverLock:
        return DriverLock(folder, slice_of_shards(12, index, count))

    with lock(1, 3):
        for other in (DriverLock(folder), lock(1, 3), lock(0, 2), lock(1, 2), lock(5, 12)):
            with pytest.raises(ConfigError, match="another run is at work"), other:
                pass
        with lock(0, 3), lock(2, 3):
            assert is_driver_alive(folder)
        assert is_driver_alive(folder, range(4, 8))
        assert not is_driver_alive(folder, range(0, 4))
        empty = slice_of_shards(1, 1, 3)
        with DriverLock(folder, empty), DriverLock(folder, empty):
            pass
    with DriverLock(folder), pytest.raises(ConfigError, match="another run is at work"), lock(0, 12):
        pass
    assert not is_driver_alive(folder)


def test_a_slice_cleans_up_behind_its_own_shards_only(tmp_path: Path) -> None:
    folder = OutputFolder(tmp_path / "out")
    write_prompts(tmp_path / "in.parquet", [[1]] * 4)
    plan = make_plan(tmp_path / "in.parquet", rows_per_shard=1)
    write_plan(folder, plan)
    for name in ("00000.000001-1", "00001.json.00001.000001-1", "00002.000001-1", "report.json-1-1"):
        (folder.temporary / name).touch()
    start_slice(folder, plan, 0, 2)
    assert sorted(path.name for path in folder.temporary.iterdir()) == ["00002.000001-1", "report.json-1-1"]


def test_the_status_tells_of_all_slices_at_work_and_of_none_that_was_killed(tmp_path: Path) -> None:
    folder = OutputFolder(tmp_path / "out")
    prompts = random_prompts(random.Random(5), 80)
    write_prompts(tmp_path / "in.parquet", prompts)
    plan = make_plan(tmp_path / "in.parquet", rows_per_shard=10)
    killed = start_slice(folder, plan, 0, 1)
    killed._record.num_in_flight = 1000
    killed._watch.save()  # it was killed: it says "running" for ever
    drivers = [start_slice(folder, plan, index, 2, step_s=0.01) for index in range(2)]
    for driver in drivers:
        driver._watch.save()

    def work(index: int) -> None:
        with DriverLock(folder, slice_of_shards(len(plan.shards), index, 2)):
            drivers[index].run()

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    most = 0
    while any(thread.is_alive() for thread in threads):
        status = read_status(folder.path)
        assert status.num_in_flight < 1000
        most = max(most, len(status.live_runs))
        time.sleep(0.01)
    assert most == 2
    assert read_status(folder.path).live_runs == ()
    check_answers(read_output(folder.path), prompts)

"""Whole jobs on a real local Ray, with a fake engine: processes are killed, and a rerun sets it right."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pipelines.manifest import OutputFolder
from pipelines.report import JobStatus, read_runs, read_status
from tests.conftest import ROOT
from tests.fake_engine import POISON_ID
from tests.marked_processes import JOB_MARK, marked_processes, start_marked
from tests.small_jobs import check_answers, random_prompts, read_output, write_prompts

pytestmark = [pytest.mark.ray, pytest.mark.kill, pytest.mark.timeout(400)]

MODEL = ROOT / "examples" / "bard" / "model"


class Job:
    """A job's driver process and all that it starts, told apart by a mark in their environment."""

    def __init__(self, tmp_path: Path, *overrides: str) -> None:
        self.input, self.output = tmp_path / "in", tmp_path / "out"
        self._overrides = overrides
        self._mark = uuid.uuid4().hex
        self._driver: subprocess.Popen[bytes] | None = None

    def start(self, builder: str = "build_slow") -> subprocess.Popen[bytes]:
        arguments = [builder, str(MODEL), str(self.input), str(self.output), "2", *self._overrides]
        self._driver = start_marked(self._mark, "tests.end_to_end.run_fake_job", *arguments)
        return self._driver

    def run(self, builder: str = "build_fast") -> int:
        return self.start(builder).wait(120)

    def processes(self, title: bytes = b"") -> list[int]:
        """Live processes that this job's driver started, those whose title holds ``title``."""
        return marked_processes(f"{JOB_MARK}={self._mark}", title)

    def wait_until(self, is_so: Callable[[JobStatus], bool]) -> JobStatus:
        """Look at the job's status from outside until ``is_so``."""
        assert self._driver is not None
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            assert self._driver.poll() is None, f"the driver ended with {self._driver.returncode}"
            if (self.output / "_overnight" / "plan.json").exists():
                status = read_status(self.output)
                if is_so(status):
                    return status
            time.sleep(0.05)
        raise TimeoutError("the job did not get there")

    def is_gone(self, timeout_s: float = 30.0) -> bool:
        """Whether all processes end within a time that leaves room for a machine at work on other tests."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and self.processes():
            time.sleep(0.1)
        return not self.processes()


@pytest.fixture
def make_job(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def make(*overrides: str) -> Job:
        jobs.append(Job(tmp_path, *overrides))
        return jobs[-1]

    yield make
    for job in jobs:
        for pid in job.processes():
            os.kill(pid, signal.SIGKILL)


def test_c02_a_killed_driver_and_a_killed_actor_double_and_lose_nothing(make_job: Callable[..., Job]) -> None:
    job = make_job("input.rows_per_shard=100")
    prompts = random_prompts(random.Random(7), 400)
    for index in range(4):
        write_prompts(job.input / f"{index}.parquet", prompts[index * 100 : index * 100 + 100])

    driver = job.start()
    job.wait_until(lambda status: status.num_ok > 60)
    check_environments(driver.pid)
    os.kill(job.processes(b"RankActor")[0], signal.SIGKILL)
    job.wait_until(lambda status: status.num_rank_deaths == 1 and status.num_shards_committed >= 1)
    driver.kill()
    driver.wait()
    assert job.is_gone(), "processes of a killed job live on"
    stopped = read_status(job.output)
    assert 60 < stopped.num_ok < 400
    assert not stopped.is_running

    assert job.run() == 0
    assert job.is_gone()
    output = read_output(job.output)
    check_answers(output, prompts)
    assert set(output.column("status").to_pylist()) == {"ok"}
    expected_ids = [f"{i // 100}.parquet#{i % 100}" for i in range(400)]
    assert output.column("row_id").to_pylist() == expected_ids
    finished = read_status(job.output)
    assert (finished.num_reused, finished.num_run) == (stopped.num_ok, 400 - stopped.num_ok)
    assert not list((job.output / "_overnight" / "tmp").iterdir())
    assert not list((job.output / "_overnight" / "journals").iterdir())


def test_a_stopped_job_says_75_and_goes_on_when_run_again(make_job: Callable[..., Job]) -> None:
    job = make_job()
    prompts = random_prompts(random.Random(8), 600)
    write_prompts(job.input / "in.parquet", prompts)
    num_ok = 0
    for number in (signal.SIGTERM, signal.SIGUSR1):
        driver = job.start()
        job.wait_until(lambda status, before=num_ok: status.is_running and status.num_ok > before + 40)
        driver.send_signal(number)
        assert driver.wait(20) == 75
        assert job.is_gone()
        stopped = read_status(job.output)
        assert num_ok + 40 < stopped.num_ok < 600
        assert stopped.num_reused == num_ok
        num_ok = stopped.num_ok
    page = job.output / "_overnight" / "report.html"
    page.unlink()
    driver = job.start("build_fast")
    while not page.exists():
        assert driver.poll() is None
        time.sleep(0.02)
    for _ in range(2):  # too late to stop anything, but not to be heard
        driver.send_signal(signal.SIGTERM)
        time.sleep(0.2)
    assert driver.wait(6) == 0
    assert job.is_gone()
    check_answers(read_output(job.output), prompts)
    assert read_status(job.output).num_reused == num_ok


def check_environments(pid: int) -> None:
    """No process of a job's Ray hides what it was started with.

    The watchdog knows them by it, and Ray's agents write their titles over it unless they are told not to.
    """
    started = descendants(pid)
    assert len(started) > 5
    inherited = {name.encode() for name in os.environ} - {b"RAY_ADDRESS"}
    for pid in started:
        found = {item.partition(b"=")[0] for item in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")}
        assert inherited <= found, Path(f"/proc/{pid}/cmdline").read_bytes()


def descendants(pid: int) -> list[int]:
    """Processes that a process started, and those that they did."""
    parents = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found = [pid]
    for parent in found:
        found += [child for child, its in parents.items() if its == parent]
    return found[1:]


@pytest.mark.parametrize("harm", [signal.SIGSTOP, signal.SIGKILL])
def test_a_job_is_stopped_in_time_though_its_ray_is_gone_or_answers_nothing(
    make_job: Callable[..., Job], harm: signal.Signals
) -> None:
    job = make_job()
    prompts = random_prompts(random.Random(12), 600)
    write_prompts(job.input / "in.parquet", prompts)
    driver = job.start()
    job.wait_until(lambda status: status.num_ok > 40)
    for pid in job.processes(b"gcs_server") + job.processes(b"raylet/raylet"):
        os.kill(pid, harm)
    driver.send_signal(signal.SIGTERM)
    told_at = time.monotonic()
    # Two seconds, with room for a busy machine: one that asks Ray again waits for eight and says something else.
    assert driver.wait(6) == 75
    print("it took", time.monotonic() - told_at)
    assert job.is_gone()
    stopped = read_status(job.output)
    assert 40 < stopped.num_ok < 600
    assert not stopped.is_running
    (run,) = read_runs(OutputFolder(job.output))
    assert run.outcome == "stopped"


def test_a_job_with_a_time_limit_stops_before_it_and_goes_on_when_run_again(
    make_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job()
    prompts = random_prompts(random.Random(11), 6000)
    write_prompts(job.input / "in.parquet", prompts)
    monkeypatch.setenv("TEST_LIMIT_S", "30")
    started = time.monotonic()
    driver = job.start()
    assert driver.wait(120) == 75
    assert time.monotonic() - started < 50, "with room for a busy machine"
    assert job.is_gone()
    stopped = read_status(job.output)
    assert 0 < stopped.num_ok < 6000
    monkeypatch.delenv("TEST_LIMIT_S")
    assert job.run() == 0
    check_answers(read_output(job.output), prompts)
    assert read_status(job.output).num_reused == stopped.num_ok


def test_a_job_that_is_stopped_at_any_moment_of_its_start_says_75_and_leaves_nothing(
    tmp_path: Path, make_job: Callable[..., Job]
) -> None:
    write_prompts(tmp_path / "in" / "in.parquet", [[1]])
    numbers = itertools.cycle([signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
    for title, delay_s in [
        (b"reaper.py", 0.0),
        (b"gcs_server", 1.0),
        (b"raylet/raylet", 0.5),
        (b"raylet/raylet", 1.5),
    ]:
        job = make_job()
        driver = job.start()
        while not job.processes(title):
            assert driver.poll() is None
            time.sleep(0.02)
        time.sleep(delay_s)
        number = next(numbers)
        driver.send_signal(number)
        told_at = time.monotonic()
        # Two seconds, with room for a busy machine: a whole start of Ray takes longer than that.
        code = driver.wait(60)
        print(title, delay_s, number.name, "took", time.monotonic() - told_at)
        assert code == 75
        assert time.monotonic() - told_at < 4
        assert job.is_gone(10)
        assert not job.output.exists()


def test_c12b_a_row_that_kills_its_process_is_quarantined(make_job: Callable[..., Job]) -> None:
    job = make_job("output.max_error_rate=0.001")
    prompts = random_prompts(random.Random(9), 60)
    prompts[23] = [9, POISON_ID]
    write_prompts(job.input / "in.parquet", prompts)
    assert job.run("build_killed") == 3
    output = read_output(job.output)
    check_answers(output, prompts)
    errors = [(row["row_id"], row["error"]) for row in output.to_pylist() if row["status"] == "error"]
    assert errors == [("in.parquet#23", "engine_crash")]
    assert read_status(job.output).num_rank_deaths == 2


def test_a_rank_that_hangs_is_noticed_and_its_row_quarantined(make_job: Callable[..., Job]) -> None:
    job = make_job("output.max_error_rate=1.0", "cluster.stall_timeout_s=6.0")
    prompts = random_prompts(random.Random(10), 60)
    prompts[31] = [9, POISON_ID]
    write_prompts(job.input / "in.parquet", prompts)
    assert job.run("build_hanging") == 0
    assert job.is_gone()
    output = read_output(job.output)
    check_answers(output, prompts)
    errors = [(row["row_id"], row["error"]) for row in output.to_pylist() if row["status"] == "error"]
    assert errors == [("in.parquet#31", "engine_crash")]
    assert read_status(job.output).num_rank_deaths == 2

"""Two ranks on two GPUs: one dies and the other goes on, and no death leaves memory behind."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pipelines.manifest import OutputFolder
from pipelines.report import read_runs, read_status
from tests.conftest import ROOT
from tests.marked_processes import JOB_MARK, marked_processes, start_marked
from tests.ray_cluster import open_cluster
from tests.small_jobs import random_prompts, read_output, write_prompts

pytestmark = [pytest.mark.multi_gpu, pytest.mark.ray, pytest.mark.kill, pytest.mark.timeout(900)]

MODEL = ROOT / "tests" / "data" / "tiny"
SLACK_MIB = 64


def used_mib() -> list[int]:
    """Memory in use on each GPU."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return [int(line) for line in subprocess.check_output(command, text=True).split()]


class Job:
    """A job on two GPUs, its driver, and its processes by a mark in their environment."""

    def __init__(self, tmp_path: Path) -> None:
        self.output = tmp_path / "out"
        self.prompts = random_prompts(random.Random(1), 240)
        write_prompts(tmp_path / "in" / "a.parquet", self.prompts)
        self.command = ["run", "--model", str(MODEL), "--input", str(tmp_path / "in")]
        self.command += ["--output", str(self.output), "--num-ranks", "2"]
        for setting in (
            "engine.device=cuda",
            "engine.max_num_seqs=4",
            "engine.max_model_len=256",
            "input.rows_per_shard=20",
            "sampling.max_tokens=64",
            "sampling.ignore_eos=true",
        ):
            self.command += ["--set", setting]
        self.mark = uuid.uuid4().hex

    def start(self) -> subprocess.Popen[bytes]:
        return start_marked(self.mark, "jobs.cli", *self.command)

    def processes(self, title: bytes = b"") -> list[int]:
        return marked_processes(f"{JOB_MARK}={self.mark}", title)

    def num_ok(self) -> int:
        return read_status(self.output).num_ok if (self.output / "_overnight" / "plan.json").exists() else 0


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    job = Job(tmp_path)
    yield job
    for pid in job.processes():
        os.kill(pid, signal.SIGKILL)


def wait_until(is_so: Callable[[], bool], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline, "it did not get there"
        time.sleep(0.1)


def num_in_use(before: list[int]) -> int:
    return sum(now > then + SLACK_MIB for now, then in zip(used_mib(), before, strict=True))


def is_free(before: list[int]) -> bool:
    return num_in_use(before) == 0


def wait_until_both_work(job: Job, before: list[int]) -> None:
    """Until there are answers, and both GPUs are in use: a rank may be long in starting beside another."""
    wait_until(lambda: job.num_ok() > 5, 300)
    wait_until(lambda: num_in_use(before) == 2, 60)
    enough = job.num_ok() + 10
    wait_until(lambda: job.num_ok() > enough, 120)


def test_one_rank_dies_and_the_other_finishes(job: Job) -> None:
    before = used_mib()
    driver = job.start()
    wait_until_both_work(job, before)
    os.kill(job.processes(b"RankActor")[0], signal.SIGKILL)
    assert driver.wait(600) == 0
    assert read_output(job.output).column("prompt_token_ids").to_pylist() == job.prompts
    (run,) = read_runs(OutputFolder(job.output))
    assert run.num_rank_deaths == 1
    assert run.losses[0].num_rows > 0
    assert run.environments[0]["device_kind"] == "cuda"
    wait_until(lambda: is_free(before), 10)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_driver_that_ends_leaves_no_memory_behind(job: Job, number: signal.Signals) -> None:
    before = used_mib()
    driver = job.start()
    wait_until_both_work(job, before)
    driver.send_signal(number)
    assert driver.wait(60) == (-9 if number is signal.SIGKILL else 75)
    wait_until(lambda: is_free(before) and not job.processes(), 10)


def test_ranks_that_are_all_killed_leave_no_memory_to_those_in_their_place(job: Job) -> None:
    before = used_mib()
    driver = job.start()
    wait_until_both_work(job, before)
    for pid in job.processes(b"RankActor"):
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: is_free(before), 10)
    enough = job.num_ok() + 10
    wait_until(lambda: job.num_ok() > enough, 300)
    driver.kill()
    driver.wait()
    wait_until(lambda: is_free(before) and not job.processes(), 10)


def test_ray_job_stop_leaves_no_memory_behind(job: Job) -> None:
    pytest.importorskip("ray.dashboard.optional_deps", reason="ray[default] is needed", exc_type=ImportError)
    before = used_mib()
    with open_cluster() as cluster:
        cluster.add_node(num_cpus=4)
        everywhere = json.dumps({"env_vars": {"PYTHONPATH": str(ROOT)}})
        options = ["--submission-id=stopped", f"--runtime-env-json={everywhere}", "--no-wait"]
        command = [sys.executable, "-m", "jobs.cli", *job.command]
        submitted = cluster.ray("job", "submit", *options, "--", *command)
        assert submitted.returncode == 0, submitted.stderr
        wait_until_both_work(job, before)
        stopped = cluster.ray("job", "stop", "stopped")
        assert stopped.returncode == 0, stopped.stderr
        wait_until(lambda: is_free(before) and not cluster.processes(b"RankActor"), 10)
        status = read_status(job.output)
        assert 5 < status.num_ok < len(job.prompts)
        assert not status.is_running

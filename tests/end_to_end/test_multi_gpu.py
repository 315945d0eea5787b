"""Two ranks on two GPUs: one dies and the other goes on, and no death leaves memory behind."""

from __future__ import annotations

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
from tests.marked_processes import marked_processes
from tests.small_jobs import random_prompts, read_output, write_prompts

pytestmark = [pytest.mark.multi_gpu, pytest.mark.ray, pytest.mark.kill, pytest.mark.timeout(900)]

MODEL = ROOT / "tests" / "data" / "tiny"
SLACK_MIB = 64
_MARK = "TEST_JOB_MARK"


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
        self._command = ["run", "--model", str(MODEL), "--input", str(tmp_path / "in")]
        self._command += ["--output", str(self.output), "--num-ranks", "2"]
        for setting in (
            "engine.device=cuda",
            "engine.max_num_seqs=4",
            "engine.max_model_len=256",
            "input.rows_per_shard=20",
            "sampling.max_tokens=64",
            "sampling.ignore_eos=true",
        ):
            self._command += ["--set", setting]
        self.mark = uuid.uuid4().hex

    def start(self) -> subprocess.Popen[bytes]:
        environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
        environment |= {"PYTHONPATH": str(ROOT), _MARK: self.mark}
        return subprocess.Popen([sys.executable, "-m", "jobs.cli", *self._command], cwd=ROOT, env=environment)

    def processes(self, title: bytes = b"") -> list[int]:
        return marked_processes(f"{_MARK}={self.mark}", title)

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


def test_one_rank_dies_and_the_other_finishes(job: Job) -> None:
    before = used_mib()
    driver = job.start()
    wait_until(lambda: job.num_ok() > 5, 300)
    assert sum(now > then + SLACK_MIB for now, then in zip(used_mib(), before, strict=True)) == 2
    os.kill(job.processes(b"RankActor")[0], signal.SIGKILL)
    assert driver.wait(600) == 0
    assert read_output(job.output).column("prompt_token_ids").to_pylist() == job.prompts
    (run,) = read_runs(OutputFolder(job.output))
    assert run.num_rank_deaths == 1
    assert run.losses[0].num_rows > 0
    assert run.environments[0]["device_kind"] == "cuda"
    wait_until(lambda: is_free(before), 10)


def is_free(before: list[int]) -> bool:
    return all(now <= then + SLACK_MIB for now, then in zip(used_mib(), before, strict=True))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_driver_that_ends_leaves_no_memory_behind(job: Job, number: signal.Signals) -> None:
    before = used_mib()
    driver = job.start()
    wait_until(lambda: job.num_ok() > 5, 300)
    assert not is_free(before)
    driver.send_signal(number)
    assert driver.wait(60) == (-9 if number is signal.SIGKILL else 75)
    wait_until(lambda: is_free(before) and not job.processes(), 10)

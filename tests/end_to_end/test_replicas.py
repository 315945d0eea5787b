"""Whole jobs on ranks that share the experts: the digests of one rank, through a rank's death and a drain.

On CPU ranks over gloo; the last test asks for two GPUs, whose kernels write into each other's memory.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from engine.config import ExchangePath
from pipelines.manifest import OutputFolder
from pipelines.report import JobStatus, read_runs, read_status
from tests.conftest import ROOT
from tests.end_to_end.test_trust import LOOPBACK, listening
from tests.marked_processes import JOB_MARK, marked_processes, start_marked
from tests.small_jobs import read_output, write_prompts

pytestmark = [pytest.mark.ray, pytest.mark.kill, pytest.mark.timeout(600)]

MODEL = ROOT / "tests" / "data" / "tiny-quant"


class Job:
    """One input, and jobs over it with outputs of their own."""

    def __init__(self, folder: Path, num_rows: int, *settings: str) -> None:
        self.folder, self._settings = folder, settings
        self.mark = uuid.uuid4().hex
        draw = random.Random(7)
        prompts = [[draw.randrange(3, 250) for _ in range(draw.choice([1, 7, 30]))] for _ in range(num_rows)]
        self.row_ids = [f"a.parquet#{row}" for row in range(num_rows)]
        write_prompts(folder / "in" / "a.parquet", prompts)  # type: ignore[arg-type]

    def output(self, name: str) -> Path:
        return self.folder / name

    def start(self, name: str, num_ranks: int, ranks_per_replica: int = 1) -> subprocess.Popen[bytes]:
        command = ["run", "--model", str(MODEL), "--input", str(self.folder / "in")]
        command += ["--output", str(self.output(name)), "--num-ranks", str(num_ranks)]
        for setting in (
            f"cluster.ranks_per_replica={ranks_per_replica}",
            "engine.max_num_seqs=4",
            "engine.max_model_len=256",
            "input.rows_per_shard=20",
            "sampling.ignore_eos=true",
            *self._settings,
        ):
            command += ["--set", setting]
        return start_marked(self.mark, "jobs.cli", *command)

    def wait_until(
        self, driver: subprocess.Popen[bytes], name: str, is_so: Callable[[JobStatus], bool]
    ) -> None:
        deadline = time.monotonic() + 200
        while not (
            (self.output(name) / "_overnight" / "plan.json").exists()
            and is_so(read_status(self.output(name)))
        ):
            assert driver.poll() is None, f"the driver ended with {driver.returncode}"
            assert time.monotonic() < deadline, "the job did not get there"
            time.sleep(0.05)

    def processes(self, title: bytes = b"") -> list[int]:
        return marked_processes(f"{JOB_MARK}={self.mark}", title)

    def digests(self, name: str) -> list[str]:
        """Of every row, each there once."""
        output: pa.Table = read_output(self.output(name))
        assert output.column("row_id").to_pylist() == self.row_ids
        assert set(output.column("status").to_pylist()) == {"ok"}
        return output.column("output_digest").to_pylist()

    def lose_a_rank(self, name: str, num_ranks: int, path: ExchangePath = "all_to_all") -> None:
        """A job on replicas of two, of which one rank is killed in mid-job: see what became of it.

        ``path`` is the one that rows have to take between its ranks.
        """
        driver = self.start(name, num_ranks, 2)
        self.wait_until(driver, name, lambda status: status.num_ok > 3)
        heard_at = listening(self.processes())
        assert heard_at.keys() <= LOOPBACK, heard_at
        os.kill(self.processes(b"RankActor")[0], signal.SIGKILL)
        assert driver.wait(300) == 0
        (run,) = read_runs(OutputFolder(self.output(name)))
        assert {settings["exchange"] for settings in run.engine_settings} == {path}
        assert len({loss.rank // 2 for loss in run.losses}) == 1, "the others are of another replica"
        (killed,) = [loss for loss in run.losses if "of its replica died" not in loss.reason]
        (other,) = [loss for loss in run.losses if loss is not killed]
        assert other.reason == f"rank {killed.rank} of its replica died"
        files = OutputFolder(self.output(name)).deaths.glob("*.jsonl")
        records = [json.loads(line) for file in files for line in file.read_text().splitlines() if line]
        assert sum(len(record["rows"]) for record in records) == killed.num_rows, "no suspect but its own"


def make(folder: Path, num_rows: int, *settings: str) -> Iterator[Job]:
    job = Job(folder, num_rows, *settings)
    yield job
    for pid in job.processes():
        os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """With the answers of one rank."""
    for job in make(tmp_path_factory.mktemp("job"), 40, "engine.device=cpu", "sampling.max_tokens=8"):
        assert job.start("one", 1).wait(300) == 0
        yield job


def test_a_replica_of_two_has_one_ranks_digests_though_one_dies(job: Job) -> None:
    job.lose_a_rank("two", 2)
    assert job.digests("two") == job.digests("one")


def test_two_replicas_drain_together_and_one_rank_goes_on(job: Job) -> None:
    driver = job.start("four", 4, 2)
    job.wait_until(driver, "four", lambda status: status.num_ok > 0)
    driver.send_signal(signal.SIGUSR1)
    assert driver.wait(120) == 75
    assert 0 < read_status(job.output("four")).num_ok < len(job.row_ids)
    assert job.start("four", 1).wait(200) == 0
    assert job.digests("four") == job.digests("one")


@pytest.mark.multi_gpu
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mode", ["release", "row"])
def test_two_gpus_have_one_gpus_digests_though_one_dies(tmp_path: Path, mode: str) -> None:
    settings = ["engine.device=cuda", "engine.dtype=bfloat16", "engine.kernel_impl=triton"]
    # Few steps, as many rows in each as keep both ranks at work for seconds after the first have finished.
    settings += [f"engine.activation_quantisation={mode}", "engine.max_num_seqs=16", "sampling.max_tokens=32"]
    for job in make(tmp_path, 200, *settings):
        assert job.start("one", 1).wait(300) == 0
        job.lose_a_rank("two", 2, "peer_memory")
        assert job.digests("two") == job.digests("one")

"""Whole jobs on ranks that share the experts: the digests of one rank, through a rank's death, a hang and a drain.

On CPU ranks over gloo; the last tests ask for two GPUs, whose kernels write into each other's memory.
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
from pipelines.manifest import OutputFolder, load_plan
from pipelines.report import JobStatus, RankLoss, read_runs, read_status
from pipelines.sink import read_lease_state
from tests.conftest import ROOT
from tests.end_to_end.test_trust import LOOPBACK, listening
from tests.marked_processes import JOB_MARK, marked_processes, start_marked
from tests.small_jobs import read_output, write_prompts

pytestmark = [pytest.mark.ray, pytest.mark.kill, pytest.mark.timeout(600)]

MODEL = ROOT / "tests" / "data" / "tiny-quant"
# Few steps, as many rows in each as keep both ranks at work for seconds after the first have finished.
GPU_SETTINGS = [
    "engine.device=cuda",
    "engine.dtype=bfloat16",
    "engine.kernel_impl=triton",
    "engine.max_num_seqs=16",
    "sampling.max_tokens=32",
]


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

    def start(
        self, name: str, num_ranks: int, ranks_per_replica: int = 1, *settings: str
    ) -> subprocess.Popen[bytes]:
        command = ["run", "--model", str(MODEL), "--input", str(self.folder / "in")]
        command += ["--output", str(self.output(name)), "--num-ranks", str(num_ranks)]
        for setting in (
            f"cluster.ranks_per_replica={ranks_per_replica}",
            "engine.max_num_seqs=4",
            "engine.max_model_len=256",
            "input.rows_per_shard=20",
            "sampling.ignore_eos=true",
            *self._settings,
            *settings,
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
        killed = self.one_culprit(name, path)
        assert len(self.suspects(name)) == killed.num_rows, "no suspect but its own"

    def stop_a_rank(self, name: str, path: ExchangePath = "all_to_all") -> None:
        """The same of a job on one replica, of which one rank's process stands still from then on."""
        driver = self.start(name, 2, 2, "cluster.stall_timeout_s=30")
        self.wait_until(driver, name, lambda status: status.num_ok > 3)
        stopped, in_flight = self.stop_one_at_work(driver, name)
        print(f"process {stopped} stands still with rows {sorted(in_flight)}")
        assert driver.wait(300) == 0
        culprit = self.one_culprit(name, path)
        reasons = {"other ranks of its replica lost it"}
        if path == "peer_memory":
            # A wait on a device need not fail in time: then the one process that does not answer is blamed.
            reasons.add("its loop stood still for 30 s")
        assert culprit.reason in reasons
        assert self.suspects(name) == in_flight, "those of the rank that stood still"
        assert culprit.num_rows == len(in_flight)

    def stop_one_at_work(
        self, driver: subprocess.Popen[bytes], name: str
    ) -> tuple[int, set[tuple[int, int]]]:
        """Stop a rank that has rows in flight: its process, and the shard and number of each row."""
        folder = OutputFolder(self.output(name))
        plan = load_plan(folder)
        while driver.poll() is None:
            for pid in self.processes(b"RankActor"):
                os.kill(pid, signal.SIGSTOP)
                while "State:\tT" not in Path(f"/proc/{pid}/status").read_text():
                    time.sleep(0.001)
                opened = {Path(os.readlink(link)) for link in Path(f"/proc/{pid}/fd").iterdir()}
                in_flight = {
                    (int(path.parent.name), row)
                    for path in opened
                    if path.is_relative_to(folder.journals) and path.suffix == ".journal"
                    for row in read_lease_state(plan, path).tokens_of_suspects
                }
                if in_flight:
                    return pid, in_flight
                os.kill(pid, signal.SIGCONT)
        pytest.fail("the job was over before a rank was seen at work")

    def one_culprit(self, name: str, path: ExchangePath) -> RankLoss:
        """The one rank of the only run that died, and did not only lose another one."""
        (run,) = read_runs(OutputFolder(self.output(name)))
        assert {settings["exchange"] for settings in run.engine_settings} == {path}
        assert len({loss.rank // 2 for loss in run.losses}) == 1, "the others are of another replica"
        (culprit,) = [loss for loss in run.losses if "of its replica died" not in loss.reason]
        (other,) = [loss for loss in run.losses if loss is not culprit]
        assert other.reason == f"rank {culprit.rank} of its replica died"
        return culprit

    def suspects(self, name: str) -> set[tuple[int, int]]:
        """The shard and number of each row that was written down as in flight at a death."""
        files = OutputFolder(self.output(name)).deaths.glob("*.jsonl")
        records = [json.loads(line) for file in files for line in file.read_text().splitlines() if line]
        return {(record["shard"], row) for record in records for row in record["rows"]}


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


def test_a_rank_that_stands_still_is_the_one_that_is_blamed(tmp_path: Path, job: Job) -> None:
    job.stop_a_rank("still")
    assert job.digests("still") == job.digests("one")


def test_two_replicas_drain_together_and_one_rank_goes_on(job: Job) -> None:
    driver = job.start("four", 4, 2)
    job.wait_until(driver, "four", lambda status: status.num_ok > 0)
    for pid in [*job.processes(b"RankActor"), driver.pid]:  # as where a scheduler tells every process
        os.kill(pid, signal.SIGUSR1)
    assert driver.wait(120) == 75
    (run,) = read_runs(OutputFolder(job.output("four")))
    assert not run.losses
    assert 0 < read_status(job.output("four")).num_ok < len(job.row_ids)
    assert job.start("four", 1).wait(200) == 0
    assert job.digests("four") == job.digests("one")


@pytest.mark.multi_gpu
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mode", ["release", "row"])
def test_two_gpus_have_one_gpus_digests_though_one_dies(tmp_path: Path, mode: str) -> None:
    for job in make(tmp_path, 200, *GPU_SETTINGS, f"engine.activation_quantisation={mode}"):
        assert job.start("one", 1).wait(300) == 0
        job.lose_a_rank("two", 2, "peer_memory")
        assert job.digests("two") == job.digests("one")


@pytest.mark.multi_gpu
@pytest.mark.timeout(900)
def test_a_rank_that_stands_still_under_its_gpu_is_the_one_that_is_blamed(tmp_path: Path) -> None:
    for job in make(tmp_path, 200, *GPU_SETTINGS):
        assert job.start("one", 1).wait(300) == 0
        job.stop_a_rank("still", "peer_memory")
        assert job.digests("still") == job.digests("one")

"""Jobs under a real Slurm: queued again until they are done, cancelled, on two nodes, and as an array."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.manifest import OutputFolder
from pipelines.report import JobStatus, read_runs, read_status
from tests.conftest import ROOT
from tests.slurm_cluster import SlurmCluster, open_slurm, why_not
from tests.small_jobs import random_prompts, read_output, write_prompts

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(why_not() is not None, reason=why_not() or ""),
]

MODEL = ROOT / "tests" / "data" / "tiny"


@pytest.fixture(scope="module")
def slurm() -> Iterator[SlurmCluster]:
    with open_slurm() as slurm:
        yield slurm


class Job:
    """A small job of the tiny model, and its flags."""

    def __init__(self, tmp_path: Path, num_rows: int, max_tokens: int) -> None:
        self.output = tmp_path / "out"
        self.prompts = random_prompts(random.Random(1), num_rows)
        write_prompts(tmp_path / "in" / "a.parquet", self.prompts)
        self.flags = ["--model", str(MODEL), "--input", str(tmp_path / "in"), "--output", str(self.output)]
        for setting in (
            f"sampling.max_tokens={max_tokens}",
            "sampling.ignore_eos=true",
            "engine.max_num_seqs=2",
            "engine.max_model_len=128",
            "input.rows_per_shard=4",
        ):
            self.flags += ["--set", setting]

    def wait_until(self, slurm: SlurmCluster, is_so: Callable[[JobStatus], bool]) -> None:
        deadline = time.monotonic() + 240
        while not ((self.output / "_overnight" / "plan.json").exists() and is_so(read_status(self.output))):
            assert time.monotonic() < deadline, slurm.logs()
            time.sleep(0.2)

    def check(self) -> pa.Table:
        rows = read_output(self.output)
        assert rows.column("prompt_token_ids").to_pylist() == self.prompts
        assert set(rows.column("status").to_pylist()) == {"ok"}
        return rows


def is_quiet(slurm: SlurmCluster, timeout_s: float = 30.0) -> bool:
    """Whether every process of every job ends, with room for a busy machine."""
    deadline = time.monotonic() + timeout_s
    while slurm.processes() and time.monotonic() < deadline:
        time.sleep(0.1)
    return not slurm.processes()


def test_a_job_that_is_drained_is_queued_again_until_it_is_done(slurm: SlurmCluster, tmp_path: Path) -> None:
    job = Job(tmp_path, num_rows=40, max_tokens=16)
    number = slurm.submit(*job.flags, "--time", "10m", "--cpus-per-node", 2)
    job.wait_until(slurm, lambda status: status.num_ok > 2)
    slurm.command("scancel", "--batch", "--signal=USR1", number)
    job.wait_until(slurm, lambda status: not status.is_running)
    assert 2 < read_status(job.output).num_ok < 40
    slurm.wait_for(number, "PENDING")
    slurm.command("scontrol", "update", f"jobid={number}", "StartTime=now+15")  # else two minutes
    slurm.wait_for(number, "COMPLETED")
    job.check()
    runs = read_runs(OutputFolder(job.output))
    assert [run.outcome for run in runs] == ["stopped", "committed"]
    assert "Restarts=1" in slurm.command("scontrol", "show", "job", number)
    assert is_quiet(slurm)


def test_a_job_that_is_cancelled_ends_at_once_and_stays_so(slurm: SlurmCluster, tmp_path: Path) -> None:
    job = Job(tmp_path, num_rows=40, max_tokens=16)
    number = slurm.submit(*job.flags, "--time", "10m", "--cpus-per-node", 2)
    job.wait_until(slurm, lambda status: status.num_ok > 2)
    slurm.command("scancel", number)
    assert is_quiet(slurm), slurm.logs()
    slurm.wait_for(number, "CANCELLED")
    (run,) = read_runs(OutputFolder(job.output))
    assert run.outcome == "stopped"
    assert 2 < read_status(job.output).num_ok < 40


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_a_job_whose_batch_script_is_killed_leaves_nothing_and_goes_on_when_run_again(
    slurm: SlurmCluster, tmp_path: Path, num_nodes: int
) -> None:
    job = Job(tmp_path, num_rows=40, max_tokens=16)
    cpus = 2 // num_nodes  # room for one rank on each of two nodes
    flags = [*job.flags, "--nodes", num_nodes, "--time", "10m", "--cpus-per-node", cpus]
    number = slurm.submit(*flags)
    job.wait_until(slurm, lambda status: status.num_ok > 2)
    assert len(slurm.processes(b"raylet/raylet")) == num_nodes, "a Ray of its own across all nodes"
    (script,) = slurm.processes(b"slurm_script")
    os.kill(script, signal.SIGKILL)
    assert is_quiet(slurm), slurm.logs()
    slurm.wait_for(number, "FAILED")
    assert 2 < read_status(job.output).num_ok < 40
    assert not read_status(job.output).is_running
    number = slurm.submit(*flags)
    deadline = time.monotonic() + 240
    while len(slurm.processes(b"RankActor")) < num_nodes:
        assert time.monotonic() < deadline, slurm.logs()
        time.sleep(0.2)
    slurm.wait_for(number, "COMPLETED")
    job.check()
    assert read_status(job.output).num_reused > 2
    assert is_quiet(slurm), slurm.logs()


def test_a_job_that_nobody_warned_of_the_end_of_its_time_goes_on_when_run_again(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    job = Job(tmp_path, num_rows=60, max_tokens=100)
    lines = slurm.script(*job.flags, "--set", "engine.max_num_seqs=1", "--time", "10m", "--cpus-per-node", 2)
    kept = [
        line for line in lines.splitlines() if "--signal=" not in line and not line.startswith("case $end")
    ]
    assert len(kept) == len(lines.splitlines()) - 2
    first_command = next(i for i, line in enumerate(kept) if line.startswith("cd "))
    kept.insert(first_command, "until=()")
    script = tmp_path / "script"
    script.write_text("\n".join(kept))
    number = slurm.command("sbatch", "--parsable", str(script)).strip()
    job.wait_until(slurm, lambda status: status.num_ok > 2)
    # Its time is up when Slurm looks next, which it does twice a minute.
    slurm.command("scontrol", "update", f"jobid={number}", "EndTime=now")
    slurm.wait_for(number, "TIMEOUT")
    assert is_quiet(slurm), slurm.logs()
    (run,) = read_runs(OutputFolder(job.output))
    assert run.outcome == "stopped"
    stopped = read_status(job.output)
    assert 2 < stopped.num_ok < 60
    wider = ("--set", "engine.max_num_seqs=32")
    slurm.wait_for(slurm.submit(*job.flags, *wider, "--time", "10m", "--cpus-per-node", 2), "COMPLETED")
    job.check()
    assert read_status(job.output).num_reused == stopped.num_ok
    assert is_quiet(slurm), slurm.logs()


def test_the_example_as_an_array_works_on_slices_of_one_job_side_by_side(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    examples, output = ROOT / "examples", tmp_path / "out"
    prompts = pq.read_table(examples / "bard" / "prompts.parquet").slice(0, 30)
    pq.write_table(prompts, tmp_path / "in.parquet")
    flags = ["--model", examples / "bard" / "model", "--input", tmp_path / "in.parquet", "--output", output]
    for setting in ("sampling.n=2", "sampling.max_tokens=4", "input.rows_per_shard=4"):
        flags += ["--set", setting]
    job = examples / "slurm" / "job.yaml"
    number = slurm.submit(job, *flags, "--array", 3, "--time", "10m", "--cpus-per-node", 1)
    slurm.wait_for(number, "COMPLETED")
    rows = read_output(output)
    assert rows.column("prompt").to_pylist() == prompts.column("prompt").to_pylist()
    assert {len(texts) for texts in rows.column("completion").to_pylist()} == {2}
    runs = read_runs(OutputFolder(output))
    assert sorted(run.shards or () for run in runs) == [(0, 2), (2, 5), (5, 8)]
    assert {run.outcome for run in runs} == {"committed"}
    assert is_quiet(slurm), slurm.logs()

"""Jobs on a Ray that was there before them: submitted, stopped, and on nodes that come and go."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from pipelines.manifest import OutputFolder
from pipelines.report import JobStatus, read_runs, read_status
from tests.conftest import ROOT
from tests.ray_cluster import RayCluster, open_cluster
from tests.small_jobs import check_answers, random_prompts, read_output, write_prompts

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

MODEL = ROOT / "examples" / "bard" / "model"
PROMPTS = ROOT / "examples" / "bard" / "prompts.parquet"
ON_EVERY_NODE = json.dumps({"env_vars": {"PYTHONPATH": str(ROOT)}})
"""Stands for a package that is installed on every node."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with open_cluster() as cluster:
        cluster.add_node(num_cpus=3)
        yield cluster


def wait_until(is_so: Callable[[], bool], timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline, "it did not get there"
        time.sleep(0.1)


def has_got(output: Path, is_so: Callable[[JobStatus], bool]) -> Callable[[], bool]:
    return lambda: (output / "_overnight" / "plan.json").exists() and is_so(read_status(output))


def fake_job(tmp_path: Path, num_ranks: int, *overrides: str, builder: str = "build_slow") -> list[str]:
    module = ["-m", "tests.end_to_end.run_fake_job"]
    return [
        *module,
        builder,
        str(MODEL),
        str(tmp_path / "in"),
        str(tmp_path / "out"),
        str(num_ranks),
        *overrides,
    ]


def submit(cluster: RayCluster, *command: str, job_id: str, wait: bool = True, upload: Path | None = None):  # type: ignore[no-untyped-def]
    options = [f"--working-dir={upload}"] if upload else [f"--runtime-env-json={ON_EVERY_NODE}"]
    return cluster.ray(
        *("job", "submit", f"--submission-id={job_id}", *options, *([] if wait else ["--no-wait"])),
        *("--", sys.executable, *command),
    )


def test_the_example_runs_from_an_uploaded_folder(cluster: RayCluster, tmp_path: Path) -> None:
    upload = tmp_path / "upload"
    for folder in ("jobs", "pipelines", "engine", "kernels", "examples"):
        (upload / folder).parent.mkdir(exist_ok=True)
        subprocess.run(["cp", "-r", ROOT / folder, upload / folder], check=True)
    rows = pq.read_table(PROMPTS).slice(0, 6)
    pq.write_table(rows, upload / "examples" / "bard" / "prompts.parquet")
    run = ["-m", "jobs.cli", "run", "examples/ray-job/job.yaml", "--set", "sampling.max_tokens=4"]
    run += ["--set", "cluster.max_ranks=2"]

    refused = submit(cluster, *run, "--output", "out", job_id="uploaded-output", upload=upload)
    assert refused.returncode != 0
    assert "name an absolute path that every node sees" in refused.stdout
    done = submit(cluster, *run, "--output", str(tmp_path / "out"), job_id="example", upload=upload)
    assert done.returncode == 0, done.stdout
    assert "6 rows ok, 0 error rows" in done.stdout
    log = cluster.ray("job", "logs", "example").stdout
    assert "\r" not in log
    assert "6/6" in log, "the progress"
    assert read_output(tmp_path / "out").column("prompt").to_pylist() == rows.column("prompt").to_pylist()


WITHOUT_HANDLERS = """
import signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal = lambda *_: None
from tests.end_to_end.run_fake_job import main
sys.exit(main(*sys.argv[1:]))
"""


def test_ray_job_stop_is_safe(cluster: RayCluster, tmp_path: Path) -> None:
    prompts = random_prompts(random.Random(3), 3000)
    write_prompts(tmp_path / "in" / "a.parquet", prompts)
    job = fake_job(tmp_path, 2)
    outcomes, num_ok = [], 0
    for name, command in (("stopped", job), ("killed", ["-c", WITHOUT_HANDLERS, *job[2:]])):
        assert submit(cluster, *command, job_id=name, wait=False).returncode == 0
        wait_until(
            has_got(
                tmp_path / "out",
                lambda status, before=num_ok: status.is_running and status.num_ok > before + 30,
            )
        )
        stopped = cluster.ray("job", "stop", name)
        assert stopped.returncode == 0, stopped.stderr
        wait_until(lambda: not cluster.processes(b"RankActor"), 30)
        status = read_status(tmp_path / "out")
        assert num_ok + 30 < status.num_ok < 3000
        assert status.num_reused >= num_ok
        assert not status.is_running
        num_ok = status.num_ok
        outcomes = [run.outcome for run in read_runs(OutputFolder(tmp_path / "out"))]
    assert outcomes == ["stopped", "running"]
    again = fake_job(tmp_path, 2, builder="build_fast")
    assert submit(cluster, *again, job_id="again").returncode == 0
    check_answers(read_output(tmp_path / "out"), prompts)
    assert read_status(tmp_path / "out").num_reused >= num_ok


@pytest.mark.kill
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_driver_that_ends_takes_its_ranks_with_it_and_leaves_the_cluster(
    cluster: RayCluster, tmp_path: Path, number: signal.Signals
) -> None:
    write_prompts(tmp_path / "in" / "a.parquet", random_prompts(random.Random(4), 300))
    driver = cluster.run(*fake_job(tmp_path, 2))
    wait_until(has_got(tmp_path / "out", lambda status: status.num_ok > 30))
    assert len(cluster.processes(b"RankActor")) == 2
    driver.send_signal(number)
    assert driver.wait(30) == (75 if number is signal.SIGTERM else -9)
    wait_until(lambda: not cluster.processes(b"RankActor"), 30)
    assert cluster.processes(b"gcs_server")


@pytest.mark.kill
def test_nodes_come_and_go_and_a_lost_head_is_resumed(tmp_path: Path) -> None:
    prompts = random_prompts(random.Random(5), 1500)
    write_prompts(tmp_path / "in" / "a.parquet", prompts)
    elastic = ["cluster.max_ranks=2", "input.rows_per_shard=100"]
    output = tmp_path / "out"

    def num_ranks(cluster: RayCluster) -> int:
        return len(cluster.processes(b"RankActor"))

    def num_ranks_at_work(output: Path) -> int:
        whole, _, _ = OutputFolder(output).metrics_file(1).read_text().rpartition("\n")
        return int(json.loads(whole.splitlines()[-1])["num_ranks"])

    with open_cluster() as cluster:
        cluster.add_node(num_cpus=1)
        driver = cluster.run(*fake_job(tmp_path, 0, *elastic))
        wait_until(has_got(output, lambda status: status.num_ok > 20))
        assert num_ranks(cluster) == 1
        node = cluster.add_node(num_cpus=1)
        wait_until(lambda: num_ranks_at_work(output) == 2)
        before = read_status(output).num_ok
        wait_until(has_got(output, lambda status: status.num_ok > before + 60))
        cluster.kill_node(node)
        wait_until(has_got(output, lambda status: status.num_rank_deaths == 1))
        cluster.add_node(num_cpus=1)
        wait_until(lambda: num_ranks(cluster) == 2)
        assert driver.poll() is None
        for number in range(3):
            cluster.kill_node(number)
        assert driver.wait(40) != 0
        stopped = read_status(output)
        assert 80 < stopped.num_ok < 1500
    (run,) = read_runs(OutputFolder(output))
    assert run.losses[0].num_rows > 0
    with open_cluster() as cluster:
        cluster.add_node(num_cpus=2)
        assert cluster.run(*fake_job(tmp_path, 2, *elastic[1:], builder="build_fast")).wait(200) == 0
    check_answers(read_output(output), prompts)
    assert read_status(output).num_reused >= stopped.num_ok


def test_a_cluster_that_asks_for_a_token_is_not_joined_without(cluster: RayCluster, tmp_path: Path) -> None:
    write_prompts(tmp_path / "in" / "a.parquet", [[1]])
    driver = cluster.run(*fake_job(tmp_path, 1), environment={"RAY_AUTH_TOKEN": "0" * 64})
    assert driver.wait(120) != 0
    assert not (tmp_path / "out").exists()

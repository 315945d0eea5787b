"""Runs as the command line starts them: refusals that leave no trace, and a Ray that ends with its job."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from engine import ConfigError
from jobs.cluster import run_job
from jobs.config import JobConfig, load_job
from jobs.environment import SPEED_ONLY
from jobs.job_plan import fingerprint_model, plan_job
from jobs.plan_report import forecast_job
from jobs.reaper import MARK, Reaper, reap
from pipelines.driver import Outcome
from pipelines.manifest import OutputFolder, check_folder, write_plan
from pipelines.plan import Plan, describe_difference
from tests.small_jobs import random_prompts, write_prompts


@pytest.fixture
def make_job(tmp_path: Path, bard_path: Path) -> Any:
    write_prompts(tmp_path / "in" / "a.parquet", random_prompts(random.Random(1), 5))

    def make(*overrides: str, model: Path = bard_path) -> JobConfig:
        flags = {
            "model.path": str(model),
            "input.path": str(tmp_path / "in"),
            "output.path": str(tmp_path / "out"),
        }
        return load_job(None, overrides, flags)

    return make


def snapshot(path: Path) -> list[tuple[str, int]]:
    return sorted((str(p), p.stat().st_mtime_ns) for p in path.rglob("*"))


def refused(tmp_path: Path, job: JobConfig, says: str) -> None:
    before = snapshot(tmp_path)
    with pytest.raises(ConfigError, match=says) as caught:
        run_job(job)
    assert "\n" not in str(caught.value), "one sentence"
    assert snapshot(tmp_path) == before, "nothing is written"


def test_refusals_come_before_anything_is_written(tmp_path: Path, make_job: Any) -> None:
    (tmp_path / "model").mkdir()
    refused(tmp_path, make_job(model=tmp_path / "model"), "no config.json")
    refused(tmp_path, make_job(f"input.path={tmp_path}/none/*.parquet"), "matches no Parquet file")
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "text.parquet")
    refused(tmp_path, make_job(f"input.path={tmp_path}/text.parquet"), "has no prompt")
    refused(tmp_path, make_job(f"output.path={tmp_path}/text.parquet/out"), "cannot be a folder")
    (tmp_path / "out").mkdir()
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "out" / "old.parquet")
    refused(tmp_path, make_job(), "which is not this job's")


def test_replicas_that_cannot_be_are_refused_before_anything_is_written(
    tmp_path: Path, make_job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seven = "cluster.ranks_per_replica is 7, but the model's 12 experts a layer cannot be split evenly"
    refused(tmp_path, make_job("cluster.ranks_per_replica=7"), seven)
    nodes = [{"Alive": True, "Resources": {"CPU": 9.0, "GPU": gpus}} for gpus in (3.0, 5.0)]
    nodes.append({"Alive": False, "Resources": {"CPU": 9.0, "GPU": 8.0}})
    monkeypatch.setattr("ray.init", lambda **_: None)
    monkeypatch.setattr("ray.nodes", lambda: nodes)
    monkeypatch.setattr("ray.cluster_resources", lambda: {"CPU": 18.0, "GPU": 8.0})
    eight = make_job("cluster.ranks_per_replica=4", "cluster.num_ranks=8", "engine.device=cuda")
    refused(tmp_path, eight, "each replica needs 4 GPUs on one node, and the cluster has room for 1 of 2")
    anywhere = make_job("cluster.ranks_per_replica=6", "engine.device=cuda")
    refused(tmp_path, anywhere, "each replica needs 6 GPUs on one node, and the cluster has room for 0 of 1")


def test_settings_that_no_rank_can_have_are_refused_before_ray_is_started(
    tmp_path: Path, make_job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(**_: object) -> None:
        raise AssertionError("Ray is started")

    monkeypatch.setattr("ray.init", start)
    job, says = make_job("engine.max_model_len=8193"), "^engine.max_model_len 8193 exceeds the model's 8192$"
    refused(tmp_path, job, says)
    with pytest.raises(ConfigError, match=says):
        forecast_job(job, max_num_rows=None, seed=0)
    plan_job(make_job("engine.max_model_len=8192"))
    job = make_job("engine.kernel_impl=triton", "engine.device=cpu")
    refused(tmp_path, job, "^engine.kernel_impl is triton, but this rank has no GPU$")


@pytest.mark.parametrize("moment", ["planning", "starting", "started"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_before_the_first_row_is_a_clean_stop(
    tmp_path: Path, make_job: Any, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, moment: str
) -> None:
    job = make_job()
    handlers = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)]
    happened = []
    is_over = threading.Event()

    def happen(now: str) -> None:
        happened.append(now)
        if now == moment:
            os.kill(os.getpid(), number)

    def plan(job: JobConfig) -> Plan:
        happen("planning")
        return plan_job(job)

    def start(**_: object) -> None:
        happen("starting")
        if moment == "starting":
            is_over.wait(60)  # a Ray whose start is held up
        happen("started")

    monkeypatch.setattr("jobs.cluster.plan_job", plan)
    monkeypatch.setattr("ray.init", start)
    monkeypatch.setattr("ray.cluster_resources", lambda: {"CPU": 1.0})
    before = snapshot(tmp_path)
    try:
        assert run_job(job) == 75
        assert happened[-1] == moment
    finally:
        is_over.set()
    assert snapshot(tmp_path) == before
    assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)] == handlers


def test_a_run_says_what_takes_time_before_it_does_it(
    make_job: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "jobs.cluster")
    said: list[list[str]] = []

    def plan(job: JobConfig) -> Plan:
        said.append(list(caplog.messages))
        return plan_job(job)

    def start(**_: object) -> None:
        said.append(list(caplog.messages))

    def drive(_: object) -> Outcome:
        said.append(list(caplog.messages))
        return Outcome.STOPPED

    monkeypatch.setattr("jobs.cluster.plan_job", plan)
    monkeypatch.setattr("ray.init", start)
    monkeypatch.setattr("ray.cluster_resources", lambda: {"CPU": 1.0})
    monkeypatch.setattr("jobs.cluster.Driver.run", drive)
    monkeypatch.setattr("jobs.fleet.RayFleet.close", lambda fleet: None)
    job = make_job()
    assert run_job(job) == 75
    messages = [
        f"reading the input {job.input.path}",
        "5 rows in 1 shard",
        "starting a Ray on this machine",
        f"Ray is up; {job.model.path} is loaded by up to 1 rank",
    ]
    assert said == [messages[:1], messages[:3], messages]


@pytest.mark.parametrize("error", [Exception, RuntimeError, ConnectionError, ValueError])
def test_a_ray_that_does_not_start_is_said_in_one_sentence(
    tmp_path: Path,
    make_job: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: type[Exception],
) -> None:
    def fail(**_: object) -> None:
        raise error("The node timed out\nduring startup.")

    monkeypatch.setattr("ray.init", fail)
    before = snapshot(tmp_path)
    assert run_job(make_job()) == 1
    assert caplog.messages == ["the job failed: Ray did not start: The node timed out during startup."]
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        job = make_job(f"cluster.address={address}")
        refused(
            tmp_path, job, f"cannot join the Ray cluster at '{address}': The node timed out during startup."
        )
    assert snapshot(tmp_path) == before


def test_an_address_at_which_nothing_listens_is_refused(tmp_path: Path, make_job: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    refused(tmp_path, make_job(f"cluster.address={address}"), f"'{address}': .* Connection refused")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("is_committed", [False, True])
def test_a_job_that_a_rank_refuses_is_taken_back_unless_something_is_committed(
    tmp_path: Path, make_job: Any, monkeypatch: pytest.MonkeyPatch, is_committed: bool
) -> None:
    job = make_job()
    folder = OutputFolder(tmp_path / "out")
    part = folder.part_file(plan_job(job).part_name(0))

    def refuse(driver: object) -> None:
        if is_committed:
            part.touch()  # an empty file's: there is no journal
        raise ConfigError("unsupported")

    monkeypatch.setattr("ray.init", lambda **_: None)
    monkeypatch.setattr("ray.cluster_resources", lambda: {"CPU": 1.0})
    monkeypatch.setattr("jobs.cluster.Driver.run", refuse)
    monkeypatch.setattr("jobs.fleet.RayFleet.close", lambda fleet: None)
    with pytest.raises(ConfigError, match="unsupported"):
        run_job(job)
    assert part.exists() == folder.plan_file.exists() == is_committed
    assert folder.path.exists() == is_committed


def test_settings_that_change_answers_make_another_job(make_job: Any) -> None:
    plan = plan_job(make_job())
    for override, name in [
        ("sampling.temperature=0.25", "sampling.temperature"),
        ("sampling.seed=5", "sampling.seed was null and is now 5"),
        ("sampling.max_tokens=5", "sampling.max_tokens"),
        ("engine.dtype=bfloat16", "engine.dtype"),
        ("chat.thinking=false", "chat.thinking"),
        ("input.rows_per_shard=2", "input.rows_per_shard"),
        ("output.prefix=o_", "output.prefix"),
    ]:
        difference = describe_difference(plan, plan_job(make_job(override)))
        assert difference is not None
        assert difference.startswith(name)
    for override in [
        "sampling.seed=0",
        "engine.max_num_seqs=3",
        "engine.enable_prefix_caching=false",
        "cluster.num_ranks=7",
    ]:
        assert describe_difference(plan, plan_job(make_job(override))) is None
    assert {f"engine.{name}" for name in SPEED_ONLY} & plan.settings.keys() == set()


def test_of_files_that_changed_the_key_and_the_place_are_named(
    tmp_path: Path, make_job: Any, bard_path: Path
) -> None:
    models, folder = [tmp_path / "a", tmp_path / "b"], OutputFolder(tmp_path / "out")
    for model in models:
        shutil.copytree(bard_path, model)
    write_plan(folder, plan_job(make_job(model=models[0])))
    check_folder(folder, plan_job(make_job(model=models[1])))

    def difference(*overrides: str, model: Path) -> str:
        with pytest.raises(ConfigError) as caught:
            check_folder(folder, plan_job(make_job(*overrides, model=model)))
        return str(caught.value).partition(" holds another job: ")[2].partition(" (")[0]

    template = tmp_path / "chat.jinja"
    template.write_text("{{ messages }}")
    assert difference(f"chat.template={template}", model=models[0]) == (
        f'the chat template is not the same: chat.template was null and is now "{template}"'
    )
    for model in models:
        with open(model / "config.json", "a") as file:
            file.write(" ")
    others = "the model's files are not the same: model.path"
    assert difference(model=models[0]) == f'{others} is "{models[0]}"'
    assert difference(model=models[1]) == f'{others} was "{models[0]}" and is now "{models[1]}"'
    plan = json.loads(folder.plan_file.read_text())
    del plan["places"]  # as an earlier version wrote it
    folder.plan_file.write_text(json.dumps(plan))
    assert difference(model=models[1]) == f'{others} is "{models[1]}"'


def test_a_model_is_told_apart_by_content_not_by_place(tmp_path: Path) -> None:
    for name, config in (("a", "{}"), ("b", "{}"), ("c", '{"x": 1}')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(config)
        (tmp_path / name / "model.safetensors").write_bytes(b"12345")
    a, b, c = (fingerprint_model(tmp_path / name) for name in "abc")
    assert a == b != c
    (tmp_path / "b" / "model.safetensors").write_bytes(b"123456")
    assert fingerprint_model(tmp_path / "b") != a


@pytest.mark.parametrize("size", [5, 5000, 1_000_000])
def test_other_weights_of_the_same_size_are_another_model(tmp_path: Path, size: int) -> None:
    found = set()
    for byte in (b"1", b"2"):
        (tmp_path / "model.safetensors").write_bytes(byte * size)
        found.add(fingerprint_model(tmp_path))
    assert len(found) == 2


def sleeper(mark: str | None) -> subprocess.Popen[bytes]:
    environment = {k: v for k, v in os.environ.items() if k != MARK}
    if mark is not None:
        environment[MARK] = mark
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], env=environment)


def test_the_reaper_ends_what_carries_its_mark_and_nothing_else() -> None:
    processes = {mark: sleeper(mark) for mark in ("mine-1", "mine-10", None)}
    try:
        time.sleep(0.2)
        processes["mine-1"].poll()
        assert reap("mine-1", patience_s=2.0) == 1
        assert processes["mine-1"].wait(5) == -9
        assert processes["mine-10"].poll() is None
        assert processes[None].poll() is None
    finally:
        for process in processes.values():
            process.kill()
            process.wait()


def test_the_reaper_ends_a_process_that_it_meets_in_the_middle_of_an_exec() -> None:
    """A shell that replaces itself without end: in about one look of ten it shows no environment."""
    code = 'exec /bin/sh -c "$0" "$0"'
    for index in range(20):
        mark = f"exec-{index}"
        process = subprocess.Popen(["/bin/sh", "-c", code, code], env={**os.environ, MARK: mark})
        try:
            assert reap(mark, patience_s=5.0) == 1
            assert process.wait(5) == -9
        finally:
            process.kill()
            process.wait()


def test_the_reaper_works_when_its_owner_is_killed() -> None:
    owner_code = (
        "import os, signal, subprocess, sys\nfrom jobs.reaper import MARK, Reaper\n"
        "reaper = Reaper()\nos.environ[MARK] = reaper.mark\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session=True)\n"
        "print(child.pid, reaper._process.pid, flush=True)\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    root = Path(__file__).resolve().parents[2]
    owner = subprocess.run([sys.executable, "-c", owner_code], stdout=subprocess.PIPE, cwd=root, check=False)
    pids = list(map(int, owner.stdout.split()))
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and any(is_running(pid) for pid in pids):
        time.sleep(0.05)
    assert not any(is_running(pid) for pid in pids)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_closing_the_reaper_ends_it() -> None:
    reaper = Reaper()
    process = sleeper(reaper.mark)
    time.sleep(0.1)
    waiter = [process]
    try:
        # The child is ours to wait for: until then it is a zombie with no environment, and counts as gone.
        reaper.close()
        assert waiter[0].wait(5) == -9
    finally:
        process.kill()
        process.wait()

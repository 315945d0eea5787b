"""The commands as a shell sees them: flags, exit codes, one sentence for a refusal."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from engine import ConfigError
from jobs import VERSION, cli, commands
from jobs.arguments import build_parser
from jobs.config import JobConfig, load_job
from jobs.job_plan import plan_job, with_absolute_paths
from pipelines.driver import Driver, Outcome
from pipelines.manifest import DriverLock, OutputFolder, Tally, claim_run, write_plan
from pipelines.plan import slice_of_shards
from pipelines.report import Effort, JobStatus, WastedTokens, read_status
from tests.small_jobs import InProcessFleet, make_plan, start_run, write_prompts

ROOT = Path(__file__).resolve().parents[2]


def run_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "jobs.cli", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60
    )


@pytest.fixture
def jobs_run(monkeypatch: pytest.MonkeyPatch) -> list[JobConfig]:
    """The jobs that would have been run; each ends with exit code 75."""
    jobs: list[JobConfig] = []
    monkeypatch.setattr(commands, "_run", lambda job, parsed: jobs.append(job) or 75)
    return jobs


def flags_of(parser: argparse.ArgumentParser) -> set[str]:
    return {name for action in parser._actions for name in action.option_strings or [action.dest]}


def test_the_flag_set_is_pinned() -> None:
    (commands,) = (a for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction))
    assert {name: flags_of(parser) for name, parser in commands.choices.items()} == {
        "run": {
            *("-h", "--help", "job", "--model", "--input", "--output", "--num-ranks", "--set"),
            *("--discard-changed", "--time-limit", "--until", "--slice"),
        },
        "plan": {
            *("-h", "--help", "job", "--model", "--input", "--output", "--num-ranks", "--set"),
            *("--rows", "--seed", "--tokens-per-s", "--device-memory-gib"),
        },
        "slurm": {
            *("-h", "--help", "job", "--model", "--input", "--output", "--num-ranks", "--set"),
            *("--nodes", "--gpus-per-node", "--cpus-per-node", "--time", "--array", "--sbatch", "--submit"),
        },
        "status": {"-h", "--help", "output_dir", "--write-report"},
        "verify": {"-h", "--help", "output_dir", "--rows", "--seed", "--model", "--allow-other-device"},
    }


def test_the_version_is_that_of_the_distribution(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.batch_generate(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"batch-generate {VERSION}\n"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "jobs.VERSION"}


def test_run_hands_the_job_over_and_returns_its_code(jobs_run: list[JobConfig]) -> None:
    flags = ["--model", "m", "--input", "i", "--output", "o", "--num-ranks", "2"]
    assert cli.batch_generate(["run", *flags, "--set", "engine.dtype=float32", "--set", "sampling.n=2"]) == 75
    (job,) = jobs_run
    assert (job.model.path, job.input.path, job.output.path, job.cluster.num_ranks) == ("m", "i", "o", 2)
    assert (job.engine.dtype, job.sampling.n) == ("float32", 2)


def test_a_job_file_may_follow_the_flags(jobs_run: list[JobConfig], tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("model: {path: m}\ninput: {path: i}\noutput: {path: o}\n")
    assert cli.batch_generate(["run", "--num-ranks", "3", str(file)]) == 75
    assert jobs_run[0].cluster.num_ranks == 3


def test_a_refused_config_is_one_sentence_and_exit_2(
    jobs_run: list[JobConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        cli.batch_generate(["run", "--model=m", "--input=i", "--output=o", "--set", "sampling.temprature=1"])
        == 2
    )
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        "batch-generate: unknown key sampling.temprature: the nearest valid one is sampling.temperature"
    ]
    assert jobs_run == []


@pytest.mark.parametrize(
    ("command", "codes"),
    [
        ("", ["0", "1", "2", "3", "75"]),
        ("run", ["0", "1", "2", "3", "75"]),
        ("plan", ["0", "1", "2"]),
        ("slurm", ["0", "1", "2"]),
        ("status", ["0", "1", "2"]),
        ("verify", ["0", "1", "2"]),
    ],
)
def test_the_help_of_a_command_says_its_own_exit_codes(
    command: str, codes: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.batch_generate([*command.split(), "--help"])
    assert caught.value.code == 0
    said = capsys.readouterr().out.partition("exit codes:\n")[2]
    assert re.findall(r"^  (\d+) ", said, re.MULTILINE) == codes
    assert ("max_error_rate" in said) is (command in ("", "run"))


def test_a_wrong_flag_and_a_folder_without_a_job_exit_with_2(tmp_path: Path) -> None:
    assert run_command("run", "--modle", "m").returncode == 2
    for command in (
        ("verify", "out", "--rows", "0"),
        ("plan", "--rows", "x"),
        ("plan", "--tokens-per-s", "-1"),
    ):
        refused = run_command(*command)
        assert refused.returncode == 2
        assert f"{command[-2]}: '{command[-1]}' is no " in refused.stderr
    for flag, value in (("--time-limit", "7"), ("--until", "25:00"), ("--slice", "4/4")):
        done = run_command("run", flag, value)
        assert done.returncode == 2
        assert f"argument {flag}: '{value}' is no" in done.stderr
    for command in ("status", "verify"):
        done = run_command(command, str(tmp_path / "absent"))
        assert done.returncode == 2
        assert len(done.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_another_distribution_named_kernels_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    metadata = tmp_path / "kernels-0.9.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 0.9.0\n")
    commands.check_environment()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert importlib.metadata.version("kernels") == "0.9.0"
    with pytest.raises(ConfigError, match=r"'kernels' 0\.9\.0"):
        commands.check_environment()


def test_batch_prefill_says_that_it_comes_later(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.batch_prefill(["run", "job.yaml"]) == 2
    assert "later" in capsys.readouterr().err


def test_status_writes_the_reports_of_a_job_that_could_not(tmp_path: Path) -> None:
    write_prompts(tmp_path / "in.parquet", [[1, 2], [3]])
    folder = OutputFolder(tmp_path / "out")
    start_run(folder, make_plan(tmp_path / "in.parquet"))  # and never gets further
    done = run_command("status", str(folder.path), "--write-report")
    assert done.returncode == 0
    assert done.stdout.splitlines()[1] == "rows read 0 = ok 0 + error 0 + in flight 0"
    assert done.stdout.splitlines()[-1] == f"wrote {folder.page_file}"
    assert "stopped" in folder.page_file.read_text()
    assert '"num_rows": 2' in folder.report_file.read_text()


def test_status_prints_the_equation() -> None:
    status = JobStatus(
        num_rows=10,
        num_shards=4,
        num_shards_committed=2,
        num_rows_committed=4,
        tally=Tally(
            num_ok=4,
            errors={"prompt_too_long": 1},
            num_prompt_tokens=30,
            num_completion_tokens=10,
            num_cached_tokens=6,
            num_preemptions=3,
            most_row_preemptions=2,
        ),
        num_in_flight=3,
        num_reused=1,
        num_run=4,
        num_runs=2,
        num_rank_deaths=1,
        seconds=8.0,
        last_run_seconds=4.0,
        effort=Effort(
            num_tokens_computed=50,
            wasted_tokens=WastedTokens(after_preemption=3, replay=1, lost_with_ranks=2, lost_with_runs=4),
            rank_hours=16 / 3600,
            tail_idle_rank_s=1.25,
            cost=0.5,
        ),
        is_running=True,
        environments=(),
    )
    assert commands.format_status(status).splitlines() == [
        "running: 2 of 4 shards committed, 4 of 10 rows, 0:00:05 left",
        "rows read 8 = ok 4 + error 1 + in flight 3",
        "last run: 1 row reused, 4 run; 2 runs, 1 rank lost, 8.0 s in all",
        "errors: prompt_too_long 1",
        "tokens: 30 in (6 cached, 20.0%), 10 out, 5.0 a second, 2.5 a second and rank",
        "computed: 50 tokens, of them wasted 10 = after preemptions 3 + replayed 1 + lost with ranks 2 + lost with runs 4",
        "preemptions: 3, at most 2 of one row",
        "took 0.004 rank-hours, 1.2 s of ranks idle at the end, cost 0.50",
    ]


def test_a_reader_that_has_seen_enough_is_no_traceback(tmp_path: Path) -> None:
    write_prompts(tmp_path / "in" / "a.parquet", [[1], [2]])
    folder = OutputFolder(tmp_path / "out")
    write_plan(folder, make_plan(tmp_path / "in"))
    command = [sys.executable, "-m", "jobs.cli", "status", str(folder.path)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == ""
    process.wait(60)


def test_status_says_what_to_change_where_the_same_command_would_stop_again(tmp_path: Path) -> None:
    folder = OutputFolder(tmp_path / "out")
    write_prompts(tmp_path / "in.parquet", [None] * 30 + [[1]])
    start_run(folder, make_plan(tmp_path / "in.parquet"), max_errors=3)[0].run()
    first_line = commands.format_status(read_status(folder.path)).splitlines()[0]
    assert "output.max_errors; raise it to go on" in first_line
    assert "same command" not in first_line


@pytest.mark.parametrize(("allowed", "has_failed"), [(0.09, True), (0.1, False), (1.0, False)])
def test_a_finished_job_says_whether_too_many_rows_are_error_rows(
    tmp_path: Path, allowed: float, has_failed: bool
) -> None:
    folder = OutputFolder(tmp_path / "out")
    write_prompts(tmp_path / "in.parquet", [None] + [[1]] * 9)
    plan = make_plan(tmp_path / "in.parquet")
    start_run(folder, plan, max_error_rate=allowed)[0].run()
    first_line = commands.format_status(read_status(folder.path)).splitlines()[0]
    assert first_line.startswith("finished")
    assert (f"output.max_error_rate ({allowed:g}) allows" in first_line) is has_failed
    assert ("with too many error rows" in folder.page_file.read_text()) is has_failed
    assert json.loads(folder.report_file.read_text())["has_failed_rate"] is has_failed
    start_run(folder, plan, max_error_rate=1.0)[0].run()  # what it says to do to accept them
    assert commands.format_status(read_status(folder.path)).startswith("finished: 1 of 1 shards")


def test_a_run_that_has_no_row_yet_says_that_its_time_left_is_not_known(tmp_path: Path) -> None:
    folder = OutputFolder(tmp_path / "out")
    write_prompts(tmp_path / "in.parquet", [[1], [2]])
    driver, _ = start_run(folder, make_plan(tmp_path / "in.parquet"))
    with DriverLock(folder):
        assert "time left not known" in commands.format_status(read_status(folder.path)).splitlines()[0]
        driver.run()
    assert "time left" not in commands.format_status(read_status(folder.path))


def run_without_ray(flags: dict[str, str], *settings: str, part: tuple[int, int]) -> None:
    """What ``run --slice`` would commit, by ranks in this process."""
    job = with_absolute_paths(load_job(None, settings, flags))
    folder, plan = OutputFolder(Path(job.output.path)), plan_job(job)
    write_plan(folder, plan)
    run = claim_run(folder)
    fleet, shards = InProcessFleet(folder, plan, run, 2), slice_of_shards(len(plan.shards), *part)
    assert Driver(folder, plan, fleet, run=run, shards=shards).run() is Outcome.COMMITTED


def test_a_slice_tells_of_itself_and_nothing_is_started_for_what_is_committed(
    tmp_path: Path, bard_path: Path
) -> None:
    out = tmp_path / "out"
    write_prompts(tmp_path / "in.parquet", [None, *[[1]] * 7])
    flags = {"model.path": str(bard_path), "input.path": f"{tmp_path}/in.parquet", "output.path": str(out)}
    setting = "input.rows_per_shard=2"
    command = ["run", *(f"--{key.split('.')[0]}={value}" for key, value in flags.items()), "--set", setting]

    def closing(*more: str, code: int = 0) -> str:
        done = run_command(*command, *more)
        assert done.returncode == code, done.stderr
        assert "starting a Ray" not in done.stderr
        assert ("is empty: the job has 4 shards" in done.stderr) is ("0/9" in more)
        said = done.stderr.splitlines()[-1]
        assert said.startswith("batch-generate: ")
        assert said.endswith(f"; the report is {out}/_overnight/report.html")
        return said.removeprefix("batch-generate: ").rpartition("; the report is ")[0]

    run_without_ray(flags, setting, part=(1, 2))
    (out / "_overnight" / "report.json").unlink()
    left = "2 of the job's 4 shards are left to other slices"
    assert closing("--slice", "1/2") == (
        f"slice 1/2: its 2 shards are committed (4 rows ok, 0 error rows), under {out}; {left}"
    )
    assert closing("--slice", "3/4").startswith("slice 3/4: its shard is committed (2 rows ok, 0 error rows)")
    assert closing("--slice", "0/9") == (
        f"slice 0/9: it has no shards (0 rows ok, 0 error rows), under {out}; {left}"
    )
    assert json.loads((out / "_overnight" / "report.json").read_text())["num_shards_committed"] == 2
    state = run_command("status", str(out)).stdout.splitlines()[0]
    assert state.startswith(
        "a slice is done; to go on run the other slices, or the job without --slice: 2 of 4"
    )

    run_without_ray(flags, setting, part=(0, 2))
    too_many = "that is more than output.max_error_rate (0.05) allows"
    assert closing(code=3) == f"7 rows ok, 1 error row, under {out}; {too_many}"
    assert closing("--slice", "0/2", "--set", "output.max_error_rate=0.5") == (
        f"slice 0/2: its 2 shards are committed (3 rows ok, 1 error row), under {out}; "
        "so is the whole job (7 rows ok, 1 error row)"
    )
    assert run_command("status", str(out)).stdout.startswith("finished: 4 of 4 shards committed")

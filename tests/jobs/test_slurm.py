"""Batch scripts: what they ask for and run, and what the command says where there is no Slurm."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from engine import ConfigError
from jobs import cli
from jobs.slurm import submit_script
from tests.conftest import ROOT

EXAMPLE = str(ROOT / "examples" / "slurm" / "job.yaml")


def script(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.batch_generate(["slurm", EXAMPLE, *arguments]) == 0
    text = capsys.readouterr().out
    checked = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, timeout=60)
    assert (checked.returncode, checked.stderr) == (0, "")
    return text


def options(text: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]


def test_one_node_needs_no_ray_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    text = script(capsys, "--time", "7h30m", "--gpus-per-node", "8")
    assert options(text) == [
        "--job-name=bard-night",
        "--nodes=1",
        "--ntasks-per-node=1",
        "--cpus-per-task=32",
        "--gpus-per-node=8",
        "--time=0-07:30:00",
        "--signal=B:USR1@330",
        "--requeue",
        "--open-mode=append",
        "--output=%x-%j.log",
    ]
    assert "ray_node" not in text
    assert f'batch-generate run {EXAMPLE} "${{until[@]}}" &' in text


def test_many_nodes_an_array_and_further_options(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--nodes", "3", "--gpus-per-node", "4", "--cpus-per-node", "9", "--time", "30h", "--array", "5"]
    text = script(
        capsys, *flags, "--sbatch=--account=night", "--set", "sampling.stop=[a b]", "--num-ranks", "7"
    )
    found = options(text)
    wanted = ["--nodes=3", "--cpus-per-task=9", "--time=1-06:00:00", "--array=0-4", "--output=%x-%A_%a.log"]
    assert {*wanted, "--account=night"} <= set(found)
    assert "python -m jobs.ray_node --head" in text
    run = next(line for line in text.splitlines() if line.startswith("batch-generate run"))
    assert "--num-ranks 7 --set 'sampling.stop=[a b]'" in run
    assert "--set cluster.num_ranks=0 --set cluster.max_ranks=7" in run
    assert run.endswith('--slice "$SLURM_ARRAY_TASK_ID/5" "${until[@]}" &')


@pytest.mark.parametrize(
    ("gpus_per_node", "settings", "most"),
    [(8, (), 16), (6, (), 8), (6, ("cluster.replica_spans_nodes=true",), 12), (0, (), 8)],
)
def test_ranks_of_many_nodes_are_whole_replicas(
    capsys: pytest.CaptureFixture[str], gpus_per_node: int, settings: tuple[str, ...], most: int
) -> None:
    flags = ["--nodes", "2", "--gpus-per-node", str(gpus_per_node), "--time", "8h"]
    for setting in ("cluster.ranks_per_replica=4", "cluster.num_ranks=0", *settings):
        flags += ["--set", setting]
    assert f"--set cluster.max_ranks={most}" in script(capsys, *flags)


def test_a_replica_that_no_node_can_hold_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--nodes", "2", "--gpus-per-node", "2", "--time", "8h", "--set", "cluster.num_ranks=0"]
    assert cli.batch_generate(["slurm", EXAMPLE, *flags, "--set", "cluster.ranks_per_replica=4"]) == 2
    assert "a replica of 4 ranks has no room" in capsys.readouterr().err


def test_a_job_that_is_wrong_is_no_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.batch_generate(["slurm", EXAMPLE, "--time", "8h", "--set", "sampling.temprature=1"]) == 2
    assert capsys.readouterr().out == ""


def test_what_slurm_says_is_passed_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="there is no sbatch here"):
        submit_script("#!/bin/bash\n")
    sbatch = tmp_path / "sbatch"
    sbatch.write_text("#!/bin/sh\necho invalid partition >&2\nexit 1\n")
    sbatch.chmod(0o755)
    with pytest.raises(ConfigError, match="invalid partition"):
        submit_script("#!/bin/bash\n")

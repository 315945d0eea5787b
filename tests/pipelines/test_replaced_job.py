"""A job whose folder another takes is whole again unless that one could run, also after a kill."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from engine import ConfigError
from pipelines.manifest import DriverLock, OutputFolder, load_plan, write_plan
from pipelines.plan import Plan
from pipelines.replaced_job import check_replaceable, restore_job, set_aside
from tests.conftest import ROOT
from tests.small_jobs import make_plan, write_prompts

KILLED = """
import os, shutil, sys
from pathlib import Path
from pipelines.manifest import OutputFolder, write_plan
from pipelines.plan import Plan
from pipelines.replaced_job import check_replaceable, set_aside

folder, moment = OutputFolder(Path(sys.argv[1])), sys.argv[2]
plan = Plan.from_json(sys.stdin.read())
with set_aside(folder, plan, check_replaceable(folder, plan)) as delete:
    if moment != "aside":
        write_plan(folder, plan)
        (folder.path / "part-00000-of-00003.parquet").write_bytes(b"of an empty shard")
    if moment == "deleting":
        shutil.rmtree = lambda *_, **__: os._exit(9)
        delete()
    os._exit(9)
"""


@pytest.fixture
def folder(tmp_path: Path) -> OutputFolder:
    """Holds a job and its parts."""
    write_prompts(tmp_path / "in" / "a.parquet", [[1], [2], [3]])
    folder, plan = OutputFolder(tmp_path / "out"), make_plan(tmp_path / "in", 2)
    write_plan(folder, plan)
    for name in plan.output_names():
        folder.part_file(name).write_bytes(b"a part")
    with DriverLock(folder):
        return folder


@pytest.fixture
def other(tmp_path: Path, folder: OutputFolder) -> Plan:
    return make_plan(tmp_path / "in", 1, temperature=0.7)


def snapshot(folder: OutputFolder) -> dict[Path, bytes | None]:
    return {path: path.read_bytes() if path.is_file() else None for path in folder.path.rglob("*")}


def test_only_another_job_that_nobody_runs_is_replaceable(folder: OutputFolder, other: Plan) -> None:
    before = snapshot(folder)
    assert check_replaceable(folder, load_plan(folder)) is None
    assert check_replaceable(folder, other) == "temperature was null and is now 0.7"
    with DriverLock(folder), pytest.raises(ConfigError, match="another run is at work"):
        check_replaceable(folder, other)
    assert snapshot(folder) == before
    folder.path.joinpath("notes.txt").touch()
    with pytest.raises(ConfigError, match=r"holds 'notes\.txt'"):
        check_replaceable(folder, other)


def test_it_is_out_of_sight_and_in_use_until_it_is_deleted(folder: OutputFolder, other: Plan) -> None:
    with set_aside(folder, other, check_replaceable(folder, other)) as delete:
        write_plan(folder, other)
        assert [path.name[0] for path in folder.path.iterdir()] == ["_", "_"]
        with pytest.raises(ConfigError, match="another run is at work"):
            restore_job(folder)
        delete()
    assert [path.name for path in folder.path.iterdir()] == ["_overnight"]


@pytest.mark.parametrize("temperature", [0.7, 0.9])
def test_a_job_that_came_meanwhile_is_not_the_one_to_replace(
    folder: OutputFolder, other: Plan, tmp_path: Path, temperature: float
) -> None:
    """The same job by another run, or a third one."""
    difference = check_replaceable(folder, other)
    newer = make_plan(tmp_path / "in", 1, temperature=temperature)
    with set_aside(folder, newer, check_replaceable(folder, newer)) as delete:
        write_plan(folder, newer)
        delete()
    with DriverLock(folder):
        before = snapshot(folder)
    refused = pytest.raises(ConfigError, match="holds another job than when this run began")
    with refused, set_aside(folder, other, difference):
        raise AssertionError("the newer job was set aside")
    assert snapshot(folder) == before


@pytest.mark.parametrize("moment", ["aside", "begun", "deleting"])
def test_after_a_kill_it_is_there_or_gone_never_half(folder: OutputFolder, other: Plan, moment: str) -> None:
    before = snapshot(folder)
    command = [sys.executable, "-c", KILLED, str(folder.path), moment]
    killed = subprocess.run(command, cwd=ROOT, input=other.to_json(), text=True, timeout=60, check=False)
    assert killed.returncode == 9
    restore_job(folder)
    if moment == "deleting":
        assert sorted(path.name for path in folder.path.iterdir()) == ["_overnight", other.part_name(0)]
        assert load_plan(folder) == other
    else:
        assert snapshot(folder) == before

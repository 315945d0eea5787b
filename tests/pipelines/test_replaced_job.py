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


@pytest.fixture
def plans(tmp_path: Path) -> tuple[Plan, Plan]:
    write_prompts(tmp_path / "in" / "a.parquet", [[1], [2], [3]])
    return tuple(make_plan(tmp_path / "in", 2, temperature=t) for t in (0.5, 0.7))  # type: ignore[return-value]


@pytest.fixture
def folder(tmp_path: Path, plans: tuple[Plan, Plan]) -> OutputFolder:
    """Holds the first plan and its parts."""
    folder = OutputFolder(tmp_path / "out")
    write_plan(folder, plans[0])
    for name in plans[0].output_names():
        folder.part_file(name).write_bytes(b"a part")
    with DriverLock(folder):
        return folder


def snapshot(folder: OutputFolder) -> dict[Path, bytes | None]:
    return {path: path.read_bytes() if path.is_file() else None for path in folder.path.rglob("*")}


def test_only_another_job_that_nobody_runs_is_replaceable(
    folder: OutputFolder, plans: tuple[Plan, Plan], tmp_path: Path
) -> None:
    before = snapshot(folder)
    assert check_replaceable(OutputFolder(tmp_path / "new"), plans[0]) is None
    assert check_replaceable(folder, plans[0]) is None
    assert check_replaceable(folder, plans[1]) == "temperature was 0.5 and is now 0.7"
    with DriverLock(folder), pytest.raises(ConfigError, match="another run is at work"):
        check_replaceable(folder, plans[1])
    assert snapshot(folder) == before
    folder.path.joinpath("notes.txt").write_text("not ours")
    with pytest.raises(ConfigError, match=r"holds 'notes\.txt'"):
        check_replaceable(folder, plans[1])


def test_a_job_is_out_of_sight_until_it_is_deleted(folder: OutputFolder, plans: tuple[Plan, Plan]) -> None:
    with set_aside(folder) as delete:
        assert [path.name[0] for path in folder.path.iterdir()] == ["_"]
        write_plan(folder, plans[1])
        with pytest.raises(ConfigError, match="another run is at work"):
            restore_job(folder)
        delete()
    assert [path.name for path in folder.path.iterdir()] == ["_overnight"]
    assert load_plan(folder) == plans[1]


def test_without_that_it_is_put_back_and_its_successor_gone(
    folder: OutputFolder, plans: tuple[Plan, Plan]
) -> None:
    before = snapshot(folder)
    with set_aside(folder):
        write_plan(folder, plans[1])
        folder.part_file(plans[1].part_name(0)).write_bytes(b"of an empty shard")
    assert snapshot(folder) == before


@pytest.mark.parametrize("moment", ["aside", "begun", "deleting"])
def test_after_a_kill_it_is_there_or_gone_never_half(
    folder: OutputFolder, plans: tuple[Plan, Plan], moment: str
) -> None:
    before = snapshot(folder)
    code = (
        "import os, shutil, sys\nfrom pathlib import Path\nfrom pipelines.manifest import OutputFolder, write_plan\n"
        "from pipelines.plan import Plan\nfrom pipelines.replaced_job import set_aside\n"
        "folder, plan, moment = OutputFolder(Path(sys.argv[1])), Plan.from_json(sys.stdin.read()), sys.argv[2]\n"
        "with set_aside(folder) as delete:\n"
        "    if moment != 'aside': write_plan(folder, plan)\n"
        "    if moment == 'deleting':\n        shutil.rmtree = lambda *_, **__: os._exit(9)\n        delete()\n"
        "    os._exit(9)\n"
    )
    command = [sys.executable, "-c", code, str(folder.path), moment]
    killed = subprocess.run(command, cwd=ROOT, input=plans[1].to_json(), text=True, timeout=60, check=False)
    assert killed.returncode == 9
    restore_job(folder)
    if moment != "deleting":
        assert snapshot(folder) == before
        return
    assert load_plan(folder) == plans[1]
    assert [path.name for path in folder.path.iterdir()] == ["_overnight"]

"""A folder belongs to one plan, and to one driver at a time."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from engine import ConfigError
from pipelines.commits import try_read_commit
from pipelines.manifest import (
    DriverLock,
    OutputFolder,
    Tally,
    check_folder,
    claim_run,
    is_driver_alive,
    load_plan,
    write_plan,
)
from pipelines.plan import Plan
from tests.conftest import ROOT
from tests.small_jobs import make_plan, write_prompts


@pytest.fixture
def folder(tmp_path: Path) -> OutputFolder:
    return OutputFolder(tmp_path / "out")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    write_prompts(tmp_path / "in" / "a.parquet", [[1], [2], [3]], tag=["x", "y", None])
    return tmp_path / "in"


def test_a_plan_reads_back_equal(folder: OutputFolder, source: Path) -> None:
    plan = make_plan(source, stop=("a",), temperature=0.5)
    write_plan(folder, plan)
    again = load_plan(folder)
    assert again == plan
    assert again.fingerprint == plan.fingerprint
    assert again.contract.output == plan.contract.output
    write_plan(folder, plan)
    check_folder(folder, make_plan(source, stop=["a"], temperature=0.5))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda source: make_plan(source, temperature=0.7), "temperature was 0.5 and is now 0.7"),
        (
            lambda source: make_plan(source, rows_per_shard=4, temperature=0.5),
            "rows_per_shard was 10 and is now 4",
        ),
        (lambda source: make_plan(source, temperature=0.5, num_samples=2), "columns"),
    ],
)
def test_another_job_in_the_folder_is_named(folder: OutputFolder, source: Path, change, says: str) -> None:
    write_plan(folder, make_plan(source, temperature=0.5))
    with pytest.raises(ConfigError, match=f"holds another job: .*{says}"):
        check_folder(folder, change(source))


def test_changed_inputs_are_named(folder: OutputFolder, source: Path) -> None:
    write_plan(folder, make_plan(source))
    write_prompts(source / "b.parquet", [[1]], tag=["z"])
    with pytest.raises(ConfigError, match=r"input file 'b\.parquet' is new"):
        check_folder(folder, make_plan(source))
    (source / "b.parquet").unlink()
    write_prompts(source / "a.parquet", [[1], [2], [4]], tag=["x", "y", None])
    with pytest.raises(ConfigError, match=r"input file 'a\.parquet' changed"):
        check_folder(folder, make_plan(source))


def test_a_folder_with_other_files_is_refused(folder: OutputFolder, source: Path) -> None:
    folder.path.mkdir()
    pq.write_table(pa.table({"a": [1]}), folder.path / "old.parquet")
    with pytest.raises(ConfigError, match=r"holds 'old\.parquet'"):
        check_folder(folder, make_plan(source))


@pytest.mark.parametrize("below", [".", "a", "a/b"])
def test_a_path_below_a_file_is_no_folder(tmp_path: Path, source: Path, below: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot be a folder: .*/file' is a file"):
        check_folder(OutputFolder(tmp_path / "file" / below), make_plan(source))


def test_a_driver_that_is_cleaned_away_by_another_is_refused(
    folder: OutputFolder, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan(source)

    def write_and_lose(path: Path, content: bytes) -> None:
        path.write_bytes(content)
        path.unlink()

    with monkeypatch.context() as patch:
        patch.setattr("pipelines.manifest.write_durably", write_and_lose)
        with pytest.raises(ConfigError, match="another run is at work"):
            write_plan(folder, plan)
    write_plan(folder, plan)
    shutil.rmtree(folder.state)
    with pytest.raises(ConfigError, match="another run is at work"), DriverLock(folder):
        pass
    write_plan(folder, plan)

    def lock_and_lose(*_: object) -> bool:
        shutil.rmtree(folder.state)
        return True

    monkeypatch.setattr("pipelines.manifest._try_lock", lock_and_lose)
    with pytest.raises(ConfigError, match="another run is at work"), DriverLock(folder):
        pass


def test_a_part_of_another_job_is_refused(folder: OutputFolder, source: Path) -> None:
    plan = make_plan(source)
    write_plan(folder, plan)
    assert try_read_commit(folder, plan, 0) is None
    pq.write_table(pa.table({"a": [1]}), folder.part_file(plan.part_name(0)))
    with pytest.raises(ConfigError, match="was not written by this job"):
        try_read_commit(folder, plan, 0)


def test_run_numbers_never_come_again(folder: OutputFolder, source: Path) -> None:
    write_plan(folder, make_plan(source))
    assert [claim_run(folder) for _ in range(3)] == [1, 2, 3]


def test_one_driver_at_a_time(folder: OutputFolder, source: Path) -> None:
    plan: Plan = make_plan(source)
    write_plan(folder, plan)
    assert not is_driver_alive(folder)
    hold = (
        "import sys, time; from pathlib import Path; from pipelines.manifest import *\n"
        "with DriverLock(OutputFolder(Path(sys.argv[1]))):\n    print('held', flush=True); time.sleep(60)"
    )
    other = subprocess.Popen([sys.executable, "-c", hold, str(folder.path)], stdout=subprocess.PIPE, cwd=ROOT)
    assert other.stdout is not None
    try:
        assert other.stdout.readline() == b"held\n"
        assert is_driver_alive(folder)
        with pytest.raises(ConfigError, match="another run is at work"), DriverLock(folder):
            pass
    finally:
        other.kill()
        other.wait()
        other.stdout.close()
    assert not is_driver_alive(folder)
    with DriverLock(folder):
        pass


def test_tallies_add_up() -> None:
    a = Tally(num_ok=1, errors={"x": 2}, num_prompt_tokens=3)
    b = Tally(num_ok=4, errors={"x": 1, "y": 1}, num_completion_tokens=5, num_cached_tokens=6)
    both = a + b
    assert (both.num_ok, both.num_error, both.num_rows) == (5, 4, 9)
    assert both.errors == {"x": 3, "y": 1}

"""Host memory: flat over a job, and not the size of a row group that is hardly read."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tests.conftest import ROOT
from tests.small_jobs import write_prompts


def memory_of_job(tmp_path: Path, rows_per_shard: int) -> list[float]:
    """MiB before the job and at each commit, and the peak, of a process that does nothing else."""
    command = [sys.executable, "-m", "tests.end_to_end.memory_of_job"]
    arguments = [str(tmp_path / "in.parquet"), str(tmp_path / "out"), str(rows_per_shard)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [float(word) for word in done.stdout.split()]


def test_memory_is_flat_from_a_tenth_of_a_job_to_its_end(tmp_path: Path) -> None:
    write_prompts(tmp_path / "in.parquet", [[1 + i % 99] * 64 for i in range(4000)])
    _, *at_commits, _ = memory_of_job(tmp_path, 100)
    print(at_commits)
    assert len(at_commits) == 40
    # 3,600 rows of 64 ids are 0.9 MiB as Parquet has them, and some 8 MiB as Python's integers.
    assert at_commits[-1] - at_commits[3] < 4


def test_a_fat_column_that_is_not_passed_on_is_not_read(tmp_path: Path) -> None:
    num_rows, size = 640, 1 << 18
    fat = pa.array([os.urandom(size) for _ in range(num_rows)], pa.binary())
    table = pa.table({"prompt_token_ids": [[1 + i % 99] for i in range(num_rows)], "fat": fat})
    pq.write_table(table, tmp_path / "in.parquet", row_group_size=num_rows, use_dictionary=False)
    del fat, table
    before, *_, peak = memory_of_job(tmp_path, 64)
    print(before, peak)
    assert pq.read_metadata(tmp_path / "in.parquet").num_row_groups == 1
    assert peak < 200, "160 MiB decoded, and the libraries take more than 100"

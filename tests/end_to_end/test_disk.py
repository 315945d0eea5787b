"""An output that cannot be written: a clear end, nothing marked done, and a run that goes on once it can be."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

from pipelines.driver import Outcome
from pipelines.manifest import OutputFolder
from pipelines.report import read_status
from tests.conftest import ROOT
from tests.small_jobs import check_answers, make_plan, random_prompts, read_output, start_run, write_prompts

RUN_ON_A_FULL_DISK = """
import resource, sys
from pathlib import Path
from pipelines.driver import JobFailed
from pipelines.manifest import OutputFolder
from tests.small_jobs import make_plan, start_run
folder, plan = OutputFolder(Path(sys.argv[2])), make_plan(sys.argv[1], 100)
driver, _ = start_run(folder, plan)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]), resource.RLIM_INFINITY))
try:
    driver.run()
except (JobFailed, OSError) as error:
    print(error)
    sys.exit(1)
"""


def run_on_a_full_disk(tmp_path: Path, num_bytes: int) -> subprocess.CompletedProcess[str]:
    """As a disk that fills up: no file may grow beyond ``num_bytes``."""
    command = [sys.executable, "-c", RUN_ON_A_FULL_DISK, str(tmp_path / "in.parquet"), str(tmp_path / "out")]
    return subprocess.run([*command, str(num_bytes)], cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_a_full_disk_ends_the_job_with_nothing_marked_done_that_is_not(tmp_path: Path) -> None:
    prompts = random_prompts(random.Random(1), 300)
    write_prompts(tmp_path / "in.parquet", prompts)
    folder = OutputFolder(tmp_path / "out")
    done = run_on_a_full_disk(tmp_path, 4000)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "File too large" in done.stdout
    status = read_status(folder.path)
    assert status.num_shards_committed == len(list(folder.path.glob("*.parquet"))) < 3
    again, _ = start_run(folder, make_plan(tmp_path / "in.parquet", 100))
    assert again.run() is Outcome.COMMITTED
    check_answers(read_output(folder.path), prompts)

"""Some of ``make torture`` for every change: thirty harms, without Ray; and what counts as one."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pipelines.driver import Outcome
from pipelines.manifest import OutputFolder
from tests.conftest import ROOT
from tests.small_jobs import make_plan, random_prompts, start_run, write_prompts
from tests.torture.harm import Aim, Harm, Log, TooMild


@pytest.mark.kill
@pytest.mark.slow
def test_thirty_harms_lose_and_double_nothing() -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    print("seed", seed)
    command = [sys.executable, "-m", "tests.torture", "--scripted", "30", "--seed", str(seed)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)
    assert "each row in its output once" in done.stdout


def test_a_signal_to_a_finished_job_is_no_harm(tmp_path: Path) -> None:
    write_prompts(tmp_path / "in" / "0.parquet", random_prompts(random.Random(1), 20))
    output, log = tmp_path / "out", Log()
    aim = Aim(output, 20, log)
    with subprocess.Popen(["sleep", "60"]) as process:
        assert aim.hit("driver", process.pid, signal.SIGSTOP, [])
        driver, _ = start_run(OutputFolder(output), make_plan(tmp_path / "in"))
        assert aim.hit("rank", process.pid, signal.SIGTERM, [])
        assert driver.run() is Outcome.COMMITTED
        assert aim.hit("rank", process.pid, signal.SIGKILL, [])
    assert not aim.hit("rank", process.pid, signal.SIGKILL, []), "it is gone"
    assert [harm.name for harm in log.harms] == ["driver SIGSTOP, SIGCONT", "rank SIGTERM"]
    assert log.num_too_late == 1


@pytest.mark.parametrize(
    ("drivers", "ranks", "idle_ranks", "is_enough"),
    [(40, 10, 0, True), (40, 9, 0, False), (45, 5, 0, False), (40, 0, 10, False), (6, 10, 34, False)],
)
def test_a_run_that_harmed_too_little_at_work_fails(
    drivers: int, ranks: int, idle_ranks: int, is_enough: bool
) -> None:
    log = Log()
    for whom, num_in_flight, count in [("driver", 4, drivers), ("rank", 2, ranks), ("rank", 0, idle_ranks)]:
        for _ in range(count):
            log.note(Harm(whom=whom, signals="SIGKILL", num_in_flight=num_in_flight, num_done=1, num_rows=9))
    if is_enough:
        log.check_harms(50, 0.2)
    else:
        with pytest.raises(TooMild):
            log.check_harms(50, 0.2)

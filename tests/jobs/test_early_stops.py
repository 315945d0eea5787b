"""A run that is told to stop before Ray is up, as the command line starts it.

Later moments, with Ray's processes half started, are in ``tests/end_to_end/test_kills.py``.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.marked_processes import JOB_MARK, marked_processes, start_marked

NUMBERS = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]


@contextmanager
def run_started(output: Path, *overrides: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A driver, and the mark of all that it starts."""
    mark = uuid.uuid4().hex
    flags = ["--output", str(output), *(word for override in overrides for word in ("--set", override))]
    driver = start_marked(mark, "jobs.cli", "run", str(ROOT / "examples" / "bard" / "job.yaml"), *flags)
    try:
        yield driver, mark
    finally:
        driver.kill()
        driver.wait()


def catches(pid: int, number: signal.Signals) -> bool:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (caught,) = (int(line.split()[1], 16) for line in lines if line.startswith("SigCgt"))
    return bool(caught >> number - 1 & 1)


def check_stop(driver: subprocess.Popen[bytes], mark: str, number: signal.Signals, output: Path) -> None:
    driver.send_signal(number)
    told_at = time.monotonic()
    code = driver.wait(60)
    print(number.name, "took", time.monotonic() - told_at)
    assert code == 75
    assert time.monotonic() - told_at < 4, "two seconds, with room for a busy machine"
    while marked_processes(f"{JOB_MARK}={mark}"):
        assert time.monotonic() - told_at < 20
        time.sleep(0.05)
    assert not output.exists()


@pytest.mark.parametrize("delay_s", [0.0, 0.2, 0.5, 1.0, 1.5])
@pytest.mark.parametrize("number", NUMBERS)
def test_a_stop_is_a_clean_one_from_the_first_moment_on(
    tmp_path: Path, number: signal.Signals, delay_s: float
) -> None:
    with run_started(tmp_path / "out") as (driver, mark):
        while not catches(driver.pid, signal.SIGUSR1):
            assert driver.poll() is None
            time.sleep(0.005)
        time.sleep(delay_s)
        check_stop(driver, mark, number, tmp_path / "out")


@pytest.mark.parametrize("number", NUMBERS)
def test_a_stop_does_not_wait_for_a_cluster_that_answers_nothing(
    tmp_path: Path, number: signal.Signals
) -> None:
    with socket.create_server(("", 0)) as silent:  # Ray goes by the address of the node
        address = f"cluster.address=127.0.0.1:{silent.getsockname()[1]}"
        with run_started(tmp_path / "out", address) as (driver, mark):
            silent.settimeout(60)
            connection, _ = silent.accept()
            with connection:
                time.sleep(0.5)
                check_stop(driver, mark, number, tmp_path / "out")

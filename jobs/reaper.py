"""A watchdog for the Ray that a job started: when the driver is gone, however it went, so is that Ray.

Runs as a process of its own session with nothing but the standard library. It waits for the end of its
input, which the system closes with the driver, and ends the processes that carry the job's mark in
the environment they were started with: those and no others.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

MARK = "OVERNIGHT_RAY"
"""The environment variable that our Ray's processes inherit, and one job's alone."""

KEEPS_ENVIRONMENT = {"SPT_NOENV": "1"}
"""Unless this is set, Ray's agents write their titles over the environment that they were started with."""

_PATIENCE_S = 20.0
_NUM_EMPTY_LOOKS = 5
"""Looks in a row that find nothing before nothing is there: a process in the middle of an exec shows no
environment for an instant, and what it becomes would outlive us."""


class Reaper:
    """Starts the watchdog; ``close`` lets it do its work and waits for it."""

    def __init__(self) -> None:
        self.mark = uuid.uuid4().hex
        self.environment = {MARK: self.mark, **KEEPS_ENVIRONMENT}
        """What every process that is to be ended has to be started with."""
        environment = {name: value for name, value in os.environ.items() if name != MARK}
        self._process = subprocess.Popen(
            [sys.executable, "-I", __file__, self.mark],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env=environment,
        )

    def close(self) -> None:
        """End what is left of the Ray, and the watchdog."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        # One that the kernel holds on to outlives our patience; the watchdog gives up by itself.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_PATIENCE_S * 2)


def reap(mark: str, patience_s: float = _PATIENCE_S) -> int:
    """End every process started with ``mark`` in its environment; how many there were."""
    reaped: set[tuple[int, str]] = set()
    deadline = time.monotonic() + patience_s
    num_empty_looks = 0
    while num_empty_looks < _NUM_EMPTY_LOOKS and time.monotonic() < deadline:
        found = [pid for pid in map(_as_pid, os.listdir("/proc")) if pid and _carries(pid, mark)]
        num_empty_looks = 0 if found else num_empty_looks + 1
        for pid in found:
            started = _try_end(pid, mark)
            if started is not None:
                reaped.add((pid, started))
        time.sleep(0.05)
    return len(reaped)


def _as_pid(name: str) -> int:
    return int(name) if name.isdigit() and int(name) != os.getpid() else 0


def _carries(pid: int, mark: str) -> bool:
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
    return f"{MARK}={mark}".encode() in environment.split(b"\0")


def _try_end(pid: int, mark: str) -> str | None:
    """End one process and return its start time; None when it went by itself.

    The descriptor pins the process: a number used again in between is another process without the mark.
    """
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        return None
    try:
        if not _carries(pid, mark):
            return None
        started = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return started


if __name__ == "__main__":
    sys.stdin.read()
    reap(sys.argv[1])

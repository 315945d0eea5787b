"""Live processes by what was put into the environment that they were started with.

Tests tell the processes of one job or cluster from all others by it, however far down they were started.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT

JOB_MARK = "TEST_JOB_MARK"


def marked_processes(mark: str, title: bytes = b"") -> list[int]:
    """Pids whose environment holds ``mark`` and whose command line holds ``title``."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            environment, command = (entry / "environ").read_bytes(), (entry / "cmdline").read_bytes()
        except (OSError, ValueError):
            continue
        if mark.encode() in environment and title in command:
            found.append(int(entry.name))
    return found


def start_marked(mark: str, module: str, *arguments: str) -> subprocess.Popen[bytes]:
    """A driver with a Ray of its own, whose processes are those of ``JOB_MARK`` with this mark."""
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    environment |= {"PYTHONPATH": str(ROOT), JOB_MARK: mark}
    return subprocess.Popen([sys.executable, "-m", module, *arguments], cwd=ROOT, env=environment)

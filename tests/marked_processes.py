"""Live processes by what was put into the environment that they were started with.

Tests tell the processes of one job or cluster from all others by it, however far down they were started.
"""

from __future__ import annotations

from pathlib import Path


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

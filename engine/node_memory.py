"""Bytes that the processes of one node hold once: whoever comes first fills them, the others map the same.

Owns how processes find each other's memory, and that none of it outlives the last of them, however they end.
It must not know what the bytes are.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np

from engine.errors import ConfigError


def available_bytes() -> int:
    """Host memory that this process could still fill: of the machine, and of its control group."""
    facts = _read_table(Path("/proc/meminfo"))
    available = 1024 * facts.get("MemAvailable:", 0)
    group = Path("/sys/fs/cgroup")
    try:
        limit = int((group / "memory.max").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # no limit, or none that can be read
        return available
    held = _read_table(group / "memory.stat")
    return max(0, min(available, limit - held.get("anon", 0) - held.get("shmem", 0)))


def share_bytes(
    key: str, num_bytes: int, fill: Callable[[np.ndarray], None], may_create: Callable[[], bool]
) -> np.ndarray | None:
    """``num_bytes`` of the node under ``key``, filled; None where nobody has them and ``may_create`` says no.

    Others wait while one process fills. The memory has no name in any file system: it goes with the last
    process that holds it, and only a small list of who holds it stays in the folder for temporary files. A
    process that cannot see another's (another user's, another container's) has its own.

    Raises:
        ConfigError: the list cannot be kept.
    """
    name = f"overnight-{key}"
    path = Path(tempfile.gettempdir()) / f"{name}.{os.getuid()}"
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"{path} cannot be opened: {error}") from error
    with open(handle, "r+", encoding="ascii") as book:
        fcntl.flock(book, fcntl.LOCK_EX)  # a dead process's lock is gone with it
        holders = [line for line in book.read().splitlines() if _is_held(line, name, num_bytes)]
        memory = next((fd for line in holders if (fd := _try_open(line)) is not None), None)
        if memory is not None:
            found = _map(memory, num_bytes)
        elif may_create():
            memory = os.memfd_create(name, os.MFD_CLOEXEC)
            os.ftruncate(memory, num_bytes)
            found = _map(memory, num_bytes)
            fill(found)  # whole before it is listed
        else:
            return None
        book.seek(0)
        book.truncate()
        book.write("".join(f"{line}\n" for line in [*holders, f"{os.getpid()} {memory}"]))
    return found


def _map(memory: int, num_bytes: int) -> np.ndarray:
    """The bytes; the descriptor stays open, for others to find, as long as they are used."""
    mapping = mmap.mmap(memory, num_bytes)
    # Rows are looked up all over: large pages where the system has them.
    mapping.madvise(mmap.MADV_HUGEPAGE)
    found = np.frombuffer(mapping, np.uint8)
    weakref.finalize(found, os.close, memory)
    return found


def _place(line: str) -> str:
    pid, _, descriptor = line.partition(" ")
    return f"/proc/{pid}/fd/{descriptor}"


def _is_held(line: str, name: str, num_bytes: int) -> bool:
    """Whether a line of the list still says where such memory is: numbers of processes come back."""
    try:
        facts = os.stat(_place(line))
        is_ours = facts.st_uid == os.getuid() and facts.st_size == num_bytes
        return is_ours and os.readlink(_place(line)) == f"/memfd:{name} (deleted)"
    except OSError:
        return False


def _try_open(line: str) -> int | None:
    try:
        return os.open(_place(line), os.O_RDWR | os.O_CLOEXEC)
    except OSError:  # it ended since
        return None


def _read_table(path: Path) -> dict[str, int]:
    """Lines of a name and a number."""
    try:
        rows = [line.split() for line in path.read_text(encoding="utf-8").splitlines()]
        return {row[0]: int(row[1]) for row in rows if len(row) > 1}
    except (OSError, ValueError):
        return {}

"""Memory that the processes of a node hold once: found by others, outlived by its filler, gone with the last."""

from __future__ import annotations

import gc
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from engine.node_memory import available_bytes, share_bytes
from tests.conftest import ROOT

SIZE = 3 << 20
HOLDER = """
import sys
import numpy as np
from engine.node_memory import share_bytes
filled = []
def fill(memory):
    filled.append(True)
    memory[:] = np.arange(len(memory)) % 251
found = share_bytes(sys.argv[1], int(sys.argv[2]), fill, lambda: True)
print(bool(filled), int(found.sum()), flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def holders() -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.kill()
        process.communicate()


def hold(holders: list[subprocess.Popen[str]]) -> tuple[subprocess.Popen[str], str]:
    """Another process with the memory, and what it says: whether it filled it, and the sum."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", HOLDER, "key", str(SIZE)], cwd=ROOT, **pipes)
    holders.append(process)
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def refuse(memory: np.ndarray) -> None:
    raise AssertionError("it is filled already")


def test_others_find_it_and_it_outlives_its_filler(holders: list[subprocess.Popen[str]]) -> None:
    expected = int((np.arange(SIZE) % 251).sum())
    first, said = hold(holders)
    assert said == f"True {expected}"
    found = share_bytes("key", SIZE, refuse, lambda: False)
    assert found is not None
    first.kill()
    first.wait()
    assert int(found.sum()) == expected
    second, said = hold(holders)
    assert said == f"False {expected}"
    found[0] = 250  # the same memory, not a copy
    third, said = hold(holders)
    assert said == f"False {expected + 250}"
    for process in (second, third):
        process.kill()
        process.wait()
    del found
    gc.collect()
    assert share_bytes("key", SIZE, refuse, lambda: False) is None


def test_what_a_killed_process_had_half_filled_is_filled_anew(holders: list[subprocess.Popen[str]]) -> None:
    def die(memory: np.ndarray) -> None:
        raise OSError("the disk failed")

    with pytest.raises(OSError, match="the disk failed"):
        share_bytes("key", SIZE, die, lambda: True)
    assert hold(holders)[1].startswith("True")


def test_another_size_or_key_is_another_memory() -> None:
    kept = [share_bytes("key", SIZE, lambda memory: memory.fill(1), lambda: True)]
    assert share_bytes("key", SIZE + 1, refuse, lambda: False) is None
    assert share_bytes("other", SIZE, refuse, lambda: False) is None
    assert kept[0] is not None


def test_a_list_that_says_nonsense_is_no_obstacle(folder: Path) -> None:
    kept = share_bytes("key", SIZE, lambda memory: memory.fill(1), lambda: True)
    (book,) = folder.glob("overnight-key.*")
    book.write_text("1 1\nnonsense\n999999999 3\n../../etc 0\n" + book.read_text())
    found = share_bytes("key", SIZE, refuse, lambda: False)
    assert kept is not None
    assert found is not None
    assert int(found.sum()) == SIZE


def test_available_memory_is_that_of_a_machine() -> None:
    assert 1 << 20 < available_bytes() < 1 << 50

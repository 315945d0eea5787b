"""The benchmark of where n-gram tables lie, at small dimensions: every figure is there, every place measured."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from benchmarks import engram
from benchmarks.engram import resident_share
from engine.staged_rows import NUM_THREADS

OPTIONS = ["--dims", "small", "--table-gib", "0.01", "--experts", "4", "--chunk", "32"]


def test_every_place_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    monkeypatch.setitem(NUM_THREADS, "cpu", 4)
    engram.main([*OPTIONS, "--tokens", "64", "--cold-tokens", "32", "--folder", str(tmp_path)])
    output = capsys.readouterr().out
    lines = json.loads(output.splitlines()[-1])
    assert [line["place"] for line in lines] == ["gpu"] * 4 + ["host"] * 4 + ["mmap"] * 4
    assert [line["tokens"] for line in lines] == [32, 32, 64, 64] * 3
    assert all(line["tokens_per_s"] > 0 for line in lines)
    # Two layers, 4 look-ups a token, 32 values and a scale.
    assert lines[2]["mb_fetched"] == round(64 * 2 * 4 * 33 / 1e6, 1)
    assert sum(line["waited_ms_a_step"] > 0 for line in lines) == 4
    assert "decoding rows, ms: median" in output
    written = sum(path.stat().st_size for path in engram.table_files(tmp_path))
    assert written == pytest.approx(0.01 * 2**30, rel=0.05)


def test_resident_pages_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(1 << 20))
    assert resident_share([path]) == 1.0

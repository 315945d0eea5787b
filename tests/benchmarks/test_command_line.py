"""Every benchmark's name and what it refuses, in a sentence and before anything is written; what is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path

import pytest
import torch

from benchmarks.__main__ import OTHERS
from benchmarks.environment import device_name
from tests.conftest import ROOT

NAMES = OTHERS.partition(":")[0].split(", ")
WITHOUT_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@pytest.mark.parametrize("name", NAMES)
def test_help_says_how_it_is_called(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        import_module(f"benchmarks.{name}").main(["--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: python -m benchmarks.{name} ")


@WITHOUT_GPU
@pytest.mark.parametrize(
    "words",
    [
        ["decode_steps", "--model", "none"],
        ["engram"],
        ["engram_rows"],
        ["peer_rows"],
        ["exactness_cost", "--kernels"],
        ["step"],
    ],
    ids=lambda words: words[0],
)
def test_what_needs_a_gpu_ends_at_once_without_one(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(SystemExit) as ended:
        import_module(f"benchmarks.{words[0]}").main(words[1:])
    assert ended.value.code == 2
    assert "and torch finds none on this machine" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["engram", "--write-only"], "--write-only needs --folder"),
        (["engram", "--dims", "small", "--places", "gpu,moon"], "'moon'"),
        (["engram", "--dims", "small", "--table-gib", "0"], "expected more than 0"),
        (["peer_rows", "--ranks", "1"], "--ranks is 1"),
        (["peer_rows", "--ranks", "5"], "--ranks is 5"),
        (["peer_rows", "--ranks", "384"], "--ranks 384 needs 384 GPUs"),
        (["exactness_cost", "--rows", "1,x"], "'x' is no whole number from 1 on"),
        (["step", "--ranks", "5"], "384 experts cannot be held by 5 ranks"),
        (["step", "--ranks", "0"], "'0' is no whole number from 1 on"),
    ],
    ids=" ".join,
)
def test_what_cannot_be_measured_is_told_in_a_sentence(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        import_module(f"benchmarks.{words[0]}").main(words[1:])
    assert ended.value.code == 2
    output = capsys.readouterr()
    assert said in output.err
    assert not output.out


def test_the_device_is_the_same_before_and_after_a_measurement() -> None:
    before, num_threads = device_name(), torch.get_num_threads()
    try:
        torch.set_num_threads(num_threads + 1)
        assert device_name() == before
    finally:
        torch.set_num_threads(num_threads)


@pytest.mark.timeout(300)
def test_sigterm_removes_what_was_written(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.engram", "--dims", "small", "--table-gib", "1"],
        cwd=ROOT,
        env=os.environ | {"TMPDIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.DEVNULL,
    )
    try:
        while not list(tmp_path.rglob("*.safetensors")):
            assert process.poll() is None
            time.sleep(0.05)
        process.terminate()
        assert process.wait(timeout=200) == 128 + signal.SIGTERM
    finally:
        process.kill()
        process.wait()
    assert not list(tmp_path.iterdir())

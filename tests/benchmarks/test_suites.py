"""The suite of the small model and that of the kernels, and the command in front of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import tiny
from benchmarks.kernels import suite

ROOT = Path(__file__).resolve().parents[2]


def test_tiny_serves_all(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", str(ROOT / "tests/data/tiny"), "--requests", "2", "--short-prompts", "2"]
    tiny.main([*words, "--rate", "1000", "--max-tokens", "8", "--dtype", "float32"])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(result["hashes"]) == {"tokens"}
    assert all(value >= 0 for value in result["figures"].values())
    assert result["figures"]["select_entries, one launch, ms"] > 0
    assert result["figures"]["tokens_per_s"] > 0


def test_what_counts_as_good() -> None:
    def served(first: float, *later: float) -> tiny.Served:
        return tiny.Served(arrival=1.0, token_times=[1.0 + first, *(1.0 + first + gap for gap in later)])

    answers = {
        "good": served(0.9, 0.01, 0.03),
        "alone": served(0.9),
        "late": served(1.1, 0.01),
        "slow": served(0.1, 0.03),
    }
    figures = tiny.goodput_figures(answers, 2.0)
    assert figures["good_requests_per_s"] == 1.0
    assert figures["tokens_per_s"] == 4.0
    assert figures["ttft_p50_ms"] == pytest.approx(900)
    assert figures["tpot_p99_ms"] == pytest.approx(30)


def test_nested_results_become_figures() -> None:
    result = {"op": "x", "ms": {"65536": {"ours": 1, "anchor": None}, "list": [2.5, True]}, "torch": "2"}
    assert suite.figures_of(result, "x") == {"x.ms.65536.ours": 1.0, "x.ms.list.0": 2.5}
    assert "indexer" in suite.benchmark_names()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_kernels_are_not_timed_without_a_gpu() -> None:
    with pytest.raises(SystemExit, match="this machine has none"):
        suite.main([])


@pytest.mark.parametrize(("words", "code"), [(["--help"], 0), (["nonsense"], 2), ([], 0)])
def test_the_command_says_what_there_is(words: list[str], code: int) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", *words], cwd=ROOT, capture_output=True, text=True, timeout=150
    )
    assert done.returncode == code
    for command in ("step", "tiny", "kernels", "compare"):
        assert f"\n  {command} " in done.stdout

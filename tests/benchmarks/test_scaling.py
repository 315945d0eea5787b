"""Jobs on one rank and on two: figures of both, equal digests, and which part of a run counts as steady."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from benchmarks import scaling
from benchmarks.scaling import Scaled, same_digests, steady_part
from pipelines.metrics import MetricsLine
from tests.conftest import ROOT

OPTIONS = ["--rows", "3", "--prompt-tokens", "5", "--max-tokens", "2", "--max-num-seqs", "2"]


@pytest.mark.ray
@pytest.mark.timeout(600)
def test_two_ranks_are_held_against_one() -> None:
    model = str(ROOT / "tests" / "data" / "tiny-quant")
    command = [sys.executable, "-m", "benchmarks.scaling", "--model", model, "--ranks", "1,2", *OPTIONS]
    ended = subprocess.run(
        [*command, "--device", "cpu", "--dtype", "float32", "--seed", "7"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    print(ended.stdout, ended.stderr[-2000:])
    assert ended.returncode == 0
    result = json.loads(ended.stdout.splitlines()[-1])
    assert result["same_digests"]
    assert [(run["num_ranks"], run["exchange"]) for run in result["runs"]] == [(1, "none"), (2, "all_to_all")]
    assert all(run.keys() == {field.name for field in fields(Scaled)} | {"ratio"} for run in result["runs"])
    assert all(run["start_s"] > 0 and run["whole_tokens_per_s"] > 0 for run in result["runs"])
    assert result["runs"][0]["ratio"] == 1.0
    assert "seed 7" in ended.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--ranks", "1,3"], "--ranks has 3, among which the model's 16 experts"),
        (["--ranks", "0,1"], "'0' is no whole number from 1 on"),
        (["--ranks", "1,x"], "'x' is no whole number from 1 on"),
        (["--ranks", "1", "--rows", "0"], "'0' is no whole number from 1 on"),
        (["--ranks", "1,2", "--replicas", "--set", "cluster.min_ranks=2"], "min_ranks is 2"),
        (["--ranks", "1", "--set", "engine.nothing=1"], "engine.nothing"),
        (["--ranks", "1", "--folder", "not/there"], "not/there"),
        (["--ranks", "1", "--model", "not/there"], "not/there"),
    ],
)
def test_what_cannot_run_is_told_before_the_first_job(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scaling, "run_job", lambda _: pytest.fail("a job ran"))
    model = str(ROOT / "tests" / "data" / "tiny-quant")
    with pytest.raises(SystemExit) as ended:
        scaling.main(["--model", model, "--device", "cpu", *words])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_a_job_that_is_refused_is_told_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(
        (ROOT / "tests" / "data" / "tiny-quant" / "config.json").read_bytes()
    )
    words = ["--ranks", "1", "--rows", "1", "--prompt-tokens", "1", "--device", "cpu"]
    with pytest.raises(SystemExit, match=r"the job on 1 rank\(s\) was refused: .*tokenizer"):
        scaling.main(["--model", str(tmp_path), *words])


def line(seconds: float, num_ok: int, num_ranks: int = 2, num_rows: int = 40) -> MetricsLine:
    told = {"seconds": seconds, "num_ok": num_ok, "num_ranks": num_ranks, "num_rows": num_rows}
    told |= {"num_prefill_tokens": 10 * num_ok, "num_decode_tokens": int(seconds)}
    return MetricsLine(**{field.name: told.get(field.name, 0) for field in fields(MetricsLine)})  # type: ignore[arg-type]


def test_a_steady_part_has_full_ranks_alone() -> None:
    lines = [
        line(1, 0, num_ranks=1),
        line(5, 0),
        line(9, 7),
        line(10, 8),
        line(14, 20),
        line(20, 32),
        line(21, 33),
    ]
    assert steady_part(lines, 2, 8) == (10.0, 10 * (32 - 8) + 10)
    assert steady_part(lines, 2, 16) == (0.0, 0), "one line is no part"
    assert steady_part(lines, 1, 1) == (0.0, 0), "not all ranks were ready"


def test_only_rows_that_all_jobs_have_are_compared() -> None:
    one, two = {"a": "1", "b": "2"}, {"a": "1", "b": "2", "c": "3"}
    assert same_digests([one, two])
    assert same_digests([two, one, {"a": "1", "d": "9"}])
    assert not same_digests([one, {**two, "b": "9"}])
    assert not same_digests([one, {"c": "3"}]), "nothing in common shows nothing"

"""`batch-generate plan`: what it counts, and exit code 2 for a job that cannot succeed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from engine import ConfigError
from jobs import cli
from jobs.config import load_job
from jobs.plan_report import JobForecast, forecast_job, format_forecast
from tests.conftest import ROOT

MODEL = str(ROOT / "examples" / "bard" / "model")


def write(tmp_path: Path, prompts: list[list[int] | None], **columns: Any) -> None:
    table = {"prompt_token_ids": pa.array(prompts, pa.list_(pa.int32())), **columns}
    pq.write_table(pa.table(table), tmp_path / "in.parquet")


def forecast(tmp_path: Path, *overrides: str, max_num_rows: int | None = None, **options: Any) -> JobForecast:
    flags = {"model.path": MODEL, "input.path": f"{tmp_path}/in.parquet", "output.path": f"{tmp_path}/out"}
    return forecast_job(load_job(None, overrides, flags), max_num_rows=max_num_rows, seed=1, **options)


def test_every_row_is_counted(tmp_path: Path) -> None:
    shared = list(range(10, 110))
    prompts = [[*shared, 1], [*shared, 2], None, [5] * 200, [6]]
    write(tmp_path, prompts, max_tokens=[7, 7, 7, 7, None])
    found = forecast(
        tmp_path, "engine.max_model_len=150", "sampling.max_tokens=20", "output.max_error_rate=0.5"
    )
    facts = found.facts
    assert found.is_exact
    assert (facts.num_prompt_tokens, facts.most_output_tokens) == (101 + 101 + 1, 7 + 7 + 20)
    assert facts.most_prompt_tokens == 101
    assert facts.num_shared_tokens == 100
    assert facts.refused == {"null_prompt": 1, "prompt_too_long": 1}
    assert [row_id for row_id, _ in facts.refused_rows] == ["in.parquet#2", "in.parquet#3"]
    assert found.obstacles == ()
    assert not (tmp_path / "out").exists()


def test_a_sample_is_scaled_and_says_so(tmp_path: Path) -> None:
    write(tmp_path, [[1, 2, 3]] * 1000)
    found = forecast(
        tmp_path, "sampling.max_tokens=9", "cluster.num_ranks=2", max_num_rows=100, tokens_per_s=6
    )
    assert not found.is_exact
    assert 100 <= found.facts.num_rows < 1000
    assert found.most_seconds == pytest.approx(1000 * 12 / (6 * 2))


def test_a_pool_too_small_for_a_row_and_a_device_too_small_for_the_model(tmp_path: Path) -> None:
    write(tmp_path, [[1] * 200, [1]])
    found = forecast(tmp_path, "engine.num_kv_blocks=2", "sampling.max_tokens=9")
    assert found.facts.refused == {"kv_too_small": 1}
    assert "1 of 2 rows would be refused" in found.obstacles[0]
    options = {"max_num_rows": None, "device_bytes": 1 << 20}
    assert "device memory" in forecast(tmp_path, **options).obstacles[0]
    ample = forecast(tmp_path, max_num_rows=None, device_bytes=1 << 34)
    assert ample.obstacles == ()
    assert ample.num_kv_blocks is not None


@pytest.mark.parametrize(
    ("overrides", "code", "text"),
    [
        ([], 0, "the job can run"),
        (["--set", "output.max_error_rate=0.1"], 2, "the job cannot succeed: 1 of 2 rows"),
        (["--set", "output.max_errors=0"], 2, "the job cannot succeed: 1 of 2 rows"),
    ],
)
def test_the_exit_code_says_whether_the_job_can_succeed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], overrides: list[str], code: int, text: str
) -> None:
    write(tmp_path, [[1], None])
    flags = ["--model", MODEL, "--input", f"{tmp_path}/in.parquet", "--output", f"{tmp_path}/out"]
    rate = ["--set", "output.max_error_rate=1.0"]
    assert cli.batch_generate(["plan", *flags, *rate, *overrides, "--tokens-per-s", "10"]) == code
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "rows: 2 in 1 file, 1 shard; prompts in column 'prompt_token_ids'"
    assert lines[1].startswith("tokens (exact, every row): 1 in")
    assert lines[-1].startswith(text)
    assert not (tmp_path / "out").exists()


def test_files_that_disagree_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in").mkdir()
    pq.write_table(pa.table({"prompt": ["a"], "x": [1]}), tmp_path / "in" / "a.parquet")
    pq.write_table(pa.table({"prompt": ["a"], "x": ["one"]}), tmp_path / "in" / "b.parquet")
    flags = ["--model", MODEL, "--input", f"{tmp_path}/in", "--output", f"{tmp_path}/out"]
    assert cli.batch_generate(["plan", *flags]) == 2
    error = capsys.readouterr().err
    assert "'x'" in error
    assert "b.parquet" in error


def test_an_answer_without_a_limit_is_as_long_as_the_pool_allows(tmp_path: Path) -> None:
    write(tmp_path, [[1] * 28])
    found = forecast(tmp_path, "engine.num_kv_blocks=2", "sampling.max_tokens=null")
    assert (found.facts.refused, found.facts.most_output_tokens) == ({}, 2 * 64 + 1 - 28)
    assert found.plan.settings["engine.num_kv_blocks"] == 2, "it changes answers here"
    with_limit = forecast(tmp_path, "engine.num_kv_blocks=2")
    assert "engine.num_kv_blocks" not in with_limit.plan.settings


@pytest.mark.parametrize("setting", ["engine.device=cuda", "engine.kernel_impl=triton"])
def test_a_plan_for_a_gpu_that_is_not_here_says_so(tmp_path: Path, setting: str) -> None:
    write(tmp_path, [[1]])
    text = format_forecast(forecast(tmp_path, setting)).splitlines()[-1]
    has_gpu = any(Path("/dev").glob("nvidia[0-9]*"))
    assert text.startswith("the job can run")
    assert ("this machine has none" in text) is not has_gpu
    assert "none" not in format_forecast(forecast(tmp_path)).splitlines()[-1]


def test_a_column_that_is_all_but_a_parameter_is_pointed_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, [[1]], temprature=[0.5], title=["x"])
    forecast(tmp_path)
    (record,) = caplog.records
    assert "'temprature'" in record.getMessage()
    assert "'temperature'" in record.getMessage()


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ([], "layout: a rank for every GPU, or one on the CPU, with all 12 experts of a layer on each"),
        (["num_ranks=1"], "layout: 1 rank, with all 12 experts of a layer on each"),
        (
            ["ranks_per_replica=4", "num_ranks=8"],
            "layout: 2 replicas of 4 ranks of one node, with 3 of a layer's 12 experts on each rank",
        ),
        (
            ["ranks_per_replica=2", "max_ranks=2", "replica_spans_nodes=true"],
            "layout: up to 1 replica of 2 ranks, with 6 of a layer's 12 experts on each rank",
        ),
        (
            ["ranks_per_replica=3"],
            "layout: as many replicas as there is room for, each of 3 ranks of one node, with 4 of a layer's 12 "
            "experts on each rank",
        ),
    ],
)
def test_the_layout_is_told(tmp_path: Path, settings: list[str], line: str) -> None:
    write(tmp_path, [[1, 2]])
    found = forecast(tmp_path, *(f"cluster.{setting}" for setting in settings), tokens_per_s=1)
    assert line in format_forecast(found).splitlines()
    assert found.most_seconds == pytest.approx(found.num_ranks**-1 * (2 + found.facts.most_output_tokens))
    assert f"{found.most_seconds * found.num_ranks / 3600:.2f} rank-hours" in format_forecast(found)


def test_a_ranks_memory_is_that_of_its_share_of_the_experts(tmp_path: Path) -> None:
    write(tmp_path, [[1, 2]])
    alone, shared = forecast(tmp_path).memory, forecast(tmp_path, "cluster.ranks_per_replica=4").memory
    assert shared.num_weight_bytes < alone.num_weight_bytes
    assert shared.num_scratch_bytes > alone.num_scratch_bytes, "all ranks' rows pass through each"
    with pytest.raises(ConfigError, match="12 experts a layer cannot be split evenly among so many"):
        forecast(tmp_path, "cluster.ranks_per_replica=5")


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ([], "the model's dtype is 'float16': set engine.dtype to float32 or bfloat16"),
        (
            ["dtype=float32", "kernel_impl=triton", "device=cpu"],
            "kernel_impl is triton, but this rank has no GPU",
        ),
        (
            ["dtype=float32", "kernel_impl=torch", "device=cuda", "engram=host"],
            "needs engine.kernel_impl triton",
        ),
    ],
)
def test_what_no_engine_can_have_is_refused(tmp_path: Path, overrides: list[str], says: str) -> None:
    write(tmp_path, [[1]])
    shutil.copytree(MODEL, tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    config.write_text(config.read_text().replace('"dtype": "bfloat16"', '"dtype": "float16"'))
    with pytest.raises(ConfigError, match=says):
        forecast(tmp_path, f"model.path={tmp_path}/model", *(f"engine.{setting}" for setting in overrides))

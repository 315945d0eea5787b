"""What a folder says of its job, and the line that says it while it runs."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path

import pytest

from engine import ConfigError
from pipelines.manifest import DriverLock, OutputFolder, claim_run
from pipelines.progress import ProgressLine
from pipelines.report import RunRecord, read_status
from tests.small_jobs import make_plan, random_prompts, read_output, start_run, write_prompts


def test_the_report_is_cumulative_over_runs(tmp_path: Path) -> None:
    folder = OutputFolder(tmp_path / "out")
    prompts = [*random_prompts(random.Random(1), 30), None, []]
    write_prompts(tmp_path / "in.parquet", prompts)
    plan = make_plan(tmp_path / "in.parquet")
    for _ in range(2):
        start_run(folder, plan)[0].run()
    status = read_status(folder.path)
    assert (status.num_rows, status.num_ok, status.num_error, status.num_in_flight) == (32, 30, 2, 0)
    assert status.tally.errors == {"null_prompt": 1, "empty_prompt": 1}
    assert status.tally.num_prompt_tokens == sum(len(p) for p in prompts if p)
    assert status.tally.num_cached_tokens == 30
    preemptions = [len(p) % 3 for p in prompts if p]
    assert status.tally.num_preemptions == sum(preemptions)
    assert status.tally.most_row_preemptions == max(preemptions) == 2
    assert "num_preemptions" not in read_output(folder.path).column_names
    assert (status.num_runs, status.num_reused, status.num_run) == (2, 32, 0)
    assert (status.num_shards, status.num_shards_committed, status.is_finished) == (4, 4, True)
    assert not status.is_running
    report = json.loads(folder.report_file.read_text())
    assert (report["num_read"], report["num_ok"], report["num_error"]) == (32, 30, 2)
    assert report["tally"]["num_completion_tokens"] == status.tally.num_completion_tokens
    assert report["seconds"] > 0
    assert report["cache_hit_rate"] == pytest.approx(30 / status.tally.num_prompt_tokens, abs=1e-6)
    assert report["tally"]["most_row_preemptions"] == 2
    (environment,) = report["environments"]
    assert (environment["device_kind"], environment["device"]) == ("cpu", "fake")
    assert {"python", "torch", "triton", "overnight", "kernels", "model"} <= environment.keys()
    assert report["engine_settings"][0]["dtype"] == "float32"


def test_a_folder_without_a_job_has_no_status(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(ConfigError, match="not the output folder of a job"):
            read_status(path)


def test_without_a_terminal_there_are_whole_lines_and_few() -> None:
    stream = io.StringIO()
    line = ProgressLine(100, 40, stream)
    for done in range(40, 101):
        line.show(
            done,
            prefill_tokens_per_s=1200.4,
            decode_tokens_per_s=34.6,
            cache_hit_rate=0.25,
            num_errors=2,
            num_ranks=3,
            is_last=done == 100,
        )
    line.close()
    (text,) = stream.getvalue().splitlines()
    assert "\r" not in text
    assert "100/100" in text
    assert "prefill 1200 tok/s, decode 35 tok/s, 25% cached, 2 errors, 3 ranks" in text


@pytest.mark.parametrize("first", [0, 40])
def test_before_a_run_has_done_a_row_the_line_says_why_it_tells_no_time(
    first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = io.StringIO()
    monkeypatch.setattr("pipelines.progress._LINE_INTERVAL_S", 0.0)
    monkeypatch.setattr("pipelines.progress._LONGEST_LINE_INTERVAL_S", 0.0)
    line = ProgressLine(100, first, stream)
    for done in (first, first + 1, 100):
        line.show(
            done,
            prefill_tokens_per_s=0.0,
            decode_tokens_per_s=0.0,
            cache_hit_rate=0.0,
            num_errors=0,
            num_ranks=1,
        )
    assert ["time left not known" in text for text in stream.getvalue().splitlines()] == [True, False, False]


def test_a_run_that_is_about_to_begin_has_nothing_in_flight_of_one_that_was_killed(tmp_path: Path) -> None:
    folder = OutputFolder(tmp_path / "out")
    write_prompts(tmp_path / "in.parquet", random_prompts(random.Random(1), 30))
    plan = make_plan(tmp_path / "in.parquet")
    start_run(folder, plan)
    killed = RunRecord(run=claim_run(folder), num_in_flight=7)
    killed.save(folder)
    with DriverLock(folder):
        assert read_status(folder.path).num_in_flight == 7
        start_run(folder, plan)
        status = read_status(folder.path)
        assert (status.num_in_flight, status.is_running, status.live_runs) == (0, True, (killed.run + 1,))

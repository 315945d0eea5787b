"""What a run measures: its lines on disk, what it lost, and the line it shows."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import random
import struct
import termios
from pathlib import Path

import pyarrow as pa
import pytest

from engine import EngineConfig, EngineStats
from pipelines.driver import Outcome, StopRequest
from pipelines.lengths import EDGES, add_counts, count_lengths
from pipelines.manifest import OutputFolder
from pipelines.metrics import MetricsLine, RowCounts, RunWatch, read_metrics
from pipelines.progress import ProgressLine
from pipelines.report import RunRecord, read_status
from tests.fake_engine import FakeEngine
from tests.small_jobs import make_plan, random_prompts, start_run, write_prompts

CONFIG = EngineConfig(model="fake", max_num_seqs=4)


@pytest.fixture
def folder(tmp_path: Path) -> OutputFolder:
    write_prompts(tmp_path / "in.parquet", [*random_prompts(random.Random(1), 40), None])
    return OutputFolder(tmp_path / "out")


def test_each_run_has_a_file_of_lines_that_add_up(tmp_path: Path, folder: OutputFolder) -> None:
    plan = make_plan(tmp_path / "in.parquet")
    driver, _ = start_run(folder, plan)
    driver.request_stop(StopRequest.DRAIN)
    assert driver.run() is Outcome.STOPPED
    assert start_run(folder, plan)[0].run() is Outcome.COMMITTED
    assert [path.name for path in sorted(folder.metrics.iterdir())] == ["000001.jsonl", "000002.jsonl"]
    lines = read_metrics(folder)
    for line in lines:
        assert line.num_read == line.num_ok + line.num_error + line.num_in_flight
    last = lines[-1]
    assert (last.num_rows, last.num_ok, last.num_error, last.num_unleased) == (41, 40, 1, 0)
    assert last.num_ranks == 2
    tally = read_status(folder.path).tally
    ran = [line for line in lines if line.run == 2][-1]
    assert ran.num_prefill_tokens == ran.num_prompt_tokens == tally.num_prompt_tokens
    assert ran.num_decode_tokens == ran.num_completion_tokens == tally.num_completion_tokens
    assert not list(folder.path.glob("*.jsonl"))


def test_a_line_cut_short_is_left_out(tmp_path: Path, folder: OutputFolder) -> None:
    start_run(folder, make_plan(tmp_path / "in.parquet"))[0].run()
    known = read_metrics(folder)
    with open(folder.metrics_file(1), "ab") as file:
        file.write(b'{"time": 1.0, "run"')
    assert read_metrics(folder) == known
    with open(folder.metrics_file(1), "ab") as file:
        file.write(b"\n" + json.dumps({"of": "another version"}).encode() + b"\n")
    assert read_metrics(folder) == known


def test_what_a_dead_rank_had_computed_is_counted_as_lost(tmp_path: Path, folder: OutputFolder) -> None:
    driver, _ = start_run(
        folder,
        make_plan(tmp_path / "in.parquet"),
        make_engine=lambda number: FakeEngine(CONFIG, dies_at_step=9 if number == 0 else None),
    )
    driver.run()
    status = read_status(folder.path)
    kept = status.tally.num_prompt_tokens + status.tally.num_completion_tokens
    lost = status.effort.wasted_tokens.lost_with_ranks
    assert lost > 0
    # A rank's last word is a few steps old when it dies.
    assert abs(status.effort.num_tokens_computed - (kept + lost)) < 60
    assert status.effort.wasted_tokens.total == lost


def test_rates_cost_and_idle_time(tmp_path: Path, folder: OutputFolder) -> None:
    start_run(folder, make_plan(tmp_path / "in.parquet"))
    seen: list[MetricsLine] = []
    record = RunRecord(run=7, num_ranks=2, cost_per_rank_hour=3600.0)
    watch = RunWatch(folder, record, num_rows=41, num_done=0, listener=seen.append)
    for slot in range(2):
        watch.start_rank(slot)
    stats = EngineStats(
        num_prefill_tokens=100,
        num_decode_tokens=9,
        num_unfinished_tokens=60,
        num_kv_blocks=8,
        num_free_blocks=2,
    )
    watch.take(0, stats, (40, 9, 8), has_rows=True)
    rows = RowCounts(num_read=12, num_ok=9, num_error=1, num_in_flight=2, num_unleased=3)
    watch.finish(rows, "stopped")
    assert (seen[-1].kv_use, seen[-1].num_ranks, seen[-1].num_in_flight) == (0.75, 1, 2)
    assert seen[-1].prefill_tokens_per_s > seen[-1].decode_tokens_per_s > 0
    status = read_status(folder.path)
    assert status.effort.wasted_tokens.lost_with_runs == 60
    assert 0 < status.effort.rank_hours == record.rank_seconds / 3600 <= 2 * record.seconds / 3600
    assert status.effort.cost == pytest.approx(record.rank_seconds)
    assert 0 < status.effort.tail_idle_rank_s <= record.seconds


def read_terminal(reader: int) -> str:
    """All that was written to a terminal whose other end is closed: one read may give only a part of it."""
    text = b""
    with contextlib.suppress(OSError):  # how Linux says that the other end is closed
        while part := os.read(reader, 1 << 16):
            text += part
    return text.decode()


@pytest.mark.parametrize("columns", [120, 0])
def test_a_terminal_has_one_line_unless_it_has_no_width(columns: int) -> None:
    reader, writer = pty.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    with os.fdopen(writer, "w") as stream:
        line = ProgressLine(100, 40, stream)
        for done in (50, 70, 100):
            line.show(
                done,
                prefill_tokens_per_s=5.0,
                decode_tokens_per_s=7.0,
                cache_hit_rate=0.5,
                num_errors=3,
                num_ranks=1,
                is_last=done == 100,
            )
        line.close()
    text = read_terminal(reader)
    os.close(reader)
    *shown, rest = text.replace("\r\n", "\n").rpartition("\n")
    assert rest == ""
    assert "\n" not in shown[0]
    last = shown[0].rpartition("\r")[2]
    assert "100/100" in last
    assert "3 errors" in last
    assert ("40/100" in text) == (columns > 0)


@pytest.mark.parametrize("seed", range(3))
def test_lengths_fall_into_the_bucket_that_begins_at_or_before_them(seed: int) -> None:
    print("seed", seed)
    random_ = random.Random(seed)
    lengths = [
        random_.choice([0, 1, 2, 3, random_.randrange(100), random_.randrange(1 << 20)]) for _ in range(50)
    ]
    expected: dict[str, int] = {}
    for length in lengths:
        edge = str(max(edge for edge in EDGES if edge <= length))
        expected[edge] = expected.get(edge, 0) + 1
    assert count_lengths(pa.array([*lengths, None], pa.int32())) == expected
    assert sum(add_counts(expected, expected).values()) == 100
    assert list(EDGES) == sorted(set(EDGES))

"""What is done to drivers and ranks, and what must be true of an output folder after it.

The checks read the folder as a user would: its Parquet files, its metrics and its status.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.manifest import OutputFolder
from pipelines.metrics import read_metrics
from pipelines.report import JobStatus, read_runs, read_status


@dataclass
class Log:
    """What happened, for the log of a full run."""

    harms: Counter[str] = field(default_factory=Counter)
    exit_codes: Counter[int] = field(default_factory=Counter)
    num_jobs: int = 0
    num_rows: int = 0
    num_resumes: int = 0
    num_refused_while_stopped: int = 0
    num_quarantined: int = 0
    num_rank_deaths: int = 0
    num_rows_reused: int = 0
    num_metrics_lines: int = 0
    num_parts_read: int = 0

    @property
    def num_harms(self) -> int:
        return self.harms.total()

    def lines(self) -> list[str]:
        """It as text."""
        harms = ", ".join(f"{count} {name}" for name, count in sorted(self.harms.items()))
        codes = ", ".join(f"{code}: {count}" for code, count in sorted(self.exit_codes.items()))
        return [
            f"{self.num_harms} harms: {harms}",
            f"{self.num_jobs} jobs of {self.num_rows} rows, each row in its output once; "
            f"{self.num_resumes} resumes, {self.num_rows_reused} rows found answered by them",
            f"exit codes of drivers that were not killed: {codes}",
            f"{self.num_rank_deaths} ranks given up, {self.num_quarantined} rows quarantined, "
            f"{self.num_refused_while_stopped} drivers refused beside a stopped one",
            f"{self.num_parts_read} files and {self.num_metrics_lines} metrics lines read and checked",
        ]


def check_at_rest(output: Path, log: Log) -> JobStatus | None:
    """No driver is at work: every file in sight can be read, and the numbers add up."""
    folder = OutputFolder(output)
    if not folder.plan_file.exists():
        return None
    # A rank that outlived its driver may publish a part at any moment, also between two looks.
    before, status, after = _read_row_ids(output, log), read_status(output), _read_row_ids(output, log)
    assert set(before) <= set(after)
    assert len(before) <= status.num_rows_committed <= len(after), (len(before), status, len(after))
    assert status.num_read == status.num_ok + status.num_error + status.num_in_flight <= status.num_rows
    check_metrics(folder, log)
    return status


def _read_row_ids(output: Path, log: Log) -> list[str]:
    table = read_parts(output, log)
    ids: list[str] = table.column("row_id").to_pylist() if table is not None else []
    assert len(set(ids)) == len(ids), f"doubled rows: {[i for i, n in Counter(ids).items() if n > 1]}"
    return ids


def read_parts(output: Path, log: Log) -> pa.Table | None:
    """Every file of a plain read, whole."""
    tables = []
    for path in sorted(output.iterdir()):
        if not path.name.startswith("_"):
            assert path.suffix == ".parquet", path
            tables.append(pq.read_table(path))
    log.num_parts_read += len(tables)
    return pa.concat_tables(tables) if tables else None


def check_metrics(folder: OutputFolder, log: Log) -> None:
    """read = ok + error + in flight on every line of every run, and done rows never fall back."""
    lines = read_metrics(folder)
    for line in lines:
        assert line.num_read == line.num_ok + line.num_error + line.num_in_flight, line
    done = [line.num_ok + line.num_error for line in lines]
    assert done == sorted(done), done
    assert all(0 <= line.kv_use <= 1 for line in lines)
    log.num_metrics_lines += len(lines)


def check_finished(output: Path, log: Log) -> pa.Table:
    """A finished job: nothing half-done is left, and the report says what the files say."""
    folder = OutputFolder(output)
    status = check_at_rest(output, log)
    assert status is not None
    assert status.is_finished
    table = read_parts(output, log)
    assert table is not None
    outcomes = Counter(table.column("status").to_pylist())
    assert (status.num_rows, status.num_ok, status.num_error) == (
        table.num_rows,
        outcomes["ok"],
        outcomes["error"],
    )
    assert not list(folder.temporary.iterdir()), list(folder.temporary.iterdir())
    assert not list(folder.journals.iterdir()), list(folder.journals.iterdir())
    report = json.loads(folder.report_file.read_text())
    assert report["num_ok"] == outcomes["ok"]
    assert report["tally"]["errors"] == dict(Counter(table.column("error").drop_null().to_pylist()))
    assert report["tally"]["num_completion_tokens"] == sum(
        table.column("num_completion_tokens").drop_null().to_pylist()
    )
    runs = read_runs(folder)
    log.num_rank_deaths += sum(run.num_rank_deaths for run in runs)
    log.num_rows_reused += sum(run.num_reused for run in runs[1:])
    log.num_jobs += 1
    log.num_rows += table.num_rows
    return table

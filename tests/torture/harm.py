"""What is done to drivers and ranks, what of it counts, and what must be true of an output folder after it.

The checks read the folder as a user would: its Parquet files, its metrics and its status. How processes are
started, and when one is harmed, is not known here.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.manifest import OutputFolder, load_plan
from pipelines.metrics import read_metrics
from pipelines.report import JobStatus, read_runs, read_status
from pipelines.sink import read_journal_state

_LEAST_SHARE_AT_WORK = 1 / 3


class TooMild(AssertionError):
    """What was harmed was not at work often enough for the rest to prove anything."""


@dataclass(frozen=True, kw_only=True)
class Harm:
    """A signal to a driver or a rank of a job that was not finished.

    ``num_in_flight``: rows that the rank, or all ranks of the driver, were at work on. ``num_done`` of the
    job's ``num_rows`` were answered.
    """

    whom: str
    signals: str
    num_in_flight: int
    num_done: int
    num_rows: int

    @property
    def name(self) -> str:
        return f"{self.whom} {self.signals}"

    def __str__(self) -> str:
        return f"{self.name}: {self.num_in_flight} in flight, {self.num_done} of {self.num_rows} done"


@dataclass
class Log:
    """What happened, for the log of a full run. ``num_too_late``: signals to a job that was finished."""

    harms: list[Harm] = field(default_factory=list)
    num_too_late: int = 0
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
        return len(self.harms)

    def note(self, harm: Harm) -> None:
        """One more harm, told at once."""
        self.harms.append(harm)
        print(f"  {harm}", flush=True)

    def check_harms(self, wanted: int, least_share_of_ranks: float) -> None:
        """Raises ``TooMild`` for fewer harms than wanted, or too few of them at work or of ranks at work."""
        at_work = [harm for harm in self.harms if harm.num_in_flight]
        num_ranks = _count("rank", at_work)
        if self.num_harms < wanted:
            raise TooMild(f"{self.num_harms} harms, {wanted} were wanted; {self.num_too_late} came too late")
        if len(at_work) < _LEAST_SHARE_AT_WORK * self.num_harms:
            raise TooMild(f"rows were in flight at {len(at_work)} of {self.num_harms} harms")
        if num_ranks < least_share_of_ranks * self.num_harms:
            raise TooMild(f"{num_ranks} of {self.num_harms} harms hit a rank with rows in flight")

    def lines(self) -> list[str]:
        """It as text."""
        harms = Counter(harm.name for harm in self.harms)
        named = "; ".join(f"{count} {name}" for name, count in sorted(harms.items()))
        codes = ", ".join(f"{code}: {count}" for code, count in sorted(self.exit_codes.items()))
        at_work = [harm for harm in self.harms if harm.num_in_flight]
        of_whom = [
            f"{_count(whom, self.harms)} hit {whom}s ({_count(whom, at_work)} with rows in flight)"
            for whom in ("driver", "rank")
        ]
        return [
            f"{self.num_harms} harms: {named}",
            f"{', '.join(of_whom)}; {self.num_too_late} more came too late, not counted",
            f"{self.num_jobs} jobs of {self.num_rows} rows, each row in its output once; "
            f"{self.num_resumes} resumes, {self.num_rows_reused} rows found answered by them",
            f"exit codes of drivers that were not killed: {codes}",
            f"{self.num_rank_deaths} ranks given up, {self.num_quarantined} rows quarantined, "
            f"{self.num_refused_while_stopped} drivers refused beside a stopped one",
            f"{self.num_parts_read} files and {self.num_metrics_lines} metrics lines read and checked",
        ]


def _count(whom: str, harms: Iterable[Harm]) -> int:
    return sum(harm.whom == whom for harm in harms)


class Aim:
    """Sends signals to the processes of one job, and notes those that came while there was work."""

    def __init__(self, output: Path, num_rows: int, log: Log) -> None:
        self._output, self._num_rows, self._log = output, num_rows, log

    def hit(self, whom: str, pid: int, number: signal.Signals, ranks: Iterable[int]) -> bool:
        """Signal a process of which these are the ranks; whether it was there.

        The job is looked at afterwards: one that is not finished then was at work when the signal came.
        """
        num_done, in_flight = self.num_done, sum(map(self.num_in_flight, ranks))
        if not send_signal(pid, number):
            return False
        if self.is_finished:
            self._log.num_too_late += 1
            return True
        signals = "SIGSTOP, SIGCONT" if number is signal.SIGSTOP else number.name
        self._log.note(
            Harm(
                whom=whom,
                signals=signals,
                num_in_flight=in_flight,
                num_done=num_done,
                num_rows=self._num_rows,
            )
        )
        return True

    @property
    def is_finished(self) -> bool:
        status = self._read()
        return status is not None and status.is_finished

    @property
    def num_done(self) -> int:
        """Rows that have their answer, as far as it can be read."""
        status = self._read()
        return status.num_ok + status.num_error if status is not None else 0

    def num_in_flight(self, rank: int) -> int:
        """Rows that a rank has begun and not answered, by the journals that it has open."""
        folder = OutputFolder(self._output)
        num_rows = 0
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it is gone, or closes one just now
            for entry in Path(f"/proc/{rank}/fd").iterdir():
                path = Path(os.readlink(entry))
                if path.suffix == ".journal" and path.is_relative_to(folder.journals):
                    num_rows += len(read_journal_state(load_plan(folder), path).suspects)
        return num_rows

    def _read(self) -> JobStatus | None:
        return read_status(self._output) if OutputFolder(self._output).plan_file.exists() else None


def send_signal(pid: int, number: signal.Signals) -> bool:
    """Send a signal; whether there was a process that could take it: none that is over and waited for."""
    try:
        is_over = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        os.kill(pid, number)
    except (FileNotFoundError, ProcessLookupError):
        return False
    return not is_over


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


def check_quarantined(output: Path, rows: Iterable[Mapping[str, object]], log: Log) -> None:
    """A row is blamed by the death of a rank, one by each, and by none before there was another."""
    num_quarantined = sum(row["error"] == "engine_crash" for row in rows)
    num_deaths = read_status(output).num_rank_deaths
    assert num_quarantined <= max(0, num_deaths - 1), (num_quarantined, num_deaths)
    log.num_quarantined += num_quarantined

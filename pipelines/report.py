"""What a job says of itself: each run's own counters, the cumulative report, and the state of a folder.

Owns the progress line and the files under ``_overnight/runs`` and ``report.json``; it must not decide
anything about rows.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO, TypeVar

from tqdm import tqdm

from pipelines.manifest import (
    OutputFolder,
    Tally,
    is_driver_alive,
    load_plan,
    replace_durably,
    try_read_commit,
)
from pipelines.sink import count_rows, read_shard_rows

T = TypeVar("T")

_LINE_INTERVAL_S = 5.0


@dataclass(slots=True, kw_only=True)
class RunRecord:
    """One run of the driver: how long it worked, what it reused, ran and lost."""

    run: int
    started_at: float = field(default_factory=time.time)
    seconds: float = 0.0
    num_reused: int = 0
    num_run: int = 0
    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0
    num_cached_tokens: int = 0
    num_in_flight: int = 0
    num_rank_deaths: int = 0
    num_ranks: int = 0
    outcome: str = "running"
    process: str = field(default_factory=lambda: f"{socket.gethostname()}:{os.getpid()}")
    environments: list[Mapping[str, str]] = field(default_factory=list)
    engine_settings: list[Mapping[str, Any]] = field(default_factory=list)

    def add_rank(self, environment: Mapping[str, str], engine_settings: Mapping[str, Any]) -> None:
        """Note what a rank's answers depend on: each distinct one once."""
        for known, found in ((self.environments, environment), (self.engine_settings, engine_settings)):
            if found not in known:
                known.append(dict(found))

    def save(self, folder: OutputFolder) -> None:
        """Write the record to the run's own file."""
        replace_durably(folder, folder.run_file(self.run), json.dumps(asdict(self), indent=1).encode())


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatus:
    """A running, stopped or finished job, as its folder tells it.

    ``num_read`` = ``num_ok`` + ``num_error`` + ``num_in_flight``; the rest of ``num_rows`` waits.
    ``num_reused`` and ``num_run`` are the last run's: rows it found answered, rows it answered.
    """

    num_rows: int
    num_shards: int
    num_shards_committed: int
    num_rows_committed: int
    tally: Tally
    num_in_flight: int
    num_reused: int
    num_run: int
    num_runs: int
    num_rank_deaths: int
    seconds: float
    is_running: bool
    environments: tuple[Mapping[str, str], ...]
    engine_settings: tuple[Mapping[str, Any], ...] = ()

    @property
    def num_ok(self) -> int:
        return self.tally.num_ok

    @property
    def num_error(self) -> int:
        return self.tally.num_error

    @property
    def num_read(self) -> int:
        return self.num_ok + self.num_error + self.num_in_flight

    @property
    def is_finished(self) -> bool:
        """Whether every shard is committed."""
        return self.num_shards_committed == self.num_shards

    @property
    def num_tokens_per_s(self) -> float:
        """Tokens put in and out for each second of work, over all runs."""
        num_tokens = self.tally.num_prompt_tokens + self.tally.num_completion_tokens
        return num_tokens / self.seconds if self.seconds > 0 else 0.0


def read_status(output_dir: str | Path) -> JobStatus:
    """The state of the job in ``output_dir``, running or not. ``ConfigError`` when there is no job."""
    folder = OutputFolder(Path(output_dir))
    plan = load_plan(folder)
    tally, num_shards_committed, num_rows_committed = Tally(), 0, 0
    for shard in plan.shards:
        committed = try_read_commit(folder, plan.fingerprint, shard.index, len(plan.shards))
        if committed is None and folder.shard_journals(shard.index).is_dir():
            journaled = count_rows(read_shard_rows(folder, plan, shard.index))
            # Published while its journals were read, maybe: then they were going away.
            committed = try_read_commit(folder, plan.fingerprint, shard.index, len(plan.shards))
            tally += journaled if committed is None else Tally()
        if committed is not None:
            tally += committed
            num_shards_committed += 1
            num_rows_committed += committed.num_rows
    runs = read_runs(folder)
    last = runs[-1] if runs else RunRecord(run=0)
    is_running = is_driver_alive(folder)
    return JobStatus(
        num_rows=plan.num_rows,
        num_shards=len(plan.shards),
        num_shards_committed=num_shards_committed,
        num_rows_committed=num_rows_committed,
        tally=tally,
        num_in_flight=last.num_in_flight if is_running else 0,
        num_reused=last.num_reused,
        num_run=last.num_run,
        num_runs=len(runs),
        num_rank_deaths=sum(run.num_rank_deaths for run in runs),
        seconds=sum(run.seconds for run in runs),
        is_running=is_running,
        environments=distinct(found for run in runs for found in run.environments),
        engine_settings=distinct(found for run in runs for found in run.engine_settings),
    )


def read_runs(folder: OutputFolder) -> list[RunRecord]:
    """Every run that got as far as saying something, oldest first."""
    texts = [path.read_text(encoding="utf-8") for path in sorted(folder.runs.glob("*.json"))]
    return [RunRecord(**json.loads(text)) for text in texts if text]


def distinct(facts: Iterable[Mapping[str, T]]) -> tuple[Mapping[str, T], ...]:
    """Each mapping once, in the order they came."""
    known: list[Mapping[str, T]] = []
    for found in facts:
        if found not in known:
            known.append(found)
    return tuple(known)


def write_report(folder: OutputFolder, status: JobStatus) -> None:
    """Write ``report.json``: the job over all its runs."""
    tree: dict[str, Any] = asdict(status)
    del tree["is_running"], tree["num_in_flight"]  # of a moment, and this is for later
    tree.update(
        num_read=status.num_read,
        num_ok=status.num_ok,
        num_error=status.num_error,
        is_finished=status.is_finished,
        num_tokens_per_s=round(status.num_tokens_per_s, 3),
        cache_hit_rate=round(status.tally.cache_hit_rate, 6),
    )
    replace_durably(folder, folder.report_file, json.dumps(tree, indent=1).encode())


class ProgressLine:
    """One line that is true across runs: a live bar on a terminal, else a plain line now and then."""

    def __init__(self, total: int, done: int, stream: TextIO | None = None) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._total, self._first = total, done
        self._started = self._last_line = time.monotonic()
        self._bar: tqdm[Any] | None = None
        if self._stream.isatty():
            self._bar = tqdm(total=total, initial=done, unit="row", file=self._stream, dynamic_ncols=True)
        self._shown = done

    def show(
        self,
        done: int,
        *,
        num_errors: int,
        num_tokens: int,
        num_ranks: int,
        cache_hit_rate: float = 0.0,
        is_last: bool = False,
    ) -> None:
        """Bring the line up to date. ``num_tokens``: in and out, of the rows of this run."""
        now = time.monotonic()
        elapsed = now - self._started
        facts = (
            f"{num_tokens / max(elapsed, 1e-9):.0f} tok/s, {cache_hit_rate:.0%} cached, "
            f"{num_errors} errors, {num_ranks} ranks"
        )
        if self._bar is not None:
            self._bar.set_postfix_str(facts, refresh=False)
            self._bar.update(done - self._shown)
        elif is_last or now - self._last_line >= _LINE_INTERVAL_S:
            self._last_line = now
            line = tqdm.format_meter(
                done, self._total, elapsed, initial=self._first, unit="row", ncols=0, postfix=facts
            )
            self._stream.write(f"{line}\n")
            self._stream.flush()
        self._shown = done

    def close(self) -> None:
        """Leave the terminal's line as it is."""
        if self._bar is not None:
            self._bar.refresh()
            self._bar.close()

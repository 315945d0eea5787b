"""What a job says of itself: each run's own counters, the cumulative report, and the state of a folder.

Owns the files under ``_overnight/runs`` and ``report.json``; it must not decide anything about rows, nor
how the facts are shown.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pipelines.commits import try_read_commit
from pipelines.manifest import (
    OutputFolder,
    Tally,
    is_driver_alive,
    load_plan,
    replace_durably,
)
from pipelines.plan import Plan
from pipelines.sink import count_rows, read_shard_rows
from pipelines.source import Shard

T = TypeVar("T")


@dataclass(slots=True, kw_only=True)
class RankLoss:
    """A rank that died, and what that cost: rows that were in flight and run again, the tokens computed for
    them, and for how long its place had no rank that serves. ``at_s`` is since the run began."""

    at_s: float
    rank: int
    node: str = ""
    reason: str = ""
    num_rows: int = 0
    num_tokens: int = 0
    rank_seconds: float = 0.0


@dataclass(slots=True, kw_only=True)
class RunRecord:
    """One run of the driver: how long it worked, what it reused, ran, computed and lost.

    ``shards`` are the half-open range that it worked on; None: all. ``rank_seconds``: the time of all its
    ranks, added up. ``losses`` are the ranks that died, the first of them where there were very many.

    ``num_prompt_tokens``, ``num_completion_tokens`` and ``num_cached_tokens`` are those of answered rows,
    all other token counts those of rows that the engines ran. ``num_tokens_in_flight`` were computed for rows
    that have no answer yet. ``tail_idle_s``: for how long ranks have had nothing to do at the end, added up.
    """

    run: int
    shards: tuple[int, int] | None = None
    started_at: float = field(default_factory=time.time)
    seconds: float = 0.0
    rank_seconds: float = 0.0
    num_reused: int = 0
    num_run: int = 0
    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0
    num_cached_tokens: int = 0
    num_in_flight: int = 0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_replayed_tokens: int = 0
    num_preemptions: int = 0
    num_tokens_lost_with_ranks: int = 0
    num_tokens_in_flight: int = 0
    tail_idle_s: float = 0.0
    num_rank_deaths: int = 0
    num_ranks: int = 0
    cost_per_rank_hour: float | None = None
    max_error_rate: float = 1.0
    outcome: str = "running"
    process: str = field(default_factory=lambda: f"{socket.gethostname()}:{os.getpid()}")
    environments: list[Mapping[str, str]] = field(default_factory=list)
    engine_settings: list[Mapping[str, Any]] = field(default_factory=list)
    losses: list[RankLoss] = field(default_factory=list)

    def add_rank(self, environment: Mapping[str, str], engine_settings: Mapping[str, Any]) -> None:
        """Note what a rank's answers depend on: each distinct one once."""
        for known, found in ((self.environments, environment), (self.engine_settings, engine_settings)):
            if found not in known:
                known.append(dict(found))

    def save(self, folder: OutputFolder) -> None:
        """Write the record to the run's own file."""
        replace_durably(folder, folder.run_file(self.run), json.dumps(asdict(self), indent=1).encode())


@dataclass(frozen=True, slots=True, kw_only=True)
class WastedTokens:
    """Rows computed for nothing, by cause: a preemption that kept nothing; rings refilled behind a cached
    prefix; a rank that died, or a run that ended, with rows in flight."""

    after_preemption: int = 0
    replay: int = 0
    lost_with_ranks: int = 0
    lost_with_runs: int = 0

    @property
    def total(self) -> int:
        return self.after_preemption + self.replay + self.lost_with_ranks + self.lost_with_runs


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """What a job took, over all its runs. ``num_tokens_computed`` are all that the engines ran, the wasted
    ones included; ``cost`` is None when no run was given a rate."""

    num_tokens_computed: int
    wasted_tokens: WastedTokens
    rank_hours: float
    tail_idle_rank_s: float
    cost: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardCounts:
    """Some shards of a job: how many are committed, with how many rows; ``tally`` has journaled rows too."""

    num_shards: int
    num_committed: int
    num_rows_committed: int
    tally: Tally


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatus:
    """A running, stopped or finished job, as its folder tells it.

    ``num_read`` = ``num_ok`` + ``num_error`` + ``num_in_flight``; the rest of ``num_rows`` waits.
    ``num_reused`` and ``num_run`` are the last run's, or those of all ``live_runs``: rows found answered, and
    rows answered. ``last_outcome`` is how the last run ended, "running" if it was killed, ``max_error_rate``
    what it allowed.
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
    last_run_seconds: float
    effort: Effort
    is_running: bool
    environments: tuple[Mapping[str, str], ...]
    engine_settings: tuple[Mapping[str, Any], ...] = ()
    live_runs: tuple[int, ...] = ()
    last_outcome: str = "running"
    max_error_rate: float = 1.0

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

    def has_more_errors_than(self, rate: float) -> bool:
        """Whether more than this share of all rows are error rows."""
        return self.num_error > rate * max(self.num_rows, 1)

    @property
    def has_failed_rate(self) -> bool:
        """Whether it is finished with more error rows than its last run allowed."""
        return self.is_finished and self.has_more_errors_than(self.max_error_rate)

    @property
    def num_tokens_per_s(self) -> float:
        """Tokens put in and out for each second of work, over all runs."""
        num_tokens = self.tally.num_prompt_tokens + self.tally.num_completion_tokens
        return num_tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def num_tokens_per_s_per_rank(self) -> float:
        """The same for each second of a rank: of a GPU, where ranks are GPUs."""
        num_tokens = self.tally.num_prompt_tokens + self.tally.num_completion_tokens
        return num_tokens / (self.effort.rank_hours * 3600) if self.effort.rank_hours > 0 else 0.0

    @property
    def has_gpus(self) -> bool:
        """Whether the ranks were GPUs, as far as any said."""
        return any(found.get("device_kind") == "cuda" for found in self.environments)

    @property
    def seconds_left(self) -> float | None:
        """At the last run's pace; None when it has none, or nothing is left."""
        num_left = self.num_rows - self.num_ok - self.num_error
        if not (self.is_running and num_left and self.num_run and self.last_run_seconds):
            return None
        return num_left * self.last_run_seconds / self.num_run


def read_status(output_dir: str | Path, *, ended_run: int | None = None) -> JobStatus:
    """The state of the job in ``output_dir``, running or not. ``ConfigError`` when there is no job.

    ``ended_run``: a run that is over though its process is still there, to tell of it.
    """
    folder = OutputFolder(Path(output_dir))
    plan = load_plan(folder)
    counts = count_shards(folder, plan, plan.shards)
    runs = read_runs(folder)
    live = [run for run in _find_live(folder, runs) if run.run != ended_run]
    last = live or runs[-1:]
    return JobStatus(
        num_rows=plan.num_rows,
        num_shards=counts.num_shards,
        num_shards_committed=counts.num_committed,
        num_rows_committed=counts.num_rows_committed,
        tally=counts.tally,
        num_in_flight=sum(run.num_in_flight for run in live),
        num_reused=sum(run.num_reused for run in last),
        num_run=sum(run.num_run for run in last),
        num_runs=len(runs),
        num_rank_deaths=sum(run.num_rank_deaths for run in runs),
        seconds=sum(run.seconds for run in runs),
        last_run_seconds=max((run.seconds for run in last), default=0.0),
        effort=_add_up(runs, live),
        live_runs=tuple(run.run for run in live),
        last_outcome=runs[-1].outcome if runs else "running",
        max_error_rate=runs[-1].max_error_rate if runs else 1.0,
        is_running=bool(live) or (ended_run is None and is_driver_alive(folder)),
        environments=distinct(found for run in runs for found in run.environments),
        engine_settings=distinct(found for run in runs for found in run.engine_settings),
    )


def count_shards(folder: OutputFolder, plan: Plan, shards: Sequence[Shard]) -> ShardCounts:
    """What is committed of ``shards``, and what journals answer of the others."""
    tally, num_committed, num_rows_committed = Tally(), 0, 0
    for shard in shards:
        committed = try_read_commit(folder, plan, shard.index)
        if committed is None and folder.shard_journals(shard.index).is_dir():
            journaled = count_rows(read_shard_rows(folder, plan, shard.index))
            # Published while its journals were read, maybe: then they were going away.
            committed = try_read_commit(folder, plan, shard.index)
            tally += journaled if committed is None else Tally()
        if committed is not None:
            tally += committed
            num_committed += 1
            num_rows_committed += committed.num_rows
    return ShardCounts(
        num_shards=len(shards),
        num_committed=num_committed,
        num_rows_committed=num_rows_committed,
        tally=tally,
    )


def _find_live(folder: OutputFolder, runs: Sequence[RunRecord]) -> list[RunRecord]:
    """The runs at work. One that was killed says "running" for ever: its lock does not.

    A newer run on some of the same shards could begin because the older one was over.
    """
    live: list[RunRecord] = []
    for at, run in enumerate(runs):
        shards = None if run.shards is None else range(*run.shards)
        is_old = any(_do_meet(run, newer) for newer in runs[at + 1 :])
        if run.outcome == "running" and not is_old and is_driver_alive(folder, shards):
            live.append(run)
    return live


def _do_meet(one: RunRecord, other: RunRecord) -> bool:
    if one.shards is None or other.shards is None:
        return True
    return max(one.shards[0], other.shards[0]) < min(one.shards[1], other.shards[1])


def _add_up(runs: Sequence[RunRecord], live: Sequence[RunRecord]) -> Effort:
    ended = [run for run in runs if run not in live]
    costs = [run.cost_per_rank_hour * _rank_hours(run) for run in runs if run.cost_per_rank_hour is not None]
    return Effort(
        num_tokens_computed=sum(
            run.num_prefill_tokens + run.num_decode_tokens + run.num_replayed_tokens for run in runs
        ),
        wasted_tokens=WastedTokens(
            after_preemption=sum(run.num_recomputed_tokens for run in runs),
            replay=sum(run.num_replayed_tokens for run in runs),
            lost_with_ranks=sum(run.num_tokens_lost_with_ranks for run in runs),
            lost_with_runs=sum(run.num_tokens_in_flight for run in ended),
        ),
        rank_hours=sum(_rank_hours(run) for run in runs),
        tail_idle_rank_s=sum(run.tail_idle_s for run in ended),
        cost=sum(costs) if costs else None,
    )


def _rank_hours(run: RunRecord) -> float:
    return run.rank_seconds / 3600


def read_runs(folder: OutputFolder) -> list[RunRecord]:
    """Every run that got as far as saying something, oldest first."""
    texts = [path.read_text(encoding="utf-8") for path in sorted(folder.runs.glob("*.json"))]
    return [_to_record(json.loads(text)) for text in texts if text]


def _to_record(tree: dict[str, Any]) -> RunRecord:
    shards = tree.get("shards")
    losses = [RankLoss(**loss) for loss in tree.get("losses", ())]
    return RunRecord(**{**tree, "shards": None if shards is None else tuple(shards), "losses": losses})


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
    # Of a moment, or of the last run alone, and this is for later.
    del tree["is_running"], tree["num_in_flight"], tree["last_run_seconds"], tree["live_runs"]
    tree.update(
        num_read=status.num_read,
        num_ok=status.num_ok,
        num_error=status.num_error,
        is_finished=status.is_finished,
        has_failed_rate=status.has_failed_rate,
        num_tokens_per_s=round(status.num_tokens_per_s, 3),
        num_tokens_per_s_per_rank=round(status.num_tokens_per_s_per_rank, 3),
        gpu_hours=status.effort.rank_hours if status.has_gpus else 0.0,
        cache_hit_rate=round(status.tally.cache_hit_rate, 6),
        ranks_lost=[{"run": run.run, **asdict(loss)} for run in read_runs(folder) for loss in run.losses],
    )
    replace_durably(folder, folder.report_file, json.dumps(tree, indent=1).encode())

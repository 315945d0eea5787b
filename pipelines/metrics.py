"""What a run measures while it works: counters and gauges of all ranks, one line of JSON an interval.

Owns the files under ``_overnight/metrics``, the run's own record and the progress line, and how counters
of ranks that come and go add up. It must not decide anything about rows, nor know what a rank is.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields

from engine.api import EngineStats
from pipelines.manifest import OutputFolder
from pipelines.progress import ProgressLine
from pipelines.report import RankLoss, RunRecord

_SAVE_INTERVAL_S = 1.0
_LONGEST_REASON = 200
_MAX_LOSSES = 1000
_SHORTEST_INTERVAL_S, _LONGEST_INTERVAL_S = 1.0, 10.0

_COUNTERS = (
    "num_prefill_tokens",
    "num_decode_tokens",
    "num_recomputed_tokens",
    "num_replayed_tokens",
    "num_preemptions",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCounts:
    """Rows of the whole job, earlier runs included, as the driver counts them now.

    ``num_read`` = ``num_ok`` + ``num_error`` + ``num_in_flight``. ``num_unleased`` rows wait for a rank.
    """

    num_read: int
    num_ok: int
    num_error: int
    num_in_flight: int
    num_unleased: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsLine:
    """One interval. Rows are the job's, token counters the run's, gauges of this moment over all live ranks.

    ``kv_use`` is the share of KV blocks that no new sequence could take; the two rates are the interval's.
    """

    time: float
    run: int
    seconds: float
    num_rows: int
    num_read: int
    num_ok: int
    num_error: int
    num_in_flight: int
    num_unleased: int
    num_ranks: int
    num_waiting: int
    num_running: int
    kv_use: float
    num_prefill_tokens: int
    num_decode_tokens: int
    num_recomputed_tokens: int
    num_replayed_tokens: int
    num_preemptions: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_completion_tokens: int
    num_rank_deaths: int
    prefill_tokens_per_s: float
    decode_tokens_per_s: float


MetricsListener = Callable[[MetricsLine], None]


@dataclass(slots=True)
class _RankState:
    stats: EngineStats = field(default_factory=EngineStats)
    num_tokens: tuple[int, int, int] = (0, 0, 0)
    started_at: float = field(default_factory=time.monotonic)
    busy_at: float | None = None
    """When it last had rows; None until its engine is built."""


class RunWatch:
    """Adds up what the ranks of one run report, and says it: line, file, record, ``listener``."""

    def __init__(
        self,
        folder: OutputFolder,
        record: RunRecord,
        *,
        num_rows: int,
        num_done: int,
        listener: MetricsListener | None = None,
    ) -> None:
        self.record = record
        record.num_reused = num_done
        self._folder, self._num_rows, self._listener = folder, num_rows, listener
        self._ranks: dict[int, _RankState] = {}
        self._ended_rank_seconds = 0.0
        self._open_losses: dict[int, tuple[RankLoss, float]] = {}
        self._started = self._saved_at = time.monotonic()
        self._line_at = self._started
        self._line_tokens = (0, 0)
        self._rates = (0.0, 0.0)
        self._progress = ProgressLine(num_rows, num_done)
        folder.metrics.mkdir(exist_ok=True)

    def start_rank(self, slot: int) -> None:
        """A rank of this slot was started anew."""
        self._ranks[slot] = _RankState()

    def take(
        self, slot: int, stats: EngineStats, num_tokens: tuple[int, int, int], *, has_rows: bool
    ) -> None:
        """What a rank with an engine says: the engine's numbers, and (in, out, cached) of its answers.

        ``has_rows``: whether it holds rows that are not finished.
        """
        state, record = self._ranks[slot], self.record
        for name in _COUNTERS:
            grown = getattr(stats, name) - getattr(state.stats, name)
            setattr(record, name, getattr(record, name) + grown)
        record.num_prompt_tokens += num_tokens[0] - state.num_tokens[0]
        record.num_completion_tokens += num_tokens[1] - state.num_tokens[1]
        record.num_cached_tokens += num_tokens[2] - state.num_tokens[2]
        state.stats, state.num_tokens = stats, num_tokens
        if has_rows or state.busy_at is None:
            state.busy_at = time.monotonic()
        if slot in self._open_losses:
            loss, died_at = self._open_losses.pop(slot)
            loss.rank_seconds = round(time.monotonic() - died_at, 3)

    def lose_rank(self, slot: int, *, node: str = "", reason: str = "") -> None:
        """A rank died: what its engine had computed for unfinished rows is lost with it."""
        state, now = self._ranks.pop(slot), time.monotonic()
        num_tokens = state.stats.num_unfinished_tokens
        self._ended_rank_seconds += now - state.started_at
        self.record.num_rank_deaths += 1
        self.record.num_tokens_lost_with_ranks += num_tokens
        first_line = next(iter(reason.strip().splitlines()), "")
        loss = RankLoss(
            at_s=round(now - self._started, 3),
            rank=slot,
            node=node,
            reason=first_line[:_LONGEST_REASON],
            num_tokens=num_tokens,
        )
        # A slot whose rank died again before it served is one longer absence.
        _, died_at = self._open_losses.get(slot, (loss, now))
        self._open_losses[slot] = (loss, died_at)
        if len(self.record.losses) < _MAX_LOSSES:
            self.record.losses.append(loss)

    def note_rows_lost(self, slot: int, num_rows: int) -> None:
        """So many rows were in flight on the rank of a slot when it died, and run again."""
        self._open_losses[slot][0].num_rows = num_rows

    def save(self) -> None:
        """Write the run's record now."""
        self.record.save(self._folder)
        self._saved_at = time.monotonic()

    def show(self, rows: RowCounts, *, is_last: bool = False) -> None:
        """Say how far the run is, to whom it is due."""
        now = time.monotonic()
        self._update_record(rows, now)
        elapsed = max(now - self._started, 1e-3)
        # Dense while a run is young, so that a short one has a picture too; a long one keeps a short file.
        interval_s = min(_LONGEST_INTERVAL_S, max(_SHORTEST_INTERVAL_S, elapsed / 100))
        if is_last or now - self._line_at >= interval_s:
            self._write_line(rows, now)
        record = self.record
        rates = self._rates
        if is_last:
            rates = (record.num_prefill_tokens / elapsed, record.num_decode_tokens / elapsed)
        self._progress.show(
            rows.num_ok + rows.num_error,
            prefill_tokens_per_s=rates[0],
            decode_tokens_per_s=rates[1],
            cache_hit_rate=record.num_cached_tokens / max(record.num_prompt_tokens, 1),
            num_errors=rows.num_error,
            num_ranks=self._num_live_ranks,
            is_last=is_last,
        )
        if now - self._saved_at > _SAVE_INTERVAL_S:
            self.save()

    def finish(self, rows: RowCounts, outcome: str) -> None:
        """The last word of a run."""
        self.record.outcome = outcome
        self.show(rows, is_last=True)
        self._progress.close()
        self.record.num_in_flight = 0
        self.save()

    @property
    def _num_live_ranks(self) -> int:
        return sum(1 for state in self._ranks.values() if state.busy_at is not None)

    def _update_record(self, rows: RowCounts, now: float) -> None:
        record = self.record
        record.seconds = now - self._started
        live = sum(now - state.started_at for state in self._ranks.values())
        record.rank_seconds = self._ended_rank_seconds + live
        for loss, died_at in self._open_losses.values():
            loss.rank_seconds = round(now - died_at, 3)
        record.num_run = rows.num_ok + rows.num_error - record.num_reused
        record.num_in_flight = rows.num_in_flight
        # A row that is in flight is lost with the run unless the run lives to finish it.
        unfinished = sum(state.stats.num_unfinished_tokens for state in self._ranks.values())
        record.num_tokens_in_flight = unfinished if rows.num_in_flight else 0
        idle = (now - state.busy_at for state in self._ranks.values() if state.busy_at is not None)
        record.tail_idle_s = sum(idle)

    def _write_line(self, rows: RowCounts, now: float) -> None:
        record = self.record
        tokens = (record.num_prefill_tokens, record.num_decode_tokens)
        lasted = now - self._line_at
        if lasted >= _SHORTEST_INTERVAL_S / 2 or self._rates == (0.0, 0.0):
            # The last line may follow so soon on another that a rate of its own would be noise.
            prefill, decode = (new - old for new, old in zip(tokens, self._line_tokens, strict=True))
            self._rates = (prefill / max(lasted, 1e-3), decode / max(lasted, 1e-3))
        self._line_at, self._line_tokens = now, tokens
        stats = [state.stats for state in self._ranks.values()]
        num_blocks = sum(one.num_kv_blocks for one in stats)
        num_free = sum(one.num_free_blocks for one in stats)
        line = MetricsLine(
            time=round(time.time(), 3),
            run=record.run,
            seconds=round(record.seconds, 3),
            num_rows=self._num_rows,
            **asdict(rows),
            num_ranks=self._num_live_ranks,
            num_waiting=sum(one.num_waiting for one in stats),
            num_running=sum(one.num_running for one in stats),
            kv_use=round(1 - num_free / num_blocks, 4) if num_blocks else 0.0,
            **{name: getattr(record, name) for name in _COUNTERS},
            num_prompt_tokens=record.num_prompt_tokens,
            num_cached_tokens=record.num_cached_tokens,
            num_completion_tokens=record.num_completion_tokens,
            num_rank_deaths=record.num_rank_deaths,
            prefill_tokens_per_s=round(self._rates[0], 3),
            decode_tokens_per_s=round(self._rates[1], 3),
        )
        # One write of one whole line: a reader, or a kill, never sees half of an older one.
        with open(self._folder.metrics_file(record.run), "ab", buffering=0) as file:
            file.write(json.dumps(asdict(line)).encode() + b"\n")
        if self._listener is not None:
            self._listener(line)


def read_metrics(folder: OutputFolder) -> list[MetricsLine]:
    """Every line of every run, oldest first; one that a full disk or a kill cut short is left out."""
    names = {known.name for known in fields(MetricsLine)}
    lines: list[MetricsLine] = []
    for path in sorted(folder.metrics.glob("*.jsonl")):
        for text in path.read_bytes().split(b"\n")[:-1]:
            try:
                tree = json.loads(text)
            except json.JSONDecodeError:
                continue
            if tree.keys() == names:
                lines.append(MetricsLine(**tree))
    return lines

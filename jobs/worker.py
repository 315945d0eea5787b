"""A rank's step loop: leased rows in, journaled answers and assembled parts out.

Owns what a turn does and what happens when it goes wrong, and the talk with the thread that speaks to the
driver. It must not know processes, nor which rows it gets, nor what its death means: the driver decides that.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import asdict, dataclass
from typing import Any

from engine import ConfigError, Engine, EngineDead, EngineStats, PeerLost, RequestOutput
from jobs.environment import describe_environment
from jobs.feeder import Feeder
from jobs.lease_reader import LeaseReader, Renderer
from jobs.lease_run import LeaseRun
from jobs.rows_in_flight import RowsInFlight
from jobs.shard_cache import ShardCache
from pipelines.manifest import OutputFolder, Tally
from pipelines.plan import Plan
from pipelines.rank_protocol import Lease, Orders, RankReport
from pipelines.reasoning import ReasoningSplitter, split_output
from pipelines.schema import FinishedRow
from pipelines.sink import JournalWriter, publish_shard
from pipelines.source import InputUnreadable, RowReader

logger = logging.getLogger(__name__)

_SYNC_INTERVAL_S = 1.0  # the promise is two seconds; a sync that is slow itself needs the rest
_IDLE_WAIT_S = 0.02
_GATHER_S = 0.02
_UNWRITABLE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM}


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """An engine that is ready, and how much it takes: rows at once, prompt tokens in a step.

    ``splitter`` is there when reasoning has a column of its own.
    """

    engine: Engine
    renderer: Renderer
    capacity: int
    max_num_batched_tokens: int
    splitter: ReasoningSplitter | None = None


class RankWorker:
    """Runs leases on one engine. ``run`` or ``turn`` belongs to one thread, ``exchange`` to another.

    ``build`` makes the engine when it is first needed. Parts are assembled on ``publisher``, journals
    synced on ``syncer``, rows read and tokenized on ``renderer``, which has one thread: none of them holds
    up a step.
    """

    def __init__(
        self,
        folder: OutputFolder,
        plan: Plan,
        run: int,
        build: Callable[[], Serving],
        *,
        publisher: Executor,
        syncer: Executor,
        renderer: Executor,
    ) -> None:
        self._folder, self._plan, self._run, self._build = folder, plan, run, build
        self._publisher, self._syncer, self._renderer = publisher, syncer, renderer
        columns = plan.contract.render_columns
        self._cache = ShardCache(RowReader(plan.root, plan.kind, plan.files, columns))
        self._part_reader = RowReader(plan.root, plan.kind, plan.files, plan.contract.passed.names)
        self._changed = threading.Condition()
        self._serving: Serving | None = None
        self._new_leases: deque[Lease] = deque()
        self._leases: deque[LeaseRun] = deque()
        self._in_flight = RowsInFlight()
        self._feeder: Feeder | None = None
        self._published: list[tuple[int, Tally]] = []
        self._must_prepare = self._is_draining = self._is_stopped = self._has_news = False
        self._failure: EngineDead | None = None
        self._refused: str | None = None
        self._broken: str | None = None
        self._num_turns = self._num_prompt_tokens = self._num_completion_tokens = 0
        self._num_cached_tokens = 0
        self._stats = EngineStats()
        self._environment: dict[str, str] = {}
        self._engine_settings: dict[str, Any] = {}
        self._synced_at = time.monotonic()

    def exchange(self, orders: Orders, wait_s: float) -> RankReport:
        """Take orders, wait up to ``wait_s`` for something to say, and say it. ``EngineDead``: it is over."""
        with self._changed:
            self._must_prepare |= orders.prepare
            self._is_draining |= orders.drain
            self._new_leases.extend(orders.leases)
            self._changed.notify_all()
        for shard_index in orders.publish:
            self._submit(self._publisher, self._publish, shard_index)
        if orders.stop:
            self._stop()
        with self._changed:
            if self._leases:
                # News of a busy rank is gathered for a moment: each exchange costs the loop some time.
                self._changed.wait_for(lambda: self._is_over, min(wait_s, _GATHER_S))
            self._changed.wait_for(lambda: self._has_news or self._is_over, wait_s)
            self._has_news = False
            if self._failure is not None:
                raise self._failure
            return self._report()

    def run(self) -> None:
        """Turn until stopped or dead."""
        while not self._is_over:
            if not self.turn():
                with self._changed:
                    self._changed.wait_for(lambda: bool(self._new_leases) or self._is_over, _IDLE_WAIT_S)

    def turn(self) -> bool:
        """One turn of the loop; whether there was work. What goes wrong in it ends the rank."""
        if self._is_over:
            return False
        self._num_turns += 1
        try:
            return self._turn()
        except BaseException as error:
            # The boundary of the rank: whatever it was, this engine is not trusted with another row. A panic
            # of a library written in Rust is no Exception, and would end this thread unheard.
            self._fail(error)
            return False

    def _turn(self) -> bool:
        if self._serving is None and self._must_prepare:
            self._prepare()
        self._open_leases()
        if self._serving is None or self._feeder is None:
            return False
        if not self._is_draining:
            self._feeder.feed(self._leases)
        self._journal()
        engine = self._serving.engine
        has_work = engine.has_unfinished()
        if has_work or engine.is_shared:
            for output in self._in_flight.step(engine):
                self._take(self._serving, output)
            self._stats = engine.stats()  # the engine is this loop's alone: others read this
            self._journal()
        if time.monotonic() - self._synced_at > _SYNC_INTERVAL_S:
            self._synced_at = time.monotonic()
            for run in self._leases:
                self._submit(self._syncer, run.journal.sync)
        return has_work or engine.is_group_busy

    def _prepare(self) -> None:
        serving = self._build()
        self._plan.contract.to_batch(())  # Arrow's first conversion imports much: not between two steps
        resolved = serving.engine.resolved
        self._environment = describe_environment(resolved, str(self._plan.settings.get("model.path")))
        self._engine_settings = asdict(resolved)
        self._feeder = Feeder(
            serving.engine,
            serving.renderer,
            self._in_flight,
            capacity=serving.capacity,
            max_num_batched_tokens=serving.max_num_batched_tokens,
        )
        self._serving = serving
        self._tell()

    def _open_leases(self) -> None:
        while self._new_leases and not self._is_stopped:
            lease = self._new_leases[0]
            shard = self._plan.shards[lease.shard_index]
            journal = JournalWriter(self._folder, self._plan, shard.index, self._run, lease.lease_id)
            rows = LeaseReader(lease, shard, self._cache, journal, self._renderer)
            run = LeaseRun(lease=lease, journal=journal, rows=rows)
            with self._changed:
                self._leases.append(run)
                self._new_leases.popleft()

    def _take(self, serving: Serving, output: RequestOutput) -> None:
        run, row, request = self._in_flight.remove(output.request_id)
        prompt_token_ids, reasoning = request.prompt_token_ids, None
        if serving.splitter is not None:
            output, reasoning = split_output(serving.splitter, prompt_token_ids, output)
        run.finished.append(
            FinishedRow(row=row, output=output, prompt_token_ids=prompt_token_ids, reasoning=reasoning)
        )
        self._num_prompt_tokens += output.num_prompt_tokens
        self._num_cached_tokens += output.num_cached_tokens
        self._num_completion_tokens += sum(len(completion.token_ids) for completion in output.completions)

    def _journal(self) -> None:
        """Write what finished; close the leases that are through."""
        for run in [run for run in self._leases if run.finished]:
            run.journal.finish(run.finished)
            num_ok = sum(1 for row in run.finished if row.error is None)
            with self._changed:
                run.num_ok += num_ok
                run.num_error += len(run.finished) - num_ok
            run.finished = []
            if run.num_left == 0:
                self._submit(self._syncer, self._close, run)
            if self._is_hungry:
                self._tell()

    @property
    def _is_over(self) -> bool:
        ends = (self._failure, self._refused, self._broken)
        return self._is_stopped or any(end is not None for end in ends)

    @property
    def _is_hungry(self) -> bool:
        num_left = sum(run.num_left for run in self._leases)
        return self._serving is not None and num_left <= 2 * self._serving.capacity

    def _close(self, run: LeaseRun) -> None:
        # Done means done for a publisher on another machine: synced and closed first.
        run.journal.close()
        with self._changed:
            run.is_done = True
        self._tell()

    def _publish(self, shard_index: int) -> None:
        shard = self._plan.shards[shard_index]
        attempt = f"{self._run:06d}-{time.time_ns()}"
        tally = publish_shard(self._folder, self._plan, shard, self._part_reader, attempt)
        with self._changed:
            self._published.append((shard_index, tally))
        self._tell()

    def _stop(self) -> None:
        with self._changed:
            self._is_stopped = True
            journals = [run.journal for run in self._leases]
            self._changed.notify_all()
        for journal in journals:
            journal.sync()

    def _report(self) -> RankReport:
        published = tuple(self._published)
        self._published.clear()
        leases = tuple(run.report() for run in self._leases)
        self._leases = deque(run for run in self._leases if not run.is_done)
        return RankReport(
            num_turns=self._num_turns,
            capacity=self._serving.capacity if self._serving is not None else 0,
            leases=leases,
            published=published,
            num_prompt_tokens=self._num_prompt_tokens,
            num_completion_tokens=self._num_completion_tokens,
            num_cached_tokens=self._num_cached_tokens,
            stats=self._stats,
            environment=self._environment,
            engine_settings=self._engine_settings,
            is_drained=self._is_draining and not self._in_flight,
            is_stopped=self._is_stopped,
            refused=self._refused,
            broken=self._broken,
        )

    def _submit(self, executor: Executor, work: Callable[..., None], *arguments: object) -> None:
        executor.submit(work, *arguments).add_done_callback(self._look_at)

    def _look_at(self, future: Future[None]) -> None:
        error = future.exception()
        if error is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        text = "".join(traceback.format_exception(error))
        logger.error("%s", text)
        with self._changed:
            if isinstance(error, ConfigError):
                self._refused = str(error)
            elif isinstance(error, InputUnreadable):
                self._broken = str(error)
            elif isinstance(error, OSError) and error.errno in _UNWRITABLE:
                self._broken = f"the output cannot be written: {error}"
            else:
                kind = PeerLost if isinstance(error, PeerLost) else EngineDead
                # What went wrong comes first: that line is what a run's record keeps.
                summary = "".join(traceback.format_exception_only(error)).strip()
                self._failure = self._failure or kind(f"{summary}\n{text}")
        self._tell()

    def _tell(self) -> None:
        with self._changed:
            self._has_news = True
            self._changed.notify_all()

"""A rank's step loop: leased rows in, journaled answers and assembled parts out.

Owns keeping the engine fed and what a turn does when it goes wrong. It must not know
processes, nor which rows it gets, nor what its death means: the driver decides that.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Executor, Future
from dataclasses import asdict, dataclass, field
from typing import Any

from engine import (
    ConfigError,
    Engine,
    EngineDead,
    EngineStats,
    PeerLost,
    Request,
    RequestOutput,
    RequestRejected,
)
from jobs.environment import describe_environment
from jobs.lease_reader import LeaseReader, Renderer
from jobs.shard_cache import ShardCache
from pipelines.manifest import OutputFolder, Tally
from pipelines.plan import Plan
from pipelines.rank_protocol import Lease, LeaseReport, Orders, RankReport
from pipelines.reasoning import ReasoningSplitter, split_output
from pipelines.schema import FinishedRow
from pipelines.sink import NOT_IN_STEP, JournalWriter, publish_shard
from pipelines.source import RowReader, Shard

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


@dataclass(slots=True)
class _LeaseRun:
    lease: Lease
    shard: Shard
    journal: JournalWriter
    rows: LeaseReader
    is_read: bool = False
    num_read: int = 0
    num_ok: int = 0
    num_error: int = 0
    is_done: bool = False
    finished: list[FinishedRow] = field(default_factory=list)

    @property
    def num_left(self) -> int:
        return self.lease.num_rows - self.num_ok - self.num_error


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
        self._leases: deque[_LeaseRun] = deque()
        self._in_flight: dict[str, tuple[_LeaseRun, int, Request]] = {}
        self._prompt_lengths: list[int] = []
        self._published: list[tuple[int, Tally]] = []
        self._must_prepare = self._is_draining = self._is_stopped = self._has_news = False
        self._failure: EngineDead | None = None
        self._refused: str | None = None
        self._broken: str | None = None
        self._num_turns = self._num_steps = self._num_prompt_tokens = self._num_completion_tokens = 0
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
            serving = self._build()
            self._plan.contract.to_batch(())  # Arrow's first conversion imports much: not between two steps
            resolved = serving.engine.resolved
            self._environment = describe_environment(resolved, str(self._plan.settings.get("model.path")))
            self._engine_settings = asdict(resolved)
            self._serving = serving
            self._tell()
        self._open_leases()
        if self._serving is None:
            return False
        if not self._is_draining:
            self._feed(self._serving)
        self._journal()
        engine = self._serving.engine
        has_work = engine.has_unfinished()
        if has_work or engine.is_shared:
            for output in self._step(engine):
                self._take(self._serving, output)
            self._stats = engine.stats()  # the engine is this loop's alone: others read this
            self._journal()
        if time.monotonic() - self._synced_at > _SYNC_INTERVAL_S:
            self._synced_at = time.monotonic()
            for run in self._leases:
                self._submit(self._syncer, run.journal.sync)
        return has_work or engine.is_group_busy

    def _open_leases(self) -> None:
        while self._new_leases and not self._is_stopped:
            lease = self._new_leases[0]
            shard = self._plan.shards[lease.shard_index]
            journal = JournalWriter(self._folder, self._plan, shard.index, self._run, lease.lease_id)
            rows = LeaseReader(lease, shard, self._cache, journal, self._renderer)
            run = _LeaseRun(lease=lease, shard=shard, journal=journal, rows=rows)
            with self._changed:
                self._leases.append(run)
                self._new_leases.popleft()

    def _feed(self, serving: Serving) -> None:
        """Add rows until the next step is sure to be full, and not so many that prompts pile up.

        A step takes no more prompt tokens than its budget, so that many tokens are enough to wait.
        """
        few = max(2, serving.capacity // 4)
        stats = serving.engine.stats()
        num_waiting = stats.num_waiting
        # Requests start in the order they came, so the last ones are those that wait.
        num_tokens = sum(self._prompt_lengths[-num_waiting:]) if num_waiting else 0
        while len(self._in_flight) < serving.capacity + few and (
            num_waiting < few or num_tokens < serving.max_num_batched_tokens
        ):
            left = [run for run in self._leases if not run.is_read]
            if not left:
                break
            # Suspects first, but not as the first of all: see ``_step``.
            is_first = not (self._num_steps or self._in_flight)
            run = next((run for run in left if run.lease.is_of_suspects is not is_first), left[0])
            if not self._may_begin(serving, run):
                break
            # While nothing runs, nothing is held up, and a step that is not full costs more than the wait.
            is_idle = stats.num_running == 0 and not serving.engine.is_group_busy
            may_wait = is_idle or run.lease.is_of_suspects
            added = self._try_add_row(serving, run, may_wait=may_wait)
            if added is None:
                break
            num_waiting += added > 0
            num_tokens += added
        self._render_ahead(serving)
        del self._prompt_lengths[: -(serving.capacity + few)]

    def _may_begin(self, serving: Serving, run: _LeaseRun) -> bool:
        """Whether the next row of ``run`` may start: no more suspects than run at once, one solo one."""
        most = 1 if run.lease.is_solo else serving.capacity
        return not run.lease.is_of_suspects or len(self._in_flight) < most

    def _step(self, engine: Engine) -> list[RequestOutput]:
        """One step; before it, which rows are in it and how far each is, for whoever finds this rank dead.

        A suspect that is as far as it was at a death is in its step alone: another death is then its doing,
        and no other row's. When none of those has room, the others go on without them. The others also make
        this rank's first step, if there are any: a rank that is broken itself shows it before one is blamed.
        """
        num_tokens = engine.num_generated_tokens()
        due = [
            request_id
            for request_id, (run, row, _) in self._in_flight.items()
            if num_tokens[request_id] in run.lease.tokens_at_deaths.get(row, ())
        ]
        if due:
            engine.await_device()  # what an earlier step did must not end the rank in a suspect's own
        groups: list[Collection[str]] = [{request_id} for request_id in due]
        if due and (others := self._in_flight.keys() - due):
            groups.insert(len(groups) if self._num_steps else 0, others)
        for group in groups:
            self._note_step(num_tokens, group)
            outputs = engine.try_step_only(group)
            if outputs is not None:
                break
        else:
            self._note_step(num_tokens, self._in_flight)
            outputs = engine.step()
        self._num_steps += bool(self._in_flight)
        return outputs

    def _note_step(self, num_tokens: Mapping[str, int], in_step: Collection[str]) -> None:
        of_runs: dict[int, dict[int, int]] = {}
        for request_id, (run, row, _) in self._in_flight.items():
            has = num_tokens[request_id] if request_id in in_step else NOT_IN_STEP
            of_runs.setdefault(run.lease.lease_id, {})[row] = has
        for run in self._leases:
            if run.lease.lease_id in of_runs:
                run.journal.note_step(self._num_steps, of_runs[run.lease.lease_id])

    def _render_ahead(self, serving: Serving) -> None:
        """Have the next lease's first rows ready when this one's last are taken."""
        waiting = [run for run in self._leases if not run.is_read and not run.lease.is_of_suspects]
        for run in waiting[:2]:
            run.rows.begin(serving.renderer, _look_ahead(serving))

    def _try_add_row(self, serving: Serving, run: _LeaseRun, *, may_wait: bool) -> int | None:
        """Add the lease's next row; its prompt tokens, 0 when it was refused, None when it is not ready."""
        found = run.rows.try_take(serving.renderer, _look_ahead(serving), may_wait=may_wait)
        if found is None:
            return None
        row, request = found
        run.num_read += 1
        run.is_read = run.num_read == run.lease.num_rows
        try:
            if isinstance(request, RequestRejected):
                raise request
            serving.engine.add_request(request)
        except RequestRejected as rejected:
            run.finished.append(FinishedRow(row=row, error=rejected.code, error_message=rejected.message))
            return 0
        self._in_flight[request.request_id] = (run, row, request)
        self._prompt_lengths.append(len(request.prompt_token_ids))
        return len(request.prompt_token_ids)

    def _take(self, serving: Serving, output: RequestOutput) -> None:
        run, row, request = self._in_flight.pop(output.request_id)
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

    def _close(self, run: _LeaseRun) -> None:
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
        leases = tuple(
            LeaseReport(
                lease_id=run.lease.lease_id,
                num_read=run.num_read,
                num_ok=run.num_ok,
                num_error=run.num_error,
                is_done=run.is_done,
            )
            for run in self._leases
        )
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
            elif isinstance(error, OSError) and error.errno in _UNWRITABLE:
                self._broken = f"the output cannot be written: {error}"
            else:
                kind = PeerLost if isinstance(error, PeerLost) else EngineDead
                self._failure = self._failure or kind(text)
        self._tell()

    def _tell(self) -> None:
        with self._changed:
            self._has_news = True
            self._changed.notify_all()


def _look_ahead(serving: Serving) -> int:
    """Rows rendered together, as many again behind them: all are suspects, so no more than run at once."""
    return max(2, serving.capacity // 2)

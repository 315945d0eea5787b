"""The driver: plan, lease, collect, commit, until every shard has its part.

Owns the loop: when ranks are started and ended, what each is asked to do, how a run stops. Rows never pass
through it: it hands out row numbers and takes in counts. It must not know what a rank is made of: it speaks
to a ``Fleet``.
"""

from __future__ import annotations

import enum
import logging
import shutil
import time
from collections.abc import Callable, Sequence

from engine.errors import ConfigError
from pipelines.deaths import DeathLog
from pipelines.inquest import Findings, Inquest
from pipelines.leasing import RankSpeeds, choose_leases
from pipelines.ledger import Ledger
from pipelines.manifest import OutputFolder, Tally
from pipelines.metrics import MetricsListener, RowCounts, RunWatch
from pipelines.plan import Plan
from pipelines.rank_protocol import Fleet, Lease, Orders, RankDied, RankReport
from pipelines.replicas import Replicas
from pipelines.report import RunRecord, read_status
from pipelines.report_page import write_reports
from pipelines.resume import take_up
from pipelines.row_costs import RowCosts, estimate_costs
from pipelines.sink import read_journal_state
from pipelines.slots import Slots
from pipelines.source import RowReader

logger = logging.getLogger(__name__)

_WAIT_S = 0.25
_SILENCE_S = 10.0  # a rank answers several times a second, whatever its loop does
_ABSENCE_S = 2.0
"""A driver that took so long for one round was stopped, or read the input, and heard no rank meanwhile."""
_STOP_PATIENCE_S = 1.0
_MAX_SHARDS_TO_REPORT_IN_HASTE = 200
"""A run that is told to stop has two seconds, and reading more shards than these for the report could take
longer: ``status --write-report`` makes up for it."""


class StopRequest(enum.IntEnum):
    """How the job was asked to stop: not, once what is in flight is finished, or now."""

    NONE = 0
    DRAIN = 1
    NOW = 2


class Outcome(enum.Enum):
    """How a run ended."""

    COMMITTED = "committed"
    STOPPED = "stopped"
    TOO_MANY_ERRORS = "too many errors"


class JobFailed(RuntimeError):
    """The job cannot go on though nothing is wrong with its config: no rank lives, no disk is writable."""


class Driver:
    """One run over a plan, or ``shards`` of it. ``stall_timeout_s``: how long a step loop may stand still.

    Slots without a place wait for one. Fewer than ``min_ranks`` ranks with a place for ``place_timeout_s``
    end the run: another one may find more.

    ``capacity`` is how many rows a rank runs at once, as far as is known before one says so. More than
    ``max_errors`` error rows end the run.
    ``cost_per_rank_hour`` and ``max_error_rate`` are for the report; ``on_metrics`` is told every line of
    ``pipelines.metrics``. ``on_ready`` is called when a rank's engine is built, before it has rows.
    """

    def __init__(
        self,
        folder: OutputFolder,
        plan: Plan,
        fleet: Fleet,
        *,
        run: int,
        shards: range | None = None,
        capacity: int = 1,
        min_ranks: int = 1,
        place_timeout_s: float = 1800.0,
        max_errors: int | None = None,
        stall_timeout_s: float = 900.0,
        start_timeout_s: float = 7200.0,
        cost_per_rank_hour: float | None = None,
        max_error_rate: float = 1.0,
        on_metrics: MetricsListener | None = None,
        on_ready: Callable[[], None] | None = None,
    ) -> None:
        self._folder, self._plan, self._fleet, self._run = folder, plan, fleet, run
        self._stall_timeout_s, self._start_timeout_s = stall_timeout_s, start_timeout_s
        self._record = RunRecord(
            run=run,
            shards=None if shards is None else (shards.start, shards.stop),
            num_ranks=fleet.num_slots,
            cost_per_rank_hour=cost_per_rank_hour,
            max_error_rate=max_error_rate,
        )
        self._record.save(folder)  # before the journals are read: a killed run is no longer the one at work
        self._slots = Slots(fleet.num_slots)
        self._replicas = Replicas(fleet.ranks_per_replica)
        self._min_ranks, self._place_timeout_s = min_ranks, place_timeout_s
        self._enough_at = time.monotonic()
        self._to_publish: list[int] = []
        self._stop = StopRequest.NONE
        self._stop_seen_at = 0.0
        own_shards = plan.shards if shards is None else plan.shards[shards.start : shards.stop]
        found = take_up(folder, plan, own_shards, is_whole=shards is None)
        self._num_rows_before, self._num_errors_before = found.num_rows, found.num_errors
        self._num_shards_left = len(found.missing)
        deaths = DeathLog(folder, plan, run)
        self._ledger = Ledger(found.missing, found.journaled, deaths.read())
        self._inquest = Inquest(folder, plan, run, self._ledger, deaths)
        self._speeds = RankSpeeds()
        self._num_lanes = fleet.num_slots * capacity
        self._has_costs = False
        self._on_ready = on_ready
        self._max_errors = max_errors
        num_rows = sum(shard.num_rows for shard in own_shards)
        self._watch = RunWatch(
            folder, self._record, num_rows=num_rows, num_done=self._num_done, listener=on_metrics
        )

    def request_stop(self, how: StopRequest) -> None:
        """Ask the loop to stop; safe to call from a signal handler. A stronger request wins."""
        self._stop = max(self._stop, how)

    def run(self) -> Outcome:
        """Work until all is committed or a stop was asked for. Raises ``ConfigError``, ``JobFailed``."""
        self._watch.save()
        outcome = "failed"
        try:
            result = self._loop()
            outcome = result.value
            if result is not Outcome.COMMITTED:
                # First what is known: where Ray was ended with us, asking it once more ends this process.
                self._record.outcome = outcome
                self._watch.save()
                self._count_last_rows()
        finally:
            self._watch.finish(self._count_rows(), outcome)
            if outcome != Outcome.STOPPED.value or len(self._plan.shards) <= _MAX_SHARDS_TO_REPORT_IN_HASTE:
                status = read_status(self._folder.path, ended_run=self._run)
                write_reports(self._folder.path, status)
        return result

    def _count_last_rows(self) -> None:
        """A rank may journal rows after its last report: the run was it that answered them."""
        for slot in range(self._fleet.num_slots):
            self._fleet.kill(slot)
            for lease in self._ledger.leases_of(slot):
                path = self._folder.journal_file(lease.shard_index, self._run, lease.lease_id)
                self._ledger.recount(lease.lease_id, read_journal_state(self._plan, path))

    @property
    def _num_done(self) -> int:
        return self._num_rows_before + self._ledger.num_ok + self._ledger.num_error

    @property
    def _has_too_many_errors(self) -> bool:
        num_errors = self._num_errors_before + self._ledger.num_error
        return self._max_errors is not None and num_errors > self._max_errors

    def _loop(self) -> Outcome:
        self._to_publish += self._ledger.take_complete()
        self._enough_at = self._looked_at = time.monotonic()
        while self._num_shards_left:
            if self._stop is not StopRequest.NOW:
                self._check_slots()
            if self._has_too_many_errors:
                self.request_stop(StopRequest.NOW)
            if not self._stop:
                self._fill_slots()
            if self._stop and self._has_stopped():
                return Outcome.TOO_MANY_ERRORS if self._has_too_many_errors else Outcome.STOPPED
            if self._is_time_to_estimate:
                self._estimate_costs()
            for slot, event in self._fleet.wait(_WAIT_S):
                if not self._slots[slot].is_live:
                    continue  # another rank of its replica, which came back at once with it, has ended it
                if isinstance(event, RankDied):
                    self._take_death(slot, event)
                else:
                    self._collect(slot, event)
                    if self._num_shards_left and not self._slots[slot].is_stopped:
                        self._fleet.exchange(slot, self._orders_for(slot))
            self._watch.show(self._count_rows())
        return Outcome.COMMITTED

    def _fill_slots(self) -> None:
        """Start a replica wherever there is a place for one: at first, after a death, when a node joined."""
        for first in range(0, len(self._slots), self._fleet.ranks_per_replica):
            state = self._slots[first]
            if not state.is_live and not state.is_given_up and self._fleet.has_place(first):
                for slot in self._replicas.slots_of(first):
                    self._start(slot)
        now = time.monotonic()
        if len(self._slots.live) >= self._min_ranks:
            self._enough_at = now
        elif now - self._enough_at > self._place_timeout_s:
            logger.error("there was no place for %d ranks in %.0f s", self._min_ranks, self._place_timeout_s)
            self.request_stop(StopRequest.NOW)

    def _start(self, slot: int) -> None:
        self._slots[slot].begin(time.monotonic())
        self._speeds.begin(slot)
        self._watch.start_rank(slot)
        self._fleet.start(slot)

    def _collect(self, slot: int, report: RankReport) -> None:
        if report.refused is not None:
            raise ConfigError(report.refused)
        if report.broken is not None:
            raise JobFailed(report.broken)
        state = self._slots[slot]
        if report.device != state.device:
            self._slots.check_device(slot, report.device)
        if report.capacity and not state.capacity:
            self._record.add_rank(report.environment, report.engine_settings)
            self._watch.save()  # before the rank has a row: what it will answer can be told apart by this
            if self._on_ready is not None:
                self._on_ready()
        state.take(report, time.monotonic())
        for lease in report.leases:
            self._ledger.record(lease)
        if report.capacity:
            num_tokens = (report.num_prompt_tokens, report.num_completion_tokens, report.num_cached_tokens)
            num_rows = self._ledger.num_outstanding(slot)
            self._watch.take(slot, report.stats, num_tokens, has_rows=num_rows > 0)
            is_full = num_rows >= report.capacity
            self._speeds.take(slot, sum(num_tokens[:2]), time.monotonic(), is_full=is_full)
        for shard_index, tally in report.published:
            if shard_index in state.publishing:
                state.publishing.discard(shard_index)
                self._commit(shard_index, tally)
        self._to_publish += self._ledger.take_complete()

    def _commit(self, shard_index: int, tally: Tally) -> None:
        self._ledger.commit(shard_index, tally)
        shutil.rmtree(self._folder.shard_journals(shard_index), ignore_errors=True)
        self._num_shards_left -= 1

    def _orders_for(self, slot: int) -> Orders:
        state = self._slots[slot]
        if self._stop is StopRequest.NOW:
            return Orders(stop=True)
        publish = tuple(self._to_publish)
        self._to_publish.clear()
        state.publishing.update(publish)
        if self._stop is StopRequest.DRAIN:
            return Orders(drain=True, publish=publish)
        # No rank of a replica is ready before all are.
        mates = self._replicas.slots_of(slot)
        is_awaited = any(self._slots[mate].is_preparing for mate in mates if mate != slot)
        state.is_preparing = is_awaited or self._ledger.num_unleased > 0
        leases = self._lease(slot) if state.capacity and self._has_costs else ()
        return Orders(prepare=state.is_preparing, leases=leases, publish=publish)

    def _lease(self, slot: int) -> tuple[Lease, ...]:
        capacities = self._slots.capacities()
        weights = self._speeds.weights(capacities)
        return choose_leases(self._ledger, slot, capacities, self._slots.starting(time.monotonic()), weights)

    @property
    def _is_time_to_estimate(self) -> bool:
        """Once every rank builds its engine; a rank that is ready does not wait for a late one."""
        if self._has_costs or self._stop or not self._ledger.num_unleased:
            return False
        live = self._slots.live
        return bool(live) and (all(s.is_preparing for s in live) or any(s.capacity for s in live))

    def _estimate_costs(self) -> None:
        """Read every prompt that is left once, so that rows can be leased in the order of their length.

        It happens while the ranks build their engines; a stop request ends it.
        """
        columns = self._plan.contract.render_columns
        reader = RowReader(self._plan.root, self._plan.kind, self._plan.files, columns, batch_rows=256)
        costs: dict[int, RowCosts] = {}
        try:
            for shard in self._ledger.missing_shards():
                if self._stop:
                    return
                costs[shard.index] = estimate_costs(reader, self._plan, shard)
        finally:
            reader.close()
        self._ledger.set_costs(costs, num_lanes=self._num_lanes)
        self._has_costs = True

    def _take_death(self, slot: int, death: RankDied) -> None:
        if self._stop is StopRequest.NOW:
            # A scheduler may tell every process of a job: what ends with the stop says nothing of any row.
            logger.warning("rank %d ended with the stop: %s", slot, death.reason)
            self._slots[slot].is_stopped = True
        elif death.has_lost_peer:
            logger.warning("rank %d lost another rank of its replica: %s", slot, death.reason)
            self._replicas.note_lost_peer(slot, time.monotonic())
        else:
            self._bury_replica(slot, [slot], death.reason)

    def _bury_replica(self, slot: int, culprits: Sequence[int], reason: str) -> None:
        """A replica ends with one of its ranks: only rows in flight on ``culprits`` are suspects."""
        mates = self._replicas.slots_of(slot)
        states = [self._slots[mate] for mate in mates]
        for mate in mates:
            self._fleet.kill(mate)
        findings = self._inquest.examine(mates, culprits)
        # A replica that was given nothing says little of its slots.
        is_ready = all(state.capacity for state in states)
        is_barren = not (findings.has_finished_rows or any(state.has_finished_rows for state in states))
        is_barren &= findings.has_leases or not is_ready
        is_explained = False
        for mate in mates:
            is_victim = bool(culprits) and mate not in culprits
            told = f"rank {culprits[0]} of its replica died" if is_victim else reason
            is_explained |= self._bury(mate, told, findings)
        # What dies of its first step may be broken itself, whoever was there.
        is_barren &= not (is_explained and findings.has_stepped)
        if self._replicas.end(slot, is_barren=is_barren, had_suspects=findings.had_suspects):
            logger.error("rank %d died again and again without finishing a row: given up", slot)
            for state in states:
                state.is_given_up = True
            if all(other.is_given_up for other in self._slots):
                raise JobFailed(f"no rank is left; the last one died of: {reason}")

    def _bury(self, slot: int, reason: str, findings: Findings) -> bool:
        """One rank of the replica is no more, and others get its rows. Whether one of them was to blame."""
        logger.warning("rank %d died: %s", slot, reason)
        state = self._slots[slot]
        state.lose(time.monotonic())
        self._watch.lose_rank(slot, node=state.node, reason=reason)
        self._watch.save()  # before its rows are marked by it
        self._watch.note_rows_lost(slot, findings.num_in_flight(slot))
        is_explained = self._inquest.settle(slot, findings)
        self._to_publish += sorted(state.publishing) + self._ledger.take_complete()
        state.publishing.clear()
        return is_explained

    def _check_slots(self) -> None:
        """End ranks whose loop stands still: a hang looks like life to everything but its own counter."""
        now = time.monotonic()
        if now - self._looked_at > _ABSENCE_S:
            self._slots.excuse(now - self._looked_at, now)
        self._looked_at = now
        for slot, state in enumerate(self._slots):
            limit_s = self._stall_timeout_s if state.capacity else self._start_timeout_s
            silent = self._replicas.silent_slots(slot, now)
            if silent is not None:
                reason = (
                    "other ranks of its replica lost it" if silent else "the replica's ranks lost each other"
                )
                self._bury_replica(slot, silent, reason)
            elif state.is_live and self._stands_still(slot, now, limit_s):
                mates = self._replicas.slots_of(slot)
                # Ranks of a replica wait for each other, so all stand still, some a step longer than others;
                # one that answers waits for one that does not.
                still = [mate for mate in mates if self._stands_still(mate, now, limit_s / 2)]
                mute = [mate for mate in still if now - self._slots[mate].heard_at > _SILENCE_S]
                self._bury_replica(slot, mute or still, f"its loop stood still for {limit_s:.0f} s")

    def _stands_still(self, slot: int, now: float, limit_s: float) -> bool:
        return now - self._slots[slot].moved_at > limit_s and not self._replicas.has_lost_peer(slot)

    def _has_stopped(self) -> bool:
        live = self._slots.live
        if self._stop is StopRequest.DRAIN:
            if all(state.is_drained for state in live):
                self._stop = StopRequest.NOW
            return False
        self._stop_seen_at = self._stop_seen_at or time.monotonic()
        # A rank that does not answer has written its rows all the same; only the disk's word is missing.
        is_late = time.monotonic() - self._stop_seen_at > _STOP_PATIENCE_S
        return is_late or all(state.is_stopped for state in live)

    def _count_rows(self) -> RowCounts:
        ledger = self._ledger
        return RowCounts(
            num_read=self._num_rows_before + ledger.num_read,
            num_ok=self._num_rows_before - self._num_errors_before + ledger.num_ok,
            num_error=self._num_errors_before + ledger.num_error,
            num_in_flight=ledger.num_in_flight,
            num_unleased=ledger.num_unleased,
        )

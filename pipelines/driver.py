"""The driver: plan, lease, collect, commit, until every shard has its part.

Owns the loop and what happens when a rank dies, hangs or cannot start. Rows never pass through it: it
hands out row numbers and takes in counts. It must not know what a rank is made of: it speaks to a
``Fleet``.
"""

from __future__ import annotations

import enum
import logging
import math
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from engine.errors import ConfigError
from pipelines.commits import try_read_commit
from pipelines.deaths import DeathLog
from pipelines.leasing import RankSpeeds, choose_leases
from pipelines.ledger import Ledger
from pipelines.manifest import OutputFolder, Tally
from pipelines.metrics import MetricsListener, RowCounts, RunWatch
from pipelines.plan import Plan
from pipelines.rank_protocol import Fleet, Lease, Orders, RankDied, RankReport
from pipelines.replicas import Replicas
from pipelines.report import RunRecord, read_status
from pipelines.report_page import write_reports
from pipelines.row_costs import RowCosts, estimate_costs
from pipelines.schema import FinishedRow
from pipelines.sink import (
    JournalState,
    JournalWriter,
    read_journal_state,
    read_lease_state,
    read_shard_state,
)
from pipelines.source import RowReader

logger = logging.getLogger(__name__)

MAX_BARREN_DEATHS = 3
"""A replica that died so often in a row without finishing a row is given up."""

MAX_DEATHS_OF_SUSPECTS = 8
"""The same of replicas that were given suspects, where a row may be to blame."""

_CRASH = (
    "ranks died again and again with this row in flight, at last where one had died with it before, or with "
    "no other beside it"
)
_WAIT_S = 0.25
_STOP_PATIENCE_S = 1.0
_PLACE_PATIENCE_S = 10.0
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


@dataclass(slots=True)
class _Slot:
    capacity: int = 0
    is_live: bool = False
    is_given_up: bool = False
    has_finished_rows: bool = False
    num_barren_deaths: int = 0
    num_deaths_of_suspects: int = 0
    num_turns: int = -1
    moved_at: float = 0.0
    lost_at: float = -math.inf
    publishing: set[int] = field(default_factory=set)
    is_preparing: bool = False
    is_stopped: bool = False
    is_drained: bool = False
    node: str = ""
    device: str = ""


class Driver:
    """One run over a plan, or ``shards`` of it. ``stall_timeout_s``: how long a step loop may stand still.

    Slots without a place wait for one. Fewer than ``min_ranks`` ranks with a place for ``place_timeout_s``
    end the run: another one may find more.

    ``capacity`` is how many rows a rank runs at once, as far as is known before one says so. More than
    ``max_errors`` error rows end the run.
    ``cost_per_rank_hour`` and ``max_error_rate`` are for the report; ``on_metrics`` is told every line of
    ``pipelines.metrics``.
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
        self._slots = [_Slot() for _ in range(fleet.num_slots)]
        self._replicas = Replicas(fleet.ranks_per_replica)
        self._min_ranks, self._place_timeout_s = min_ranks, place_timeout_s
        self._enough_at = time.monotonic()
        self._shards = plan.shards if shards is None else plan.shards[shards.start : shards.stop]
        self._is_whole = shards is None
        self._to_publish: list[int] = []
        self._stop = StopRequest.NONE
        self._stop_seen_at = 0.0
        committed = self._read_commits()
        self._num_rows_before = sum(tally.num_rows for tally in committed.values())
        self._num_errors_before = sum(tally.num_error for tally in committed.values())
        self._num_shards_left = len(self._shards) - len(committed)
        self._clean(committed)
        missing = [shard for shard in self._shards if shard.index not in committed]
        resumed = {
            shard.index: read_shard_state(folder, plan, shard.index)
            for shard in missing
            if folder.shard_journals(shard.index).is_dir()
        }
        self._deaths = DeathLog(folder, plan, run)
        self._ledger = Ledger(missing, resumed, self._deaths.read())
        self._speeds = RankSpeeds()
        self._num_lanes = fleet.num_slots * capacity
        self._has_costs = False
        self._max_errors = max_errors
        num_rows = sum(shard.num_rows for shard in self._shards)
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

    def _read_commits(self) -> dict[int, Tally]:
        found = {
            shard.index: try_read_commit(self._folder, self._plan, shard.index) for shard in self._shards
        }
        return {index: tally for index, tally in found.items() if tally is not None}

    def _clean(self, committed: Mapping[int, Tally]) -> None:
        """Remove what earlier runs left: half-written parts, and journals of published shards."""
        ours = {f"{shard.index:05d}" for shard in self._shards}
        for leftover in self._folder.temporary.iterdir():
            # Drivers of other shards may be at work: what names none of ours may be theirs.
            if self._is_whole or leftover.name.split(".")[0] in ours:
                leftover.unlink(missing_ok=True)
        for journals in self._folder.journals.iterdir():
            if int(journals.name) in committed:
                shutil.rmtree(journals, ignore_errors=True)

    def _loop(self) -> Outcome:
        self._to_publish += self._ledger.take_complete()
        self._enough_at = time.monotonic()
        while self._num_shards_left:
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
        if sum(state.is_live for state in self._slots) >= self._min_ranks:
            self._enough_at = now
        elif now - self._enough_at > self._place_timeout_s:
            logger.error("there was no place for %d ranks in %.0f s", self._min_ranks, self._place_timeout_s)
            self.request_stop(StopRequest.NOW)

    def _start(self, slot: int) -> None:
        state = self._slots[slot]
        state.is_live, state.capacity, state.num_turns = True, 0, -1
        state.has_finished_rows = state.is_preparing = state.is_stopped = state.is_drained = False
        state.node = state.device = ""
        self._speeds.begin(slot)
        state.moved_at = time.monotonic()
        self._watch.start_rank(slot)
        self._fleet.start(slot)

    def _collect(self, slot: int, report: RankReport) -> None:
        if report.refused is not None:
            raise ConfigError(report.refused)
        if report.broken is not None:
            raise JobFailed(report.broken)
        state = self._slots[slot]
        state.node = report.node
        if report.device != state.device:
            self._check_device(slot, report.device)
            state.device = report.device
        if report.num_turns != state.num_turns:
            state.num_turns, state.moved_at = report.num_turns, time.monotonic()
        if report.capacity and not state.capacity:
            self._record.add_rank(report.environment, report.engine_settings)
            self._watch.save()  # before the rank has a row: what it will answer can be told apart by this
        state.capacity = report.capacity
        state.is_stopped, state.is_drained = report.is_stopped, report.is_drained
        for lease in report.leases:
            self._ledger.record(lease)
            if lease.num_ok + lease.num_error:
                state.has_finished_rows, state.num_barren_deaths, state.num_deaths_of_suspects = True, 0, 0
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

    def _check_device(self, slot: int, device: str) -> None:
        """One rank a GPU: two on one would each believe that its memory is theirs."""
        for other, state in enumerate(self._slots):
            if device and other != slot and state.is_live and state.device == device:
                raise ConfigError(f"ranks {other} and {slot} were both given the GPU {device}")

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
        capacities = {
            s: state.capacity for s, state in enumerate(self._slots) if state.is_live and state.capacity
        }
        now = time.monotonic()
        # A rank that died lately will be followed by another in its place.
        starting = [
            s
            for s, state in enumerate(self._slots)
            if not state.is_given_up
            and (not state.capacity if state.is_live else now - state.lost_at < _PLACE_PATIENCE_S)
        ]
        weights = self._speeds.weights(capacities)
        return choose_leases(self._ledger, slot, capacities, starting, weights)

    @property
    def _is_time_to_estimate(self) -> bool:
        """Once every rank builds its engine; a rank that is ready does not wait for a late one."""
        if self._has_costs or not self._ledger.num_unleased:
            return False
        live = [state for state in self._slots if state.is_live]
        return bool(live) and (all(s.is_preparing for s in live) or any(s.capacity for s in live))

    def _estimate_costs(self) -> None:
        """Read every prompt that is left once, so that rows can be leased in the order of their length.

        It happens while the ranks build their engines; a stop request ends it.
        """
        columns = self._plan.contract.render_columns
        reader = RowReader(self._plan.root, self._plan.kind, self._plan.files, columns, batch_rows=256)
        costs: dict[int, RowCosts] = {}
        for shard in self._ledger.missing_shards():
            if self._stop:
                return
            costs[shard.index] = estimate_costs(reader, self._plan, shard)
        reader.close()
        self._ledger.set_costs(costs, num_lanes=self._num_lanes)
        self._has_costs = True

    def _take_death(self, slot: int, death: RankDied) -> None:
        if death.has_lost_peer:
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
        self._replicas.forget(slot)
        leases = {mate: self._ledger.leases_of(mate) for mate in mates}
        found = {
            lease.lease_id: read_lease_state(
                self._plan, self._folder.journal_file(lease.shard_index, self._run, lease.lease_id)
            )
            for own in leases.values()
            for lease in own
        }
        num_suspects = sum(len(found[lease.lease_id].suspects) for mate in culprits for lease in leases[mate])
        # Where nobody knows which rank it was, no row is to blame but one that was alone on all of them.
        may_blame = len(culprits) == 1 or num_suspects == 1
        # A replica that was given nothing says little of its slots.
        is_ready = all(state.capacity for state in states)
        is_barren = not any(state.has_finished_rows for state in states) and (bool(found) or not is_ready)
        is_barren &= not any(journaled.finished for journaled in found.values())
        is_explained = False
        for mate in mates:
            is_culprit = mate in culprits
            told = reason if is_culprit or not culprits else f"rank {culprits[0]} of its replica died"
            is_explained |= self._bury(mate, told, found, is_culprit=is_culprit, may_blame=may_blame)
        # What dies of its first step may be broken itself, whoever was there.
        is_explained &= any(found[lease.lease_id].num_steps for own in leases.values() for lease in own)
        has_suspects = any(lease.is_of_suspects for own in leases.values() for lease in own)
        for state in states:
            if is_explained or not is_barren:
                state.num_barren_deaths = state.num_deaths_of_suspects = 0
            elif has_suspects:
                state.num_deaths_of_suspects += 1
            else:
                state.num_barren_deaths += 1
        if any(
            state.num_barren_deaths >= MAX_BARREN_DEATHS
            or state.num_deaths_of_suspects >= MAX_DEATHS_OF_SUSPECTS
            for state in states
        ):
            logger.error("rank %d died again and again without finishing a row: given up", slot)
            for state in states:
                state.is_given_up = True
            if all(other.is_given_up for other in self._slots):
                raise JobFailed(f"no rank is left; the last one died of: {reason}")

    def _bury(
        self,
        slot: int,
        reason: str,
        found: Mapping[int, JournalState],
        *,
        is_culprit: bool,
        may_blame: bool,
    ) -> bool:
        """Learn from the journals of a dead rank's leases what it had done, and give the rest to others.

        Whether one of its rows was to blame, and is done with.
        """
        logger.warning("rank %d died: %s", slot, reason)
        state = self._slots[slot]
        state.is_live, state.capacity, state.device = False, 0, ""
        state.lost_at = time.monotonic()
        self._watch.lose_rank(slot, node=state.node, reason=reason)
        self._watch.save()  # before its rows are marked by it
        leases = self._ledger.leases_of(slot)
        self._watch.note_rows_lost(slot, sum(len(found[lease.lease_id].suspects) for lease in leases))
        if not is_culprit:
            for lease in leases:
                found[lease.lease_id].started.clear()
        guilty = self._ledger.lose_rank(slot, found, may_blame=may_blame)
        if guilty is None:
            for lease in leases:
                self._deaths.add(lease.shard_index, found[lease.lease_id].tokens_of_suspects)
        else:
            self._quarantine(*guilty)
        self._to_publish += sorted(state.publishing) + self._ledger.take_complete()
        state.publishing.clear()
        return guilty is not None

    def _quarantine(self, lease: Lease, row: int) -> None:
        shard = self._plan.shards[lease.shard_index]
        lease_id = self._ledger.take_lease_id()
        with JournalWriter(self._folder, self._plan, shard.index, self._run, lease_id) as journal:
            journal.finish([FinishedRow(row=row, error="engine_crash", error_message=_CRASH)])
        logger.error("row %s killed a rank, and not for the first time: quarantined", shard.row_id(row))
        self._ledger.quarantine(lease)

    def _check_slots(self) -> None:
        """End ranks whose loop stands still: a hang looks like life to everything but its own counter."""
        now = time.monotonic()
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
                still = [mate for mate in mates if self._stands_still(mate, now, limit_s)]
                self._bury_replica(slot, still, f"its loop stood still for {limit_s:.0f} s")

    def _stands_still(self, slot: int, now: float, limit_s: float) -> bool:
        return now - self._slots[slot].moved_at > limit_s and not self._replicas.has_lost_peer(slot)

    def _has_stopped(self) -> bool:
        live = [state for state in self._slots if state.is_live]
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

"""What the death of a replica teaches: read off its journals, entered in the ledger, noted for later runs.

Owns whose rows are suspects of a death, and the error row of one that is to blame; which one is,
``pipelines.suspects`` knows. It must not know processes, nor what becomes of the replica's slots.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from pipelines.deaths import DeathLog
from pipelines.ledger import Ledger
from pipelines.manifest import OutputFolder
from pipelines.plan import Plan
from pipelines.rank_protocol import Lease
from pipelines.schema import FinishedRow
from pipelines.sink import JournalState, JournalWriter, read_lease_state

logger = logging.getLogger(__name__)

_CRASH = (
    "ranks died again and again with this row in flight, at last where one had died with it before, or with "
    "no other beside it"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What a dead replica left: ``leases`` by slot, ``journals`` by a lease's number.

    Only rows in flight on the slots of ``culprits`` are suspects.
    """

    culprits: Collection[int]
    leases: Mapping[int, Sequence[Lease]]
    journals: Mapping[int, JournalState]

    def num_in_flight(self, slot: int) -> int:
        """Rows that were in flight on the rank of a slot."""
        return sum(len(self.journals[lease.lease_id].suspects) for lease in self.leases[slot])

    @property
    def may_blame(self) -> bool:
        """Whether a row can be to blame. If any of several ranks may be, only one that was alone on them."""
        return len(self.culprits) == 1 or sum(map(self.num_in_flight, self.culprits)) == 1

    @property
    def has_leases(self) -> bool:
        """Whether the replica held any row."""
        return bool(self.journals)

    @property
    def has_finished_rows(self) -> bool:
        """Whether any row of the leases that it held was finished."""
        return any(journal.finished for journal in self.journals.values())

    @property
    def has_stepped(self) -> bool:
        """Whether it died of another step than its first."""
        return any(journal.num_steps for journal in self.journals.values())

    @property
    def had_suspects(self) -> bool:
        """Whether it was trying rows again that were in flight at a death before."""
        return any(lease.is_of_suspects for own in self.leases.values() for lease in own)


class Inquest:
    """Of one run: every replica that dies is examined, then what each of its ranks held is settled."""

    def __init__(self, folder: OutputFolder, plan: Plan, run: int, ledger: Ledger, deaths: DeathLog) -> None:
        self._folder, self._plan, self._run = folder, plan, run
        self._ledger, self._deaths = ledger, deaths

    def examine(self, slots: Iterable[int], culprits: Collection[int]) -> Findings:
        """Read what the ranks of these slots, dead now, had done of what they held."""
        leases = {slot: self._ledger.leases_of(slot) for slot in slots}
        journals = {lease.lease_id: self._read(lease) for own in leases.values() for lease in own}
        return Findings(culprits=culprits, leases=leases, journals=journals)

    def settle(self, slot: int, findings: Findings) -> bool:
        """Have the rest of what a rank held given to others; whether a row was to blame, and is done with."""
        leases = findings.leases[slot]
        journals = {lease.lease_id: findings.journals[lease.lease_id] for lease in leases}
        if slot not in findings.culprits:
            journals = {lease_id: replace(journal, started=set()) for lease_id, journal in journals.items()}
        guilty = self._ledger.lose_rank(slot, journals, may_blame=findings.may_blame)
        if guilty is not None:
            self._quarantine(*guilty)
            return True
        for lease in leases:
            self._deaths.add(lease.shard_index, journals[lease.lease_id].tokens_of_suspects)
        return False

    def _read(self, lease: Lease) -> JournalState:
        path = self._folder.journal_file(lease.shard_index, self._run, lease.lease_id)
        return read_lease_state(self._plan, path)

    def _quarantine(self, lease: Lease, row: int) -> None:
        shard = self._plan.shards[lease.shard_index]
        lease_id = self._ledger.take_lease_id()
        with JournalWriter(self._folder, self._plan, shard.index, self._run, lease_id) as journal:
            journal.finish([FinishedRow(row=row, error="engine_crash", error_message=_CRASH)])
        logger.error("row %s killed a rank, and not for the first time: quarantined", shard.row_id(row))
        self._ledger.quarantine(lease)

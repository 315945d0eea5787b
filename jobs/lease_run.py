"""One lease while a rank works on it: where its rows come from, where answers go, how far it is.

Owns those counts. It must not know engines, nor threads: its rank says who may touch it when.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from jobs.lease_reader import LeaseReader
from pipelines.rank_protocol import Lease, LeaseReport
from pipelines.schema import FinishedRow
from pipelines.sink import JournalWriter


@dataclass(slots=True, eq=False)
class LeaseRun:
    """``finished`` rows wait to be journaled and are not counted yet; ``is_done``: the journal is closed."""

    lease: Lease
    journal: JournalWriter
    rows: LeaseReader
    num_read: int = 0
    num_ok: int = 0
    num_error: int = 0
    is_done: bool = False
    finished: list[FinishedRow] = field(default_factory=list)

    @property
    def is_read(self) -> bool:
        """Whether every row was taken."""
        return self.num_read == self.lease.num_rows

    @property
    def num_left(self) -> int:
        """Rows that are not journaled yet."""
        return self.lease.num_rows - self.num_ok - self.num_error

    def report(self) -> LeaseReport:
        """How far it is, for the driver."""
        return LeaseReport(
            lease_id=self.lease.lease_id,
            num_read=self.num_read,
            num_ok=self.num_ok,
            num_error=self.num_error,
            is_done=self.is_done,
        )

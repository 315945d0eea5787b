"""A death as its journals tell it: what was finished stays so, suspects are noted, who is guilty is an error row."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipelines.deaths import DeathLog
from pipelines.inquest import Inquest
from pipelines.ledger import Ledger
from pipelines.manifest import OutputFolder, check_folder, write_plan
from pipelines.plan import Plan
from pipelines.rank_protocol import Lease
from pipelines.schema import FinishedRow
from pipelines.sink import JournalWriter, read_shard_state
from tests.small_jobs import make_plan, write_prompts


class Job:
    """Four rows, and leases of them whose journals a test writes."""

    def __init__(self, path: Path) -> None:
        write_prompts(path / "in.parquet", [[1]] * 4)
        self.folder = OutputFolder(path / "out")
        self.plan: Plan = make_plan(path / "in.parquet")
        check_folder(self.folder, self.plan)
        write_plan(self.folder, self.plan)
        self.deaths = DeathLog(self.folder, self.plan, 1)
        self.ledger = Ledger(self.plan.shards, {})
        self.inquest = Inquest(self.folder, self.plan, 1, self.ledger, self.deaths)

    def work(self, lease: Lease | None, num_tokens: dict[int, int], finished: tuple[int, ...] = ()) -> None:
        """A rank's last step with a lease, in which its rows had so many tokens."""
        assert lease is not None
        journal = JournalWriter(
            self.folder, self.plan, 0, 1, lease.lease_id
        )  # nobody closes it after a death
        journal.start([*finished, *num_tokens])
        journal.finish([FinishedRow(row=row, error="x", error_message="x") for row in finished])
        journal.note_step(5, num_tokens)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def test_rows_in_flight_on_the_rank_that_died_are_suspects_and_those_of_its_mate_are_not(job: Job) -> None:
    job.work(job.ledger.try_lease(0, 2), {1: 7}, finished=(0,))
    job.work(job.ledger.try_lease(1, 2), {2: 8, 3: 9})
    findings = job.inquest.examine([0, 1], [0])
    assert (findings.num_in_flight(0), findings.num_in_flight(1)) == (1, 2)
    assert (findings.has_leases, findings.has_finished_rows, findings.has_stepped) == (True, True, True)
    assert not findings.had_suspects
    assert not job.inquest.settle(0, findings)
    assert not job.inquest.settle(1, findings)
    assert job.deaths.read() == {(0, 1): [7]}
    assert (job.ledger.num_error, job.ledger.num_unleased, job.ledger.num_in_flight) == (1, 3, 0)
    again = job.ledger.try_lease(0, 4)
    assert again is not None
    assert again.rows == [2, 3]


def test_a_row_that_kills_twice_becomes_an_error_row(job: Job) -> None:
    job.work(job.ledger.try_lease(0, 4), {0: 7, 1: 3, 2: 0, 3: 0})
    assert not job.inquest.settle(0, job.inquest.examine([0], [0]))
    (lease,) = job.ledger.try_lease_suspects(0, [0], 4)
    job.work(lease, {0: 7, 1: 8, 2: 8, 3: 8})
    findings = job.inquest.examine([0], [0])
    assert findings.had_suspects
    assert job.inquest.settle(0, findings)
    assert read_shard_state(job.folder, job.plan, 0).finished == {0: False}
    assert (job.ledger.num_error, job.ledger.num_unleased) == (1, 3)
    assert job.deaths.read() == {(0, 0): [7], (0, 1): [3], (0, 2): [0], (0, 3): [0]}, "of the first death"


@pytest.mark.parametrize(("num_rows", "is_guilty"), [(1, True), (2, False)])
def test_where_nobody_knows_which_rank_it_was_only_a_row_alone_on_them_is_to_blame(
    job: Job, num_rows: int, is_guilty: bool
) -> None:
    first = job.ledger.try_lease(0, 1)
    job.work(first, {0: 7})
    assert not job.inquest.settle(0, job.inquest.examine([0], [0]))
    (lease,) = job.ledger.try_lease_suspects(0, [0, 1], 4) or job.ledger.try_lease_suspects(1, [0, 1], 4)
    slot = 0 if lease in job.ledger.leases_of(0) else 1
    job.work(lease, {0: 7})
    other = job.ledger.try_lease(1 - slot, 1)
    job.work(other, {1: 2} if num_rows == 2 else {})
    findings = job.inquest.examine([0, 1], [0, 1])
    assert findings.may_blame is is_guilty
    assert job.inquest.settle(slot, findings) is is_guilty
    assert not job.inquest.settle(1 - slot, findings)


def test_a_replica_that_held_nothing_teaches_nothing(job: Job) -> None:
    findings = job.inquest.examine([0, 1], [])
    assert not job.inquest.settle(0, findings)
    assert (findings.has_leases, findings.has_stepped, findings.may_blame) == (False, False, False)
    assert job.deaths.read() == {}

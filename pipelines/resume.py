"""What earlier runs of a job left on disk, when another one begins: taken up, or swept away.

Owns telling the two apart. It must not know ranks, nor what is done with rows that are left.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from pipelines.commits import try_read_commit
from pipelines.manifest import OutputFolder, Tally
from pipelines.plan import Plan
from pipelines.sink import JournalState, read_shard_state
from pipelines.source import Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierWork:
    """``committed``: by number, the shards that have their part. ``missing`` are the others.

    ``journaled``: what journals already answer of those, where there are any.
    """

    committed: Mapping[int, Tally]
    missing: Sequence[Shard]
    journaled: Mapping[int, JournalState]

    @property
    def num_rows(self) -> int:
        """Rows of the committed shards."""
        return sum(tally.num_rows for tally in self.committed.values())

    @property
    def num_errors(self) -> int:
        """How many of those are error rows."""
        return sum(tally.num_error for tally in self.committed.values())


def take_up(folder: OutputFolder, plan: Plan, shards: Sequence[Shard], *, is_whole: bool) -> EarlierWork:
    """Find what is done of ``shards``, and remove what is of no use any more. ``is_whole``: they are all."""
    tallies = {shard.index: try_read_commit(folder, plan, shard.index) for shard in shards}
    committed = {index: tally for index, tally in tallies.items() if tally is not None}
    _remove_half_written(folder, None if is_whole else shards)
    _remove_journals(folder, committed)
    missing = [shard for shard in shards if shard.index not in committed]
    journaled = {
        shard.index: read_shard_state(folder, plan, shard.index)
        for shard in missing
        if folder.shard_journals(shard.index).is_dir()
    }
    return EarlierWork(committed=committed, missing=missing, journaled=journaled)


def _remove_half_written(folder: OutputFolder, shards: Sequence[Shard] | None) -> None:
    """Parts that nobody will finish: of these shards, or all."""
    ours = None if shards is None else {f"{shard.index:05d}" for shard in shards}
    for leftover in folder.temporary.iterdir():
        # Drivers of other shards may be at work: what names none of ours may be theirs.
        if ours is None or leftover.name.split(".")[0] in ours:
            leftover.unlink(missing_ok=True)


def _remove_journals(folder: OutputFolder, committed: Collection[int]) -> None:
    for journals in folder.journals.iterdir():
        if int(journals.name) in committed:
            shutil.rmtree(journals, ignore_errors=True)

"""A random sample of a job's committed answers, and the input rows that they answer.

Owns finding both again from the plan and the parts alone; it must not know engines, nor what the sample
is for.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from engine.errors import ConfigError
from pipelines.commits import try_read_commit
from pipelines.manifest import OutputFolder
from pipelines.plan import Plan
from pipelines.schema import STATUS_OK
from pipelines.source import RowReader, Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedRow:
    """One answered row: where it lies, and the digest of each of its samples."""

    shard: Shard
    row: int
    row_id: str
    digests: tuple[str, ...]


def sample_committed_rows(
    folder: OutputFolder, plan: Plan, max_num_rows: int, random_: random.Random
) -> tuple[list[CommittedRow], int]:
    """Up to ``max_num_rows`` committed ok rows in plan order, and how many there are to choose from.

    Only the parts that the sample falls into are read, and of them three columns. Raises
    ``ConfigError`` when no ok row is committed or a part does not hold what it was committed with.
    """
    if plan.parts.format != "parquet" or plan.parts.url is not None:
        where = f"to {plan.parts.url!r}" if plan.parts.url is not None else "there"
        raise ConfigError(
            f"verify reads the Parquet parts in an output folder; the job of {str(folder.path)!r} writes "
            f"{plan.parts.format} {where}, which it does not read again"
        )
    commits = [try_read_commit(folder, plan, shard.index) for shard in plan.shards]
    num_ok = [0 if tally is None else tally.num_ok for tally in commits]
    if not sum(num_ok):
        raise ConfigError(f"output folder {str(folder.path)!r} has no committed row that was answered")
    chosen = sorted(random_.sample(range(sum(num_ok)), min(max_num_rows, sum(num_ok))))
    sample: list[CommittedRow] = []
    first = 0
    for shard, count in zip(plan.shards, num_ok, strict=True):
        ordinals = [ordinal - first for ordinal in chosen if first <= ordinal < first + count]
        if ordinals:
            answered = _read_answered(folder.part_file(plan.part_name(shard.index)), plan, shard, count)
            sample += [answered[ordinal] for ordinal in ordinals]
        first += count
    return sample, sum(num_ok)


def _read_answered(path: Path, plan: Plan, shard: Shard, num_ok: int) -> list[CommittedRow]:
    prefix = plan.contract.prefix
    names = [prefix + name for name in ("row_id", "status", "output_digest")]
    try:
        table = pq.ParquetFile(path).read(columns=names)
        columns = [table.column(name).to_pylist() for name in names]
    except (pa.ArrowException, OSError, KeyError) as error:
        raise ConfigError(f"{str(path)!r} cannot be read: {error}") from error
    answered = []
    for row, (row_id, status, digest) in enumerate(zip(*columns, strict=True)):
        if row_id != shard.row_id(row):
            raise ConfigError(f"{str(path)!r} was changed: its row {row} is {row_id!r}")
        if status == STATUS_OK:
            digests = tuple(digest) if isinstance(digest, list) else (str(digest),)
            answered.append(CommittedRow(shard=shard, row=row, row_id=row_id, digests=digests))
    if len(answered) != num_ok:
        raise ConfigError(
            f"{str(path)!r} was changed: {num_ok} of its rows were answered, not {len(answered)}"
        )
    return answered


def read_input_rows(plan: Plan, rows: Sequence[CommittedRow]) -> list[pa.RecordBatch]:
    """The input row of each, as a batch of one row with the columns that a prompt is rendered from.

    Raises ``ConfigError`` when an input file is gone or is not the one that the plan saw, and
    ``InputUnreadable``.
    """
    reader = RowReader(plan.root, plan.kind, plan.files, plan.contract.render_columns)
    try:
        batches = []
        for row in rows:
            position = row.shard.start + row.row
            batches += list(reader.read(row.shard.path, position, position + 1))
    finally:
        reader.close()
    assert len(batches) == len(rows)
    return batches

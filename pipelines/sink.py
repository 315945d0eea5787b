"""Finished rows on their way out: journals that survive a kill, and parts that appear whole or not at all.

Owns the journal's format and the publishing of a shard's one part; it must not know who leased which
rows, or why.

A journal is a run of records, each ``length, crc32, kind, payload``. One writer appends; a record that
was cut short by a kill ends the journal for every reader. Beside it lies one record that is overwritten
before every step: how many tokens each row in flight has.
"""

from __future__ import annotations

import json
import os
import struct
import threading
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import pyarrow as pa
import pyarrow.compute as pc

from pipelines.column_types import conform
from pipelines.commits import commit_metadata, is_in_footer, publish_files, try_read_commit
from pipelines.lengths import count_lengths
from pipelines.manifest import OutputFolder, Tally, sync_folder, try_link
from pipelines.part_writer import write_jsonl, write_parquet, write_responses
from pipelines.plan import Plan
from pipelines.schema import NUM_PREEMPTIONS, ROW, STATUS_OK, STRING, FinishedRow
from pipelines.source import RowReader, Shard
from pipelines.suspects import NO_STEP_YET

_BATCH_ROWS = 1024
_FRAME = struct.Struct("<IIc")
_HEADER, _STARTED, _FINISHED, _TOKENS = b"H", b"S", b"F", b"T"
NOT_IN_STEP = -2
"""Instead of a number of tokens: a row that a step is without, which a death in that step says nothing of."""


class JournalWriter:
    """The journal of one lease attempt. Its file must not exist: an attempt has one writer, ever."""

    def __init__(self, folder: OutputFolder, plan: Plan, shard_index: int, run: int, lease_id: int) -> None:
        path = folder.journal_file(shard_index, run, lease_id)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND, 0o644)
        self._contract = plan.contract
        self._tokens_path = _tokens_file(path)
        self._tokens_descriptor = os.open(self._tokens_path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
        # Rows are appended by one thread and synced by others.
        self._sync_lock = threading.Lock()
        self._is_dirty = False
        self._is_closed = False
        header = {"fingerprint": plan.fingerprint, "shard": shard_index, "run": run, "lease": lease_id}
        self._append(_HEADER, json.dumps(header).encode())
        sync_folder(path.parent)

    def start(self, rows: Sequence[int]) -> None:
        """Note that these rows are being worked on: after a death they are the suspects."""
        self._append(_STARTED, struct.pack(f"<{len(rows)}i", *rows))

    def finish(self, rows: Sequence[FinishedRow]) -> None:
        """Append answers. They survive the death of the process now, of the machine after ``sync``."""
        self._append(_FINISHED, self._contract.to_batch(rows).serialize())

    def note_step(self, number: int, num_tokens: Mapping[int, int]) -> None:
        """Before a step that may end the process: how many tokens each row has that the engine holds.

        ``NOT_IN_STEP`` for a row that the step is without. ``number``: how many steps went well before it.
        """
        numbers = [number, *(number for pair in num_tokens.items() for number in pair)]
        record = _framed(_TOKENS, struct.pack(f"<{len(numbers)}i", *numbers))
        os.pwrite(self._tokens_descriptor, record, 0)

    def sync(self) -> None:
        """See what was appended to the disk, if anything was."""
        with self._sync_lock:
            if self._is_dirty and not self._is_closed:
                self._is_dirty = False
                os.fsync(self._descriptor)

    def close(self) -> None:
        """Sync and close."""
        self.sync()
        with self._sync_lock:
            if not self._is_closed:
                self._is_closed = True
                os.close(self._descriptor)
                os.close(self._tokens_descriptor)
                self._tokens_path.unlink(missing_ok=True)

    def __enter__(self) -> JournalWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _append(self, kind: bytes, payload: bytes | pa.Buffer) -> None:
        record = memoryview(_framed(kind, payload))
        while record:
            record = record[os.write(self._descriptor, record) :]
        self._is_dirty = True


def _framed(kind: bytes, payload: bytes | pa.Buffer) -> bytes:
    content = memoryview(payload)
    return _FRAME.pack(len(content), zlib.crc32(content, zlib.crc32(kind)), kind) + content


def _tokens_file(journal: Path) -> Path:
    return journal.with_suffix(".tokens")


@dataclass(slots=True)
class JournalState:
    """Which rows of a shard were started and which are finished (and whether each is an answer).

    ``num_tokens``: how many tokens rows in flight had when the last step began; None: nobody knows.
    ``num_steps``: how many steps the rank had behind it then.
    """

    started: set[int] = field(default_factory=set)
    finished: dict[int, bool] = field(default_factory=dict)
    num_tokens: dict[int, int] | None = None
    num_steps: int = 0

    @property
    def suspects(self) -> set[int]:
        """Rows that were in flight when the journal ended."""
        return self.started - self.finished.keys()

    @property
    def tokens_of_suspects(self) -> dict[int, int | None]:
        """How many tokens each of those had that the last step was not without.

        ``NO_STEP_YET``: it was being read and rendered.
        """
        known = self.num_tokens
        found = {row: None if known is None else known.get(row, NO_STEP_YET) for row in sorted(self.suspects)}
        return {row: num_tokens for row, num_tokens in found.items() if num_tokens != NOT_IN_STEP}


def read_journal_state(plan: Plan, path: Path, into: JournalState | None = None) -> JournalState:
    """What a journal says of its rows, without their content. A file that is not there says nothing."""
    state = into if into is not None else JournalState()
    for kind, payload in _records(plan, path):
        if kind == _STARTED:
            state.started.update(row for (row,) in struct.iter_unpack("<i", payload))
        elif kind == _FINISHED:
            batch = pa.ipc.read_record_batch(pa.py_buffer(payload), plan.contract.journal)
            outcomes = pc.equal(batch.column("status"), pa.scalar(STATUS_OK, STRING)).to_pylist()
            for row, is_ok in zip(batch.column(ROW).to_pylist(), outcomes, strict=True):
                state.finished.setdefault(row, is_ok)
    return state


def read_lease_state(plan: Plan, path: Path) -> JournalState:
    """What the journal of a lease says whose rank died, and how far its rows were then."""
    state = read_journal_state(plan, path)
    try:
        record = _tokens_file(path).read_bytes()
    except FileNotFoundError:
        return state
    if not record:  # the rank died before its first step
        state.num_tokens = {}
    elif len(record) >= _FRAME.size:
        length, checksum, kind = _FRAME.unpack_from(record)
        payload = record[_FRAME.size : _FRAME.size + length]  # behind it: what a longer record left
        if len(payload) == length and zlib.crc32(payload, zlib.crc32(kind)) == checksum:
            (state.num_steps,) = struct.unpack_from("<i", payload)
            state.num_tokens = dict(struct.iter_unpack("<ii", payload[4:]))
    return state


def read_shard_state(folder: OutputFolder, plan: Plan, shard_index: int) -> JournalState:
    """What all journals of a shard say together."""
    state = JournalState()
    for path in _journal_files(folder, shard_index):
        read_journal_state(plan, path, state)
    return state


def read_shard_rows(folder: OutputFolder, plan: Plan, shard_index: int) -> pa.Table:
    """The finished rows of a shard in row order, each once: of two answers to a row the first journal's."""
    schema = plan.contract.journal
    seen: set[int] = set()
    batches: list[pa.RecordBatch] = []
    for path in _journal_files(folder, shard_index):
        for kind, payload in _records(plan, path):
            if kind != _FINISHED:
                continue
            batch = pa.ipc.read_record_batch(pa.py_buffer(payload), schema)
            fresh = [i for i, row in enumerate(batch.column(ROW).to_pylist()) if row not in seen]
            seen.update(batch.column(ROW).to_pylist())
            batches.append(batch if len(fresh) == batch.num_rows else batch.take(pa.array(fresh, pa.int32())))
    return pa.Table.from_batches(batches, schema).combine_chunks().sort_by(ROW)


def _journal_files(folder: OutputFolder, shard_index: int) -> list[Path]:
    return sorted(folder.shard_journals(shard_index).glob("*.journal"))


def _records(plan: Plan, path: Path) -> Iterator[tuple[bytes, bytes]]:
    """The whole records of one journal of this plan; reading ends at the first that is not whole."""
    try:
        file = open(path, "rb")  # noqa: SIM115 (the with below closes it)
    except FileNotFoundError:
        return
    with file:
        is_ours = False
        while len(frame := file.read(_FRAME.size)) == _FRAME.size:
            length, checksum, kind = _FRAME.unpack(frame)
            payload = file.read(length)
            if len(payload) != length or zlib.crc32(payload, zlib.crc32(kind)) != checksum:
                return
            if kind == _HEADER:
                is_ours = json.loads(payload)["fingerprint"] == plan.fingerprint
            elif is_ours:
                yield kind, payload


def publish_shard(folder: OutputFolder, plan: Plan, shard: Shard, reader: RowReader, attempt: str) -> Tally:
    """Assemble a shard's part in input order and give it its name; returns the published part's tally.

    ``reader`` yields the pass-through columns. ``attempt`` names the temporary files and must be unique.
    If somebody published the shard already, theirs stands and its tally is returned.
    """
    published = try_read_commit(folder, plan, shard.index)
    if published is not None:
        return published
    answers = read_shard_rows(folder, plan, shard.index)
    assert answers.column(ROW).to_pylist() == list(range(shard.num_rows)), (
        f"shard {shard.index} is not finished"
    )
    tally = count_rows(answers)
    batches = _assemble(plan, shard, reader, answers)
    if is_in_footer(plan):
        return _publish_parquet(folder, plan, shard, batches, tally, attempt)
    name = plan.part_name(shard.index)
    files = {name: f"{shard.index:05d}.{attempt}"}
    path = folder.temporary / files[name]
    if plan.parts.format == "parquet":
        write_parquet(path, _part_schema(plan, shard, tally), batches, plan.parts.row_group_rows)
    elif plan.parts.format == "jsonl":
        write_jsonl(path, batches)
    else:
        errors = f"{files[name]}.errors"
        write_responses(path, folder.temporary / errors, batches)
        if tally.num_error:
            files = {plan.errors_name(shard.index): errors, **files}
        else:
            (folder.temporary / errors).unlink()
    return publish_files(folder, plan, shard.index, tally, files)


def _publish_parquet(
    folder: OutputFolder,
    plan: Plan,
    shard: Shard,
    batches: Iterator[pa.RecordBatch],
    tally: Tally,
    attempt: str,
) -> Tally:
    """The part's footer is its commit record: one link publishes both."""
    final = folder.part_file(plan.part_name(shard.index))
    final.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.temporary / f"{shard.index:05d}.{attempt}"
    write_parquet(temporary, _part_schema(plan, shard, tally), batches, plan.parts.row_group_rows)
    if try_link(temporary, final):
        return tally
    published = try_read_commit(folder, plan, shard.index)
    assert published is not None, f"{final} vanished"
    return published


def _part_schema(plan: Plan, shard: Shard, tally: Tally) -> pa.Schema:
    schema = plan.contract.output
    return schema.with_metadata({**(schema.metadata or {}), **commit_metadata(plan, shard.index, tally)})


def _assemble(plan: Plan, shard: Shard, reader: RowReader, answers: pa.Table) -> Iterator[pa.RecordBatch]:
    contract = plan.contract
    row = 0
    for passed in _read_passed(plan, shard, reader):
        part = answers.slice(row, passed.num_rows).drop_columns([ROW, NUM_PREEMPTIONS]).combine_chunks()
        ids = pa.array([shard.row_id(row + i) for i in range(passed.num_rows)], STRING)
        ours = [column.combine_chunks() for column in part.columns]
        arrays = [*conform(passed, contract.passed), ids, *(_as_array(column) for column in ours)]
        yield pa.RecordBatch.from_arrays(arrays, schema=contract.output)
        row += passed.num_rows


def _read_passed(plan: Plan, shard: Shard, reader: RowReader) -> Iterator[pa.RecordBatch]:
    """The shard's pass-through columns; the input is not read where there are none."""
    if plan.contract.passed.names:
        yield from reader.read(shard.path, shard.start, shard.stop)
        return
    nothing = pa.array([{}] * _BATCH_ROWS, pa.struct([]))
    for start in range(0, shard.num_rows, _BATCH_ROWS):
        num_rows = min(_BATCH_ROWS, shard.num_rows - start)
        yield pa.RecordBatch.from_struct_array(nothing.slice(0, num_rows))


def _as_array(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if isinstance(column, pa.ChunkedArray) else column


def count_rows(answers: pa.Table) -> Tally:
    """Count a table of journal rows."""
    errors = answers.column("error").drop_null().value_counts().to_pylist()
    completion_tokens = answers.column("num_completion_tokens")
    if pa.types.is_list(completion_tokens.type):
        completion_tokens = pc.list_flatten(completion_tokens)
    return Tally(
        num_ok=answers.num_rows - answers.column("error").drop_null().length(),
        errors={
            item["values"]: item["counts"] for item in sorted(errors, key=lambda item: str(item["values"]))
        },
        num_prompt_tokens=pc.sum(answers.column("num_prompt_tokens")).as_py() or 0,
        num_completion_tokens=pc.sum(completion_tokens).as_py() or 0,
        num_cached_tokens=pc.sum(answers.column("num_cached_tokens")).as_py() or 0,
        num_preemptions=pc.sum(answers.column(NUM_PREEMPTIONS)).as_py() or 0,
        most_row_preemptions=pc.max(answers.column(NUM_PREEMPTIONS)).as_py() or 0,
        prompt_lengths=count_lengths(answers.column("num_prompt_tokens")),
        completion_lengths=count_lengths(completion_tokens),
    )

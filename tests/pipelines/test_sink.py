"""Journals under every kind of tear, and parts that appear whole or not at all."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from engine import Completion, FinishReason, RequestOutput
from pipelines.manifest import OutputFolder, write_plan
from pipelines.plan import Plan
from pipelines.schema import FinishedRow
from pipelines.sink import JournalWriter, publish_shard, read_journal_state, read_shard_rows, read_shard_state
from pipelines.source import RowReader
from tests.small_jobs import make_plan, write_prompts


def answer(row: int, text: str) -> FinishedRow:
    completion = Completion(
        index=0, token_ids=(row,), text=text, finish_reason=FinishReason.STOP, logprobs=(-0.5,)
    )
    return FinishedRow(
        row=row, output=RequestOutput(request_id=str(row), completions=(completion,), num_prompt_tokens=1)
    )


@pytest.fixture
def folder(tmp_path: Path) -> OutputFolder:
    return OutputFolder(tmp_path / "out")


@pytest.fixture
def plan(tmp_path: Path, folder: OutputFolder) -> Plan:
    write_prompts(tmp_path / "in.parquet", [[i] for i in range(6)], tag=[f"t{i}" for i in range(6)])
    plan = make_plan(tmp_path / "in.parquet")
    write_plan(folder, plan)
    return plan


def reader(plan: Plan) -> RowReader:
    return RowReader(plan.root, plan.kind, plan.files, plan.contract.passed.names, batch_rows=4)


def test_what_is_appended_can_be_read_before_any_sync(folder: OutputFolder, plan: Plan) -> None:
    journal = JournalWriter(folder, plan, 0, 1, 1)
    journal.start([3, 4, 5])
    journal.finish([answer(4, "four"), FinishedRow(row=3, error="empty_prompt", error_message="m")])
    state = read_shard_state(folder, plan, 0)
    assert (state.started, state.finished) == ({3, 4, 5}, {4: True, 3: False})
    rows = read_shard_rows(folder, plan, 0)
    assert rows.column("row").to_pylist() == [3, 4]
    assert rows.column("completion").to_pylist() == [None, "four"]
    journal.close()


def test_an_attempt_has_one_writer(folder: OutputFolder, plan: Plan) -> None:
    with JournalWriter(folder, plan, 0, 1, 1), pytest.raises(FileExistsError):
        JournalWriter(folder, plan, 0, 1, 1)


def test_a_torn_tail_ends_a_journal_wherever_it_is_torn(folder: OutputFolder, plan: Plan) -> None:
    path = folder.journal_file(0, 1, 1)
    ends = []
    with JournalWriter(folder, plan, 0, 1, 1) as journal:
        for row in range(3):
            journal.finish([answer(row, f"row {row}")])
            ends.append(path.stat().st_size)
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        state = read_journal_state(plan, path)
        assert len(state.finished) == sum(1 for end in ends if end <= size), size


def test_a_record_that_was_damaged_ends_a_journal(folder: OutputFolder, plan: Plan) -> None:
    seed = 5
    print("seed", seed)
    random_ = random.Random(seed)
    path = folder.journal_file(0, 1, 1)
    with JournalWriter(folder, plan, 0, 1, 1) as journal:
        journal.finish([answer(0, "zero")])
        end = path.stat().st_size
        journal.finish([answer(1, "one")])
    whole = path.read_bytes()
    for _ in range(50):
        position = random_.randrange(end, len(whole))
        damaged = bytearray(whole)
        damaged[position] ^= 1 << random_.randrange(8)
        path.write_bytes(damaged)
        assert read_journal_state(plan, path).finished == {0: True}


def test_a_journal_of_another_plan_is_not_read(tmp_path: Path, folder: OutputFolder, plan: Plan) -> None:
    other = make_plan(tmp_path / "in.parquet", temperature=0.9)
    with JournalWriter(folder, other, 0, 1, 1) as journal:
        journal.finish([answer(0, "other")])
    assert read_shard_state(folder, plan, 0).finished == {}


def test_a_part_is_in_input_order_with_every_column(folder: OutputFolder, plan: Plan) -> None:
    with JournalWriter(folder, plan, 0, 1, 1) as journal:
        journal.finish([answer(row, f"a{row}") for row in (5, 1, 3)])
    with JournalWriter(folder, plan, 0, 1, 2) as journal:
        journal.finish([answer(row, f"b{row}") for row in (3, 2, 0, 4)])
    tally = publish_shard(folder, plan, plan.shards[0], reader(plan), "x")
    part = pq.read_table(folder.part_file(plan.part_name(0)))
    assert part.schema == plan.contract.output
    assert part.column("tag").to_pylist() == [f"t{i}" for i in range(6)]
    assert part.column("row_id").to_pylist() == [f"in.parquet#{i}" for i in range(6)]
    # Row 3 was answered twice: the first journal's answer stands, once.
    assert part.column("completion").to_pylist() == ["b0", "a1", "b2", "a3", "b4", "a5"]
    assert (tally.num_ok, tally.num_error, tally.num_completion_tokens) == (6, 0, 6)
    assert not list(folder.temporary.iterdir())


def test_a_late_publisher_changes_nothing(
    folder: OutputFolder, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    with JournalWriter(folder, plan, 0, 1, 1) as journal:
        journal.finish([answer(row, "first") for row in range(6)])
    link = os.link

    def link_second(temporary: Path, final: Path) -> None:
        # Somebody else publishes between our check and our link.
        monkeypatch.setattr(os, "link", link)
        publish_shard(folder, plan, plan.shards[0], reader(plan), "other")
        link(temporary, final)

    monkeypatch.setattr(os, "link", link_second)
    tally = publish_shard(folder, plan, plan.shards[0], reader(plan), "x")
    inode = folder.part_file(plan.part_name(0)).stat().st_ino
    assert publish_shard(folder, plan, plan.shards[0], reader(plan), "y") == tally
    assert folder.part_file(plan.part_name(0)).stat().st_ino == inode
    assert [p.name for p in folder.path.glob("*.parquet")] == ["part-00000-of-00001.parquet"]
    assert not list(folder.temporary.iterdir())


def test_an_unfinished_shard_is_not_published(folder: OutputFolder, plan: Plan) -> None:
    with JournalWriter(folder, plan, 0, 1, 1) as journal:
        journal.finish([answer(row, "x") for row in range(5)])
    with pytest.raises(AssertionError, match="not finished"):
        publish_shard(folder, plan, plan.shards[0], reader(plan), "x")
    assert not list(folder.path.glob("*.parquet"))


def test_an_empty_shard_is_an_empty_part(tmp_path: Path, folder: OutputFolder) -> None:
    write_prompts(tmp_path / "empty.parquet", [], tag=pa.array([], pa.string()))
    plan = make_plan(tmp_path / "empty.parquet")
    write_plan(folder, plan)
    tally = publish_shard(folder, plan, plan.shards[0], reader(plan), "x")
    part = pq.read_table(folder.part_file(plan.part_name(0)))
    assert (part.num_rows, part.schema, tally.num_rows) == (0, plan.contract.output, 0)

"""Small inputs that broke other systems, each by name: real sources, sinks, driver and ranks, a fake engine."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from engine import SamplingParams
from pipelines.chat import ChatOptions
from pipelines.driver import Driver, Outcome
from pipelines.manifest import OutputFolder
from pipelines.prompt import build_renderer
from pipelines.rank_protocol import Orders, RankDied
from pipelines.report import read_status
from tests.small_jobs import check_answers, make_plan, random_prompts, read_output, start_run, write_prompts


@pytest.fixture
def folder(tmp_path: Path) -> OutputFolder:
    return OutputFolder(tmp_path / "out")


def interrupt_when(driver: Driver, is_time: Any) -> None:
    """End the driver as a kill does, between two exchanges: nothing of it runs on."""
    orders_for = driver._orders_for

    def orders_or_death(slot: int) -> Orders:
        if is_time():
            raise KeyboardInterrupt
        return orders_for(slot)

    driver._orders_for = orders_or_death  # type: ignore[method-assign]


def test_c01_repeated_prompts_do_not_vanish_on_resume(tmp_path: Path, folder: OutputFolder) -> None:
    prompts: list[list[int] | None] = [[4, 2]] * 3
    write_prompts(tmp_path / "in.parquet", prompts)
    plan = make_plan(tmp_path / "in.parquet")
    driver, _ = start_run(folder, plan, num_slots=1, capacity=1)
    interrupt_when(driver, lambda: driver._ledger.num_ok == 1)
    with pytest.raises(KeyboardInterrupt):
        driver.run()
    assert read_status(folder.path).num_ok == 1
    again, _ = start_run(folder, plan, num_slots=1, capacity=1)
    assert again.run() is Outcome.COMMITTED
    output = read_output(folder.path)
    check_answers(output, prompts)
    assert output.column("row_id").to_pylist() == [f"in.parquet#{i}" for i in range(3)]
    status = read_status(folder.path)
    assert (status.num_reused, status.num_run) == (1, 2)


def test_c02b_an_actor_lost_after_its_part_was_published(tmp_path: Path, folder: OutputFolder) -> None:
    prompts = random_prompts(random.Random(1), 400)
    write_prompts(tmp_path / "in.parquet", prompts)
    plan = make_plan(tmp_path / "in.parquet", 100)
    driver, fleet = start_run(folder, plan, num_slots=2)
    wait = fleet.wait
    killed_on: list[int] = []

    def wait_and_lose(timeout_s: float) -> list[Any]:
        events = []
        for slot, event in wait(timeout_s):
            published = getattr(event, "published", ())
            if published and not killed_on:
                # The part is there, the driver has not heard of it, and never will from this rank.
                killed_on.append(published[0][0])
                assert folder.part_file(plan.part_name(published[0][0])).exists()
                events.append((slot, RankDied("killed by the test")))
            else:
                events.append((slot, event))
        return events

    fleet.wait = wait_and_lose  # type: ignore[method-assign]
    assert driver.run() is Outcome.COMMITTED
    assert killed_on
    check_answers(read_output(folder.path), prompts)
    assert len(list(folder.path.glob("*.parquet"))) == 4


def test_c02c_leftovers_are_outside_a_plain_read_and_cleaned(tmp_path: Path, folder: OutputFolder) -> None:
    prompts = random_prompts(random.Random(2), 40)
    write_prompts(tmp_path / "in.parquet", prompts)
    plan = make_plan(tmp_path / "in.parquet", 10)
    driver, _ = start_run(folder, plan)
    interrupt_when(driver, lambda: driver._num_shards_left == 2)
    with pytest.raises(KeyboardInterrupt):
        driver.run()
    (folder.temporary / "part-00003-of-00004.parquet.old").write_bytes(b"half a part")
    folder.shard_journals(0).mkdir(exist_ok=True)
    folder.journal_file(0, 1, 99).write_bytes(b"\x01\x02")
    assert read_output(folder.path).num_rows == 20
    again, _ = start_run(folder, plan)
    assert again.run() is Outcome.COMMITTED
    check_answers(read_output(folder.path), prompts)
    assert not list(folder.temporary.iterdir())
    assert not list(folder.journals.iterdir())


def run_text_job(
    folder: OutputFolder, source: Path, model: Path, rows_per_shard: int = 10
) -> list[dict[str, Any]]:
    renderer = build_renderer(model, SamplingParams(), ChatOptions())
    driver, _ = start_run(folder, make_plan(source, rows_per_shard), renderer=renderer)
    assert driver.run() is Outcome.COMMITTED
    return read_output(folder.path).to_pylist()


def test_c03_an_over_long_prompt_is_one_error_row(
    tmp_path: Path, folder: OutputFolder, bard_path: Path
) -> None:
    renderer = build_renderer(bard_path, SamplingParams(), ChatOptions(), max_model_len=64)
    write_prompts(tmp_path / "in.parquet", [[1, 2], [5] * 65, [3], [4]])
    driver, _ = start_run(folder, make_plan(tmp_path / "in.parquet"), renderer=renderer)
    assert driver.run() is Outcome.COMMITTED
    rows = read_output(folder.path).to_pylist()
    assert [row["status"] for row in rows] == ["ok", "error", "ok", "ok"]
    assert rows[1]["error"] == "prompt_too_long"
    assert "65" in rows[1]["error_message"]
    assert rows[1]["completion"] is None


@pytest.mark.parametrize(
    "column",
    [
        pa.array(["", "hi", ""]),
        pa.array(["", "", ""]),
        pa.array([[], [{"role": "user", "content": "hi"}], []]),
    ],
    ids=["mixed", "only empty", "messages"],
)
def test_c04_empty_prompts_are_error_rows(
    tmp_path: Path, folder: OutputFolder, bard_path: Path, column: pa.Array
) -> None:
    name = "messages" if pa.types.is_list(column.type) else "prompt"
    pq.write_table(pa.table({name: column}), tmp_path / "in.parquet")
    rows = run_text_job(folder, tmp_path / "in.parquet", bard_path)
    for row in rows:
        assert row["error"] == (None if row[name] else "empty_prompt")
        assert (row["completion"] is None) == (not row[name])


def test_text_that_is_not_utf8_is_an_error_row_and_passes_through(
    tmp_path: Path, folder: OutputFolder, bard_path: Path
) -> None:
    broken = pa.array([b"good", b"\xff\xfe", None]).cast(pa.binary()).view(pa.string())
    pq.write_table(pa.table({"prompt": broken}), tmp_path / "in.parquet")
    renderer = build_renderer(bard_path, SamplingParams(), ChatOptions())
    driver, _ = start_run(folder, make_plan(tmp_path / "in.parquet"), renderer=renderer)
    assert driver.run() is Outcome.COMMITTED
    output = read_output(folder.path)
    assert output.column("error").to_pylist() == [None, "not_utf8", "null_prompt"]
    assert output.column("prompt").combine_chunks().cast(pa.large_binary()).to_pylist() == [
        b"good",
        b"\xff\xfe",
        None,
    ]


def unreadable() -> dict[str, pa.Array]:
    """Columns whose second value has no counterpart in Python."""
    is_null = pa.array([True, False, True])
    numbers = pa.array([1, 2**62, 1], pa.int64())
    return {
        "too far": numbers.cast(pa.timestamp("us")),
        "too long": numbers.cast(pa.duration("ms")),
        "no zone": pa.array([1, 2, 1], pa.timestamp("us", "Mars/Olympus")),
        "one name twice": pa.StructArray.from_arrays([numbers, numbers], ["a", "a"], mask=is_null),
    }


@pytest.mark.parametrize("kind", unreadable())
@pytest.mark.parametrize(
    ("column", "code"),
    [
        ("messages", "unreadable_value"),
        ("temperature", "bad_sampling_param"),
        ("thinking", "bad_chat_option"),
        ("passed_on", None),
    ],
)
def test_a_value_that_python_cannot_hold_is_its_rows_error(
    tmp_path: Path, folder: OutputFolder, bard_path: Path, kind: str, column: str, code: str | None
) -> None:
    messages = pa.array([[{"role": "user", "content": "hi"}]] * 3)
    pq.write_table(pa.table({"messages": messages, column: unreadable()[kind]}), tmp_path / "in.parquet")
    renderer = build_renderer(bard_path, SamplingParams(), ChatOptions())
    driver, fleet = start_run(folder, make_plan(tmp_path / "in.parquet"), renderer=renderer)
    assert driver.run() is Outcome.COMMITTED
    assert fleet.num_started <= fleet.num_slots, "no rank died of it"
    rows = pq.read_table(next(folder.path.glob("*.parquet")), columns=["error", "error_message"]).to_pylist()
    assert rows[1]["error"] == code
    assert code is None or f"column {column} " in rows[1]["error_message"]


def test_an_error_may_quote_what_no_text_can_hold(
    tmp_path: Path, folder: OutputFolder, bard_path: Path
) -> None:
    calls = '[{"function": {"name": "f\\ud800", "arguments": 1}}]'
    messages = [[{"role": "assistant", "tool_calls": calls}]]
    pq.write_table(pa.table({"messages": messages}), tmp_path / "in.parquet")
    (row,) = run_text_job(folder, tmp_path / "in.parquet", bard_path)
    assert row["error"] == "bad_messages"
    assert "f\\ud800" in row["error_message"]


def test_c11_string_flavours_may_differ_between_files(
    tmp_path: Path, folder: OutputFolder, bard_path: Path
) -> None:
    flavours = [
        (pa.dictionary(pa.int32(), pa.string()), pa.list_(pa.string())),
        (pa.large_string(), pa.large_list(pa.string())),
        (pa.string_view(), pa.list_(pa.large_string())),
        (pa.string(), pa.null()),
    ]
    for index, (text, tags) in enumerate(flavours):
        prompts = pa.array([f"to be {index}", "or not", f"to be {index}"]).cast(text)
        tag_values = pa.nulls(3) if tags == pa.null() else pa.array([["a", None], [], None], tags)
        (tmp_path / "in").mkdir(exist_ok=True)
        pq.write_table(
            pa.table({"prompt": prompts, "tags": tag_values}), tmp_path / "in" / f"{index}.parquet"
        )
    rows = run_text_job(folder, tmp_path / "in", bard_path, rows_per_shard=2)
    assert [row["prompt"] for row in rows[::3]] == [f"to be {i}" for i in range(4)]
    assert [row["tags"] for row in rows] == [["a", None], [], None] * 3 + [None] * 3
    assert {row["status"] for row in rows} == {"ok"}
    schemas = {pq.read_schema(path).remove_metadata() for path in folder.path.glob("*.parquet")}
    assert len(schemas) == 1
    (schema,) = schemas
    assert schema.field("prompt").type == pa.large_string()
    assert schema.field("tags").type == pa.large_list(pa.large_string())


@pytest.mark.parametrize("seed", range(10))
def test_drivers_and_ranks_and_tails_that_are_lost_at_random(
    tmp_path: Path, folder: OutputFolder, seed: int
) -> None:
    print("seed", seed)
    random_ = random.Random(seed)
    prompts = random_prompts(random_, random_.randrange(20, 120))
    for index in random_.sample(range(len(prompts)), 3):
        prompts[index] = None
    write_prompts(tmp_path / "in.parquet", prompts)
    plan = make_plan(tmp_path / "in.parquet", random_.randrange(5, 40))
    num_runs, outcome = 0, None
    while outcome is not Outcome.COMMITTED:
        num_runs += 1
        driver, _ = start_run(folder, plan, num_slots=2, capacity=3, random_=random_, chance=0.01)
        last = random_.randrange(2, 40)
        countdown = iter(range(last + 1))
        interrupt_when(driver, lambda left=countdown, last=last: next(left) == last)
        try:
            outcome = driver.run()
        except KeyboardInterrupt:
            # The machine went down too, it may be: what was not synced is torn off.
            for journal in folder.journals.rglob("*.journal"):
                if random_.random() < 0.2:
                    size = journal.stat().st_size
                    os.truncate(journal, random_.randrange(size + 1))
        parts = [pq.read_table(path) for path in folder.path.glob("*.parquet")]
        row_ids = [row_id for part in parts for row_id in part.column("row_id").to_pylist()]
        assert len(row_ids) == len(set(row_ids))
        status = read_status(folder.path)
        assert status.num_rows_committed == len(row_ids) <= status.num_read <= len(prompts)
    print("runs", num_runs)
    output = read_output(folder.path)
    check_answers(output, prompts)
    assert read_status(folder.path).tally.errors.get("null_prompt") == 3

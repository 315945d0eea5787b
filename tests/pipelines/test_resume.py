"""What earlier runs left: commits and journals are taken up, the rest is swept away, others' work is not."""

from __future__ import annotations

import random
from pathlib import Path

from pipelines.manifest import OutputFolder
from pipelines.resume import take_up
from pipelines.schema import FinishedRow
from pipelines.sink import JournalWriter
from tests.small_jobs import make_plan, random_prompts, start_run, write_prompts


def test_parts_and_journals_are_found_and_leftovers_removed(tmp_path: Path) -> None:
    folder = OutputFolder(tmp_path / "out")
    prompts = random_prompts(random.Random(1), 40)
    prompts[3] = None
    write_prompts(tmp_path / "in.parquet", prompts)
    plan = make_plan(tmp_path / "in.parquet", 10)
    start_run(folder, plan)[0].run()
    folder.part_file(plan.part_name(2)).unlink()
    folder.part_file(plan.part_name(3)).unlink()
    with JournalWriter(folder, plan, 2, 7, 1) as journal:
        journal.start([0, 1])
        journal.finish([FinishedRow(row=1, error="x", error_message="x")])
    folder.shard_journals(0).mkdir()
    for name in ("00001.000001-1", "00002.000001-1"):
        (folder.temporary / name).touch()

    own = take_up(folder, plan, plan.shards[2:], is_whole=False)
    assert ([shard.index for shard in own.missing], own.num_rows) == ([2, 3], 0)
    assert [path.name for path in folder.temporary.iterdir()] == ["00001.000001-1"], "may be another driver's"
    assert folder.shard_journals(0).exists(), "is another driver's"

    found = take_up(folder, plan, plan.shards, is_whole=True)
    assert (sorted(found.committed), found.num_rows, found.num_errors) == ([0, 1], 20, 1)
    assert [shard.index for shard in found.missing] == [2, 3]
    assert {index: state.finished for index, state in found.journaled.items()} == {2: {1: False}}
    assert not list(folder.temporary.iterdir())
    assert [path.name for path in folder.journals.iterdir()] == [folder.shard_journals(2).name]

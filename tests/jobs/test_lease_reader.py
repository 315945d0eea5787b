"""Rows on their way to the engine: rendered beside the steps, named before they are touched, in order."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from engine import Request
from jobs.lease_reader import LeaseReader
from jobs.shard_cache import ShardCache
from pipelines.manifest import OutputFolder, write_plan
from pipelines.rank_protocol import Lease
from pipelines.sink import JournalWriter, read_journal_state
from pipelines.source import RowReader
from tests.small_jobs import TokenRenderer, make_plan, write_prompts


class HeldRenderer(TokenRenderer):
    """Renders nothing until it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()

    def render(self, row: Mapping[str, object], row_id: str) -> Request:
        assert self.go.wait(60)
        return super().render(row, row_id)


def test_nobody_waits_for_a_row_unless_told_to_and_every_row_comes_in_order(tmp_path: Path) -> None:
    write_prompts(tmp_path / "in.parquet", [[1 + i] for i in range(9)])
    folder, plan = OutputFolder(tmp_path / "out"), make_plan(tmp_path / "in.parquet", 9)
    write_plan(folder, plan)
    cache = ShardCache(RowReader(plan.root, plan.kind, plan.files, plan.contract.render_columns))
    renderer, lease = HeldRenderer(), Lease(lease_id=1, shard_index=0, ranges=((1, 3), (4, 9)))
    with ThreadPoolExecutor(1) as executor, JournalWriter(folder, plan, 0, 1, 1) as journal:
        rows = LeaseReader(lease, plan.shards[0], cache, journal, executor)
        assert rows.try_take(renderer, 3, may_wait=False) is None
        journal.sync()
        started = read_journal_state(plan, folder.journal_file(0, 1, 1)).started
        assert started == {1, 2, 4}, "named before the renderer has touched them"
        renderer.go.set()
        taken = [rows.try_take(renderer, 3, may_wait=True) for _ in range(7)]
    numbers = [found[0] for found in taken if found is not None]
    ids = [list(found[1].prompt_token_ids) for found in taken if found and isinstance(found[1], Request)]
    assert numbers == [1, 2, 4, 5, 6, 7, 8]
    assert ids == [[1 + row] for row in numbers]

"""Shards in memory: read once, forgotten in time, streamed when they are too large."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.shard_cache import ShardCache
from pipelines.source import RowReader, Shard, find_input, plan_shards


@pytest.fixture
def reads(tmp_path: Path) -> tuple[RowReader, tuple[Shard, ...], list[int]]:
    """A reader of a 60-row file in six shards, and the first rows it was asked for."""
    pq.write_table(pa.table({"v": range(60)}), tmp_path / "in.parquet")
    found = find_input(str(tmp_path / "in.parquet"))
    reader = RowReader(found.root, found.kind, found.files, ["v"], batch_rows=4)
    read, asked = reader.read, []

    def noted(path: str, start: int, stop: int):
        asked.append(start)
        return read(path, start, stop)

    reader.read = noted  # type: ignore[method-assign]
    return reader, plan_shards(found.files, 10), asked


def values(cache: ShardCache, shard: Shard, start: int, stop: int) -> list[int]:
    return [v for batch in cache.read(shard, start, stop) for v in batch.column("v").to_pylist()]


def test_a_shard_is_read_once_whatever_the_order(reads) -> None:
    reader, shards, asked = reads
    cache = ShardCache(reader)
    assert values(cache, shards[2], 6, 9) == [26, 27, 28]
    assert values(cache, shards[2], 0, 3) == [20, 21, 22]
    assert values(cache, shards[0], 1, 2) == [1]
    assert values(cache, shards[2], 9, 10) == [29]
    assert asked == [20, 0]


def test_the_shard_of_longest_ago_is_forgotten(reads) -> None:
    reader, shards, asked = reads
    cache = ShardCache(reader, max_num_bytes=2 * 80)
    for index in (0, 1, 0, 2, 0, 1):
        assert values(cache, shards[index], 0, 10) == list(range(10 * index, 10 * index + 10))
    assert asked == [0, 10, 20, 10]


def test_a_shard_too_large_to_keep_is_streamed(reads) -> None:
    reader, shards, asked = reads
    cache = ShardCache(reader, max_num_bytes=40)
    assert values(cache, shards[1], 2, 5) == [12, 13, 14]
    assert values(cache, shards[1], 5, 7) == [15, 16]
    assert asked == [10, 12, 15]

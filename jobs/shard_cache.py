"""A rank's recent shards in memory, so that leases of one shard may come in any order.

Owns what is kept and for how long. A file is read forwards: without this, every lease that goes back in its
shard would read the row group again from its beginning. It must not know requests, nor who leased what.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

import pyarrow as pa

from pipelines.source import RowReader, Shard

_MAX_NUM_BYTES = 64 << 20
_MAX_NUM_SHARDS = 8


class ShardCache:
    """Rows of shards by way of ``reader``. A shard larger than ``max_num_bytes`` is streamed each time."""

    def __init__(self, reader: RowReader, *, max_num_bytes: int = _MAX_NUM_BYTES) -> None:
        self._reader = reader
        self._max_num_bytes = max_num_bytes
        # None: too large to keep.
        self._shards: OrderedDict[int, pa.Table | None] = OrderedDict()

    def read(self, shard: Shard, start: int, stop: int) -> Iterator[pa.RecordBatch]:
        """Yield rows ``start <= row < stop`` of the shard, a few at a time or all at once."""
        if shard.index not in self._shards:
            self._shards[shard.index] = self._try_load(shard)
            self._shrink()
        self._shards.move_to_end(shard.index)
        table = self._shards[shard.index]
        if table is None:
            yield from self._reader.read(shard.path, shard.start + start, shard.start + stop)
        else:
            yield from table.slice(start, stop - start).to_batches()

    def _try_load(self, shard: Shard) -> pa.Table | None:
        batches: list[pa.RecordBatch] = []
        num_bytes = 0
        for batch in self._reader.read(shard.path, shard.start, shard.stop):
            batches.append(batch)
            num_bytes += batch.nbytes
            if num_bytes > self._max_num_bytes:
                return None
        # Put together by copying: a batch may be a view of something much larger.
        return pa.Table.from_batches(batches).combine_chunks() if batches else None

    def _shrink(self) -> None:
        """Forget the shards that were read longest ago, never the newest."""
        while len(self._shards) > 1 and (
            len(self._shards) > _MAX_NUM_SHARDS
            or sum(table.nbytes for table in self._shards.values() if table is not None) > self._max_num_bytes
        ):
            self._shards.popitem(last=False)

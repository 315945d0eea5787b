"""A lease's rows on their way to the engine: read in slices, rendered a few at a time, handed out in order.

Owns the bounded look-ahead and the naming of rows as suspects before they are touched. It must not know
engines, nor when a row is wanted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import Protocol

import pyarrow as pa

from engine import Request, RequestRejected
from jobs.shard_cache import ShardCache
from pipelines.ledger import Lease
from pipelines.shared_prefixes import shared_prefix_ends
from pipelines.sink import JournalWriter
from pipelines.source import Shard

_LOOK_AHEAD_TOKENS = 1 << 21  # rendered prompts that wait for their turn: some 70 MB


class Renderer(Protocol):
    """What turns a row into a request."""

    def render(self, row: Mapping[str, object], row_id: str) -> Request: ...


class LeaseReader:
    """The rows of one lease, each with its request or the reason why it is none."""

    def __init__(self, lease: Lease, shard: Shard, cache: ShardCache, journal: JournalWriter) -> None:
        self._lease, self._shard, self._cache, self._journal = lease, shard, cache, journal
        self._rows = self._read()
        self._ahead: deque[tuple[int, Request | RequestRejected]] = deque()

    def take(self, renderer: Renderer, look_ahead: int) -> tuple[int, Request | RequestRejected]:
        """The next row's number and request; up to ``look_ahead`` rows are rendered together with it.

        Each of them then knows where it parts from the others. They are suspects from here on, so of a
        solo lease it is one.
        """
        if not self._ahead:
            self._render(renderer, 1 if self._lease.is_solo else look_ahead)
        return self._ahead.popleft()

    def _read(self) -> Iterator[tuple[int, pa.RecordBatch, int]]:
        for start, stop in self._lease.ranges:
            row = start
            for batch in self._cache.read(self._shard, start, stop):
                for i in range(batch.num_rows):
                    yield row + i, batch, i
                row += batch.num_rows

    def _render(self, renderer: Renderer, max_num_rows: int) -> None:
        rendered: list[tuple[int, Request | RequestRejected]] = []
        num_tokens = 0
        for row, batch, index in islice(self._rows, max_num_rows):
            # Before the row is touched: if it kills this process, its name has to be on the list.
            self._journal.start([row])
            try:
                request = renderer.render(read_values(batch, index), self._shard.row_id(row))
            except RequestRejected as rejected:
                rendered.append((row, rejected))
                continue
            rendered.append((row, request))
            num_tokens += len(request.prompt_token_ids)
            if num_tokens >= _LOOK_AHEAD_TOKENS:
                break
        prompts = [found.prompt_token_ids for _, found in rendered if isinstance(found, Request)]
        ends = iter(shared_prefix_ends(prompts))
        self._ahead.extend(
            (row, replace(found, prefix_ends=next(ends)) if isinstance(found, Request) else found)
            for row, found in rendered
        )


def read_values(batch: pa.RecordBatch, index: int) -> dict[str, object]:
    """One row as Python values. A text that is not UTF-8 refuses the row."""
    values: dict[str, object] = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            values[name] = column[index].as_py()
        except UnicodeDecodeError as error:
            raise RequestRejected("not_utf8", f"{name} is not UTF-8: {error}") from error
    return values

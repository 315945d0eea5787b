"""A lease's rows on their way to the engine: read in slices, rendered a few at a time, handed out in order.

Owns the bounded look-ahead and the naming of rows as suspects before they are touched. It must not know
engines, nor when a row is wanted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor, Future
from dataclasses import replace
from itertools import islice
from typing import Protocol

import pyarrow as pa

from engine import Request, RequestRejected
from engine.api import SAMPLING_FIELDS
from jobs.shard_cache import ShardCache
from pipelines.chat import CHAT_COLUMNS
from pipelines.rank_protocol import Lease
from pipelines.shared_prefixes import shared_prefix_ends
from pipelines.sink import JournalWriter
from pipelines.source import Shard

_LOOK_AHEAD_TOKENS = 1 << 20  # rendered prompts that wait for their turn: some 35 MB, and as many behind them

_Rendered = tuple[int, Request | RequestRejected]


class Renderer(Protocol):
    """What turns a row into a request."""

    def render(self, row: Mapping[str, object], row_id: str) -> Request: ...


class LeaseReader:
    """The rows of one lease, each with its request or the reason why it is none.

    Rows are rendered a few at a time on ``executor``, the next few while those before them run: reading and
    tokenizing hold up no step. Each knows where it parts from those rendered with it.
    """

    def __init__(
        self, lease: Lease, shard: Shard, cache: ShardCache, journal: JournalWriter, executor: Executor
    ) -> None:
        self._lease, self._shard, self._cache, self._journal = lease, shard, cache, journal
        self._executor = executor
        self._numbers = lease.rows
        self._rows = self._read()
        self._ahead: deque[_Rendered] = deque()
        self._next: Future[list[_Rendered]] | None = None
        self._num_started = self._num_rendered = 0

    def begin(self, renderer: Renderer, look_ahead: int) -> None:
        """See to it that the next ``look_ahead`` rows are rendered; of suspects it is one.

        They are suspects from here on: if one kills this process, its name has to be on the list.
        """
        num_rows = len(self._numbers)
        if self._next is not None or self._num_rendered == num_rows:
            return
        stop = min(self._num_rendered + (1 if self._lease.is_of_suspects else look_ahead), num_rows)
        if stop > self._num_started:
            self._journal.start(self._numbers[self._num_started : stop])
            self._num_started = stop
        self._next = self._executor.submit(self._render, renderer, stop - self._num_rendered)

    def try_take(self, renderer: Renderer, look_ahead: int, *, may_wait: bool) -> _Rendered | None:
        """The next row's number and request; None if it is not rendered yet and nobody is to wait for it."""
        if not self._ahead:
            self.begin(renderer, look_ahead)
            assert self._next is not None, "every row was taken"
            if not (may_wait or self._next.done()):
                return None
            self._ahead.extend(self._next.result())
            self._num_rendered += len(self._ahead)
            self._next = None
        found = self._ahead.popleft()
        if not self._lease.is_of_suspects:
            self.begin(renderer, look_ahead)
        return found

    def _read(self) -> Iterator[tuple[int, pa.RecordBatch, int]]:
        for start, stop in self._lease.ranges:
            row = start
            for batch in self._cache.read(self._shard, start, stop):
                for i in range(batch.num_rows):
                    yield row + i, batch, i
                row += batch.num_rows

    def _render(self, renderer: Renderer, max_num_rows: int) -> list[_Rendered]:
        rendered: list[_Rendered] = []
        num_tokens = 0
        for row, batch, index in islice(self._rows, max_num_rows):
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
        return [
            (row, replace(found, prefix_ends=next(ends)) if isinstance(found, Request) else found)
            for row, found in rendered
        ]


def read_values(batch: pa.RecordBatch, index: int) -> dict[str, object]:
    """One row as Python values. A text that is not UTF-8, or a value that Python has not, refuses the row."""
    values: dict[str, object] = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            values[name] = column[index].as_py()
        except UnicodeDecodeError as error:
            raise RequestRejected("not_utf8", f"{name} is not UTF-8: {error}") from error
        except Exception as error:  # of Arrow, of calendars and time zones, of what a type brings with it
            raise RequestRejected(
                _code_of(name), f"column {name} is {column.type}, and its value cannot be read: {error}"
            ) from error
    return values


def _code_of(column: str) -> str:
    if column in SAMPLING_FIELDS:
        return "bad_sampling_param"
    return "bad_chat_option" if column in CHAT_COLUMNS else "unreadable_value"

"""Parquet files as input: what a footer says, and rows in slices from a forward cursor.

Owns reading one Parquet file in bounded memory; it must not know which files a job has, nor what columns
mean.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator, Sequence
from typing import IO

import pyarrow as pa
import pyarrow.parquet as pq

from engine.errors import ConfigError
from pipelines.source_file import InputFile
from pipelines.source_location import Location

_READ_BUFFER_BYTES = 1 << 20


def inspect_parquet(location: Location, name: str) -> tuple[InputFile, pa.Schema]:
    """Read one file's footer: its place in the plan and its schema. Raises ``ConfigError``."""
    try:
        with location.open(name) as file:
            num_bytes, footer = _read_footer(file)
            file.seek(0)
            with pq.ParquetFile(file) as parquet:
                num_rows, schema = parquet.metadata.num_rows, parquet.schema_arrow
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(
            f"input file {location.describe(name)!r} cannot be read as Parquet: {error}"
        ) from error
    digest = hashlib.blake2b(footer, digest_size=16).hexdigest()
    return InputFile(path=name, num_rows=num_rows, num_bytes=num_bytes, footer=digest), schema


def _read_footer(file: IO[bytes]) -> tuple[int, bytes]:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(size - 8, 0))
    length = int.from_bytes(file.read(8)[:4], "little")
    file.seek(max(size - 8 - length, 0))
    return size, file.read(length)


class ParquetRows:
    """A forward cursor over one Parquet file.

    Column chunks are streamed through a small buffer, not mapped or read whole: a row group of
    several gigabytes then costs a few megabytes, on a network file system too.
    """

    def __init__(self, location: Location, name: str, columns: Sequence[str]) -> None:
        with contextlib.ExitStack() as opened:
            source = location.describe(name) if location.is_local else location.open(name)
            if not isinstance(source, str):
                opened.callback(source.close)
            options = {"buffer_size": _READ_BUFFER_BYTES, "pre_buffer": False}
            self._file = opened.enter_context(pq.ParquetFile(source, **options))
            self._opened = opened.pop_all()
        self._columns = [column for column in columns if column in self._file.schema_arrow.names]
        self._position = 0
        self._batches: Iterator[pa.RecordBatch] | None = None
        self._rest: pa.RecordBatch | None = None

    def read(self, start: int, stop: int, batch_rows: int) -> Iterator[pa.RecordBatch]:
        """Yield rows ``start <= row < stop``, with those of the columns that the file has."""
        group_start, group = self._row_group_of(start)
        if self._batches is None or self._position > start or self._position < group_start:
            self._batches = self._iterate(group, batch_rows)
            self._position, self._rest = group_start, None
        while self._position < stop:
            batch = self._rest if self._rest is not None else next(self._batches, None)
            if batch is None:
                raise OSError(f"it ends before row {self._position}")
            first = max(start - self._position, 0)
            last = min(stop - self._position, batch.num_rows)
            self._position += min(last, batch.num_rows) if last > 0 else batch.num_rows
            self._rest = batch.slice(last) if last < batch.num_rows else None
            if first < last:
                yield batch.slice(first, last - first)

    def _iterate(self, first_group: int, batch_rows: int) -> Iterator[pa.RecordBatch]:
        for group in range(first_group, self._file.num_row_groups):
            # One by one: a nested dictionary is not read across the end of a group.
            yield from self._file.iter_batches(batch_rows, row_groups=[group], columns=self._columns)

    def _row_group_of(self, row: int) -> tuple[int, int]:
        start = 0
        for group in range(self._file.num_row_groups):
            num_rows = self._file.metadata.row_group(group).num_rows
            if row < start + num_rows:
                return start, group
            start += num_rows
        raise ValueError(f"row {row} is past the file's end at {start}")

    def close(self) -> None:
        """Close the file."""
        self._opened.close()

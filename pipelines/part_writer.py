"""A part's rows as a file: Parquet, JSON lines, or an OpenAI batch's responses and errors.

Owns how rows become bytes on disk; it must not know where rows come from, or when a file is published.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.json_values import to_json_rows
from pipelines.openai_batch import response_line

_MAX_GROUP_BYTES = 128 << 20
"""A row group of wide rows is cut here, so that it never has to be held whole."""


def write_parquet(
    path: Path, schema: pa.Schema, batches: Iterable[pa.RecordBatch], row_group_rows: int
) -> None:
    """Write rows in groups of ``row_group_rows``, fewer where rows are wide. ``path`` must not exist."""
    with open(path, "xb") as file:
        with pq.ParquetWriter(file, schema, compression="zstd") as writer:
            for group in _groups(batches, row_group_rows):
                writer.write_table(group, row_group_size=row_group_rows)
        _sync(file)


def _groups(batches: Iterable[pa.RecordBatch], row_group_rows: int) -> Iterator[pa.Table]:
    waiting: list[pa.RecordBatch] = []
    num_rows = num_bytes = 0
    for batch in batches:
        while num_rows + batch.num_rows > row_group_rows:
            yield pa.Table.from_batches([*waiting, batch.slice(0, row_group_rows - num_rows)])
            batch = batch.slice(row_group_rows - num_rows)
            waiting, num_rows, num_bytes = [], 0, 0
        waiting.append(batch)
        num_rows += batch.num_rows
        num_bytes += batch.nbytes
        if num_bytes >= _MAX_GROUP_BYTES:
            yield pa.Table.from_batches(waiting)
            waiting, num_rows, num_bytes = [], 0, 0
    if num_rows:
        yield pa.Table.from_batches(waiting)


def write_jsonl(path: Path, batches: Iterable[pa.RecordBatch]) -> None:
    """Write a line a row, with every column. ``path`` must not exist."""
    with open(path, "xb") as file:
        for batch in batches:
            for row in to_json_rows(batch):
                _write_line(file, row)
        _sync(file)


def write_responses(path: Path, errors_path: Path, batches: Iterable[pa.RecordBatch]) -> None:
    """Write answered requests to ``path`` and failed ones to ``errors_path``, neither of which may exist."""
    with ExitStack() as opened:
        answered, failed = (opened.enter_context(open(p, "xb")) for p in (path, errors_path))
        for batch in batches:
            for row in to_json_rows(batch):
                line = response_line(row)
                _write_line(answered if line["error"] is None else failed, line)
        _sync(answered)
        _sync(failed)


def _write_line(file: IO[bytes], line: Mapping[str, Any]) -> None:
    file.write(json.dumps(line, ensure_ascii=False, allow_nan=False).encode() + b"\n")


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())

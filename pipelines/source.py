"""Where rows come from: a path becomes a fixed list of files, files become shards, shards are read in slices.

Owns the kinds of input and which one a path is; it must not know what a prompt is, what is written, or who
reads which slice. Each kind's reading is in a file of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pyarrow as pa

from engine.errors import ConfigError
from pipelines.source_dataset import (
    DatasetRows,
    find_named_dataset,
    find_saved_dataset,
    is_dataset_name,
    is_saved_dataset,
    open_dataset,
    resolve_dataset_name,
)
from pipelines.source_file import FileRows
from pipelines.source_file import InputFile as InputFile
from pipelines.source_location import Location, find_files, is_url, suffix_of
from pipelines.source_parquet import ParquetRows, inspect_parquet
from pipelines.source_text import (
    CsvRows,
    LineRows,
    inspect_csv,
    inspect_jsonl,
    inspect_requests,
    looks_like_requests,
)

SourceKind = Literal["parquet", "csv", "jsonl", "openai_batch", "dataset", "named_dataset"]
FileFormat = Literal["parquet", "csv", "jsonl", "openai_batch"]

_FORMATS: Mapping[str, FileFormat] = {
    ".parquet": "parquet",
    ".csv": "csv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
}
_INSPECT = {
    "parquet": inspect_parquet,
    "csv": inspect_csv,
    "jsonl": inspect_jsonl,
    "openai_batch": inspect_requests,
    "dataset": find_saved_dataset,
    "named_dataset": find_named_dataset,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class InputSet:
    """The files of a job in their fixed order, and each one's schema as found."""

    root: str
    kind: SourceKind
    files: tuple[InputFile, ...]
    schemas: tuple[pa.Schema, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """Rows ``start <= row < stop`` of one file; becomes exactly one part."""

    index: int
    path: str
    start: int
    stop: int

    @property
    def num_rows(self) -> int:
        """How many rows the shard has."""
        return self.stop - self.start

    def row_id(self, row: int) -> str:
        """The id of the shard's row number ``row``: the file and the row's number in that file."""
        return f"{self.path}#{self.start + row}"


def plan_shards(files: Sequence[InputFile], rows_per_shard: int) -> tuple[Shard, ...]:
    """Cut every file into slices of ``rows_per_shard``; an empty file is one empty shard."""
    shards: list[Shard] = []
    for file in files:
        for start in range(0, max(file.num_rows, 1), rows_per_shard):
            stop = min(start + rows_per_shard, file.num_rows)
            shards.append(Shard(index=len(shards), path=file.path, start=start, stop=stop))
    return tuple(shards)


def find_input(path: str, *, format: FileFormat | None = None, exclude: str | None = None) -> InputSet:
    """Resolve a file, folder, glob, URL of one of these, saved dataset or dataset's name.

    ``format`` None: as the files' names say; JSON lines that begin with an API request are requests. Files
    under the folder ``exclude`` are left out. Raises ``ConfigError`` when nothing matches or something that
    matches cannot be read.
    """
    if is_dataset_name(path):
        location, name = resolve_dataset_name(path)
        return _inspect_all(location, "named_dataset", [name])
    if not is_url(path) and is_saved_dataset(Path(path)):
        folder = Path(path).absolute()
        return _inspect_all(Location(str(folder.parent)), "dataset", [folder.name])
    suffixes = [suffix for suffix, known in _FORMATS.items() if format in (None, known)]
    if format == "openai_batch":
        suffixes = [suffix for suffix, known in _FORMATS.items() if known == "jsonl"]
    location, names = find_files(path, suffixes, exclude=exclude)
    if not names:
        raise ConfigError(f"input.path {path!r} matches no Parquet file, nor CSV, nor JSON lines")
    return _inspect_all(location, format or _tell_format(path, location, names), names)


def _tell_format(path: str, location: Location, names: Sequence[str]) -> FileFormat:
    # What has no name of its own kind is Parquet, and refused if it is not.
    formats = {_FORMATS.get(suffix_of(name), "parquet"): name for name in names}
    if len(formats) > 1:
        (one, first), (other, second), *_ = formats.items()
        raise ConfigError(
            f"input.path {path!r} holds {one} ({first!r}) and {other} ({second!r}): name one of them with a "
            "glob or with input.format"
        )
    (format,) = formats
    return "openai_batch" if format == "jsonl" and looks_like_requests(location, names[0]) else format


def _inspect_all(location: Location, kind: SourceKind, names: Sequence[str]) -> InputSet:
    for path in map(location.describe, names):
        if not _is_utf8(path):
            raise ConfigError(f"input file {path!r} has a name that is not UTF-8: row ids could not hold it")
    try:
        found = [_INSPECT[kind](location, name) for name in names]
    except RecursionError as error:
        raise ConfigError(f"input.path {location.root!r} holds values that are nested too deeply") from error
    return InputSet(
        root=location.root,
        kind=kind,
        files=tuple(file for file, _ in found),
        schemas=tuple(schema for _, schema in found),
    )


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class InputUnreadable(OSError):
    """A file of the input is there and cannot be read. It ends the job: no rank would fare better."""


class RowReader:
    """Reads slices of the plan's files, some columns of them, in bounded memory.

    Keeps the last file open, so that neighbouring slices are read in one pass. A file that is not the
    one the plan saw is refused with ``ConfigError``; one that is and cannot be read raises
    ``InputUnreadable``. A column that a file lacks is null there.
    """

    def __init__(
        self,
        root: str,
        kind: SourceKind,
        files: Sequence[InputFile],
        columns: Sequence[str],
        *,
        batch_rows: int = 32,
    ) -> None:
        self._location = Location(root)
        self._kind = kind
        self._files: Mapping[str, InputFile] = {file.path: file for file in files}
        self._columns = list(columns)
        self._batch_rows = batch_rows
        self._open_path: str | None = None
        self._open_rows: FileRows | None = None

    def read(self, path: str, start: int, stop: int) -> Iterator[pa.RecordBatch]:
        """Yield rows ``start <= row < stop`` of ``path`` in order, a few rows at a time."""
        if stop <= start:
            return iter(())
        if self._open_rows is None or self._open_path != path:
            self.close()
            with self._naming(path):
                self._open_rows = self._open(path)
            self._open_path = path
        return self._read(path, self._open_rows.read(start, stop, self._batch_rows))

    def close(self) -> None:
        """Close the file that is open, if any."""
        if self._open_rows is not None:
            self._open_rows.close()
            self._open_rows = None

    def _open(self, path: str) -> FileRows:
        found, schema = _INSPECT[self._kind](self._location, path)
        if found != self._files[path]:
            raise ConfigError(
                f"input file {self._location.describe(path)!r} changed since the job was planned"
            )
        if self._kind in ("dataset", "named_dataset"):
            return DatasetRows(open_dataset(self._location, path), self._columns)
        if self._kind == "parquet":
            return ParquetRows(self._location, path, self._columns)
        if self._kind == "csv":
            return CsvRows(self._location, path, self._columns, schema)
        is_requests = self._kind == "openai_batch"
        return LineRows(self._location, path, self._columns, None if is_requests else schema)

    def _read(self, path: str, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        while True:
            with self._naming(path):
                batch = next(batches, None)
            if batch is None:
                return
            yield self._complete(batch)

    @contextlib.contextmanager
    def _naming(self, path: str) -> Iterator[None]:
        """What goes wrong in reading a file is told with its name, and as nothing else."""
        try:
            yield
        except MemoryError:
            raise  # Arrow's own is one of its errors, and says nothing of the file
        except (pa.ArrowException, OSError) as error:
            words = " ".join(str(error).split())
            raise InputUnreadable(
                f"input file {self._location.describe(path)!r} cannot be read: {words}"
            ) from error

    def _complete(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        if batch.schema.names == self._columns:
            return batch
        missing = pa.nulls(batch.num_rows)
        columns = [batch.column(name) if name in batch.schema.names else missing for name in self._columns]
        return pa.RecordBatch.from_arrays(columns, names=self._columns)

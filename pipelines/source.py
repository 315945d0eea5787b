"""Where rows come from: a path becomes a fixed list of files, files become shards, shards are read in slices.

Owns reading and the inputs' fingerprints; it must not know what a prompt is, what is written, or who
reads which slice.
"""

from __future__ import annotations

import glob
import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from engine.errors import ConfigError

SourceKind = Literal["parquet", "dataset"]

_READ_BUFFER_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class InputFile:
    """One input file as the plan remembers it. ``path`` is relative to the input root, with ``/``.

    ``footer`` hashes what describes the file's content (a Parquet footer, a saved dataset's state).
    """

    path: str
    num_rows: int
    num_bytes: int
    footer: str


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


def find_input(path: str, *, exclude: str | None = None) -> InputSet:
    """Resolve a file, folder, glob or saved dataset. Files under the folder ``exclude`` are left out.

    Raises ``ConfigError`` when nothing matches or something that matches cannot be read.
    """
    if os.path.isdir(path) and _is_saved_dataset(Path(path)):
        return _find_dataset(Path(path).absolute())
    root, candidates = _match(path)
    excluded = Path(exclude).absolute() if exclude is not None else None
    names = [
        name
        for name in sorted({candidate.relative_to(root).as_posix() for candidate in candidates})
        if excluded is None or excluded not in (root / name).parents
    ]
    if not names:
        raise ConfigError(f"input.path {path!r} matches no Parquet file")
    found = [inspect_parquet(root, name) for name in names]
    return InputSet(
        root=str(root),
        kind="parquet",
        files=tuple(file for file, _ in found),
        schemas=tuple(schema for _, schema in found),
    )


def _match(path: str) -> tuple[Path, list[Path]]:
    absolute = Path(path).absolute()
    if absolute.is_file():
        return absolute.parent, [absolute]
    if absolute.is_dir():
        found = (Path(p) for p in glob.iglob(f"{glob.escape(str(absolute))}/**/*.parquet", recursive=True))
        return absolute, [p for p in found if p.is_file() and not _is_hidden(p.relative_to(absolute))]
    fixed: list[str] = []
    for piece in absolute.parts:
        if glob.has_magic(piece):
            break
        fixed.append(piece)
    root = Path(*fixed)
    if len(fixed) == len(absolute.parts):
        return root, []
    return root, [p for p in map(Path, glob.iglob(str(absolute), recursive=True)) if p.is_file()]


def _is_hidden(relative: Path) -> bool:
    # Parquet readers skip these names in a folder: "_SUCCESS", "_overnight/", ".cache/".
    return any(piece.startswith(("_", ".")) for piece in relative.parts)


def inspect_parquet(root: Path, name: str) -> tuple[InputFile, pa.Schema]:
    """Read one Parquet file's footer: its place in the plan and its schema."""
    full = root / name
    try:
        num_bytes = full.stat().st_size
        footer = _footer_bytes(full)
        with pq.ParquetFile(full) as parquet:
            num_rows, schema = parquet.metadata.num_rows, parquet.schema_arrow
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(f"input file {str(full)!r} cannot be read as Parquet: {error}") from error
    digest = hashlib.blake2b(footer, digest_size=16).hexdigest()
    return InputFile(path=name, num_rows=num_rows, num_bytes=num_bytes, footer=digest), schema


def _footer_bytes(path: Path) -> bytes:
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - 8, 0))
        tail = file.read(8)
        length = int.from_bytes(tail[:4], "little")
        file.seek(max(size - 8 - length, 0))
        return file.read(length)


def _is_saved_dataset(path: Path) -> bool:
    names = ("state.json", "dataset_info.json", "dataset_dict.json")
    return any((path / name).is_file() for name in names)


def _find_dataset(path: Path) -> InputSet:
    if not (path / "state.json").is_file():
        raise ConfigError(
            f"input.path {str(path)!r} is not one saved dataset: name one split's folder inside it"
        )
    rows = _DatasetRows(path, None)
    state = (path / "state.json").read_bytes()
    file = InputFile(
        path=path.name,
        num_rows=rows.num_rows,
        num_bytes=sum(p.stat().st_size for p in path.glob("*.arrow")),
        footer=hashlib.blake2b(state, digest_size=16).hexdigest(),
    )
    return InputSet(root=str(path.parent), kind="dataset", files=(file,), schemas=(rows.schema,))


class _Rows(Protocol):
    """One open file. Reading onwards from where the last read ended is cheap."""

    def read(self, start: int, stop: int, batch_rows: int) -> Iterator[pa.RecordBatch]: ...

    def close(self) -> None: ...


class RowReader:
    """Reads slices of the plan's files, some columns of them, in bounded memory.

    Keeps the last file open, so that neighbouring slices are read in one pass. A file that is not the
    one the plan saw is refused with ``ConfigError``.
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
        self._root = Path(root)
        self._kind = kind
        self._files: Mapping[str, InputFile] = {file.path: file for file in files}
        self._columns = list(columns)
        self._batch_rows = batch_rows
        self._open_path: str | None = None
        self._open_rows: _Rows | None = None

    def read(self, path: str, start: int, stop: int) -> Iterator[pa.RecordBatch]:
        """Yield rows ``start <= row < stop`` of ``path`` in order, a few rows at a time."""
        if stop <= start:
            return iter(())
        if self._open_rows is None or self._open_path != path:
            self.close()
            self._open_rows = self._open(path)
            self._open_path = path
        return self._open_rows.read(start, stop, self._batch_rows)

    def close(self) -> None:
        """Close the file that is open, if any."""
        if self._open_rows is not None:
            self._open_rows.close()
            self._open_rows = None

    def _open(self, path: str) -> _Rows:
        full = self._root / path
        if self._kind == "dataset":
            found = _find_dataset(full).files[0]
        else:
            found, _ = inspect_parquet(self._root, path)
        if found != self._files[path]:
            raise ConfigError(f"input file {str(full)!r} changed since the job was planned")
        if self._kind == "dataset":
            return _DatasetRows(full, self._columns)
        return _ParquetRows(full, self._columns)


class _ParquetRows:
    """A forward cursor over one Parquet file.

    Column chunks are streamed through a small buffer, not mapped or read whole: a row group of
    several gigabytes then costs a few megabytes, on a network file system too.
    """

    def __init__(self, path: Path, columns: list[str]) -> None:
        self._file = pq.ParquetFile(path, buffer_size=_READ_BUFFER_BYTES, pre_buffer=False)
        self._columns = columns
        self._position = 0
        self._batches: Iterator[pa.RecordBatch] | None = None
        self._rest: pa.RecordBatch | None = None

    def read(self, start: int, stop: int, batch_rows: int) -> Iterator[pa.RecordBatch]:
        group_start, group = self._row_group_of(start)
        if self._batches is None or self._position > start or self._position < group_start:
            groups = list(range(group, self._file.num_row_groups))
            self._batches = self._file.iter_batches(batch_rows, row_groups=groups, columns=self._columns)
            self._position, self._rest = group_start, None
        while self._position < stop:
            batch = self._rest if self._rest is not None else next(self._batches)
            first = max(start - self._position, 0)
            last = min(stop - self._position, batch.num_rows)
            self._position += min(last, batch.num_rows) if last > 0 else batch.num_rows
            self._rest = batch.slice(last) if last < batch.num_rows else None
            if first < last:
                yield batch.slice(first, last - first)

    def _row_group_of(self, row: int) -> tuple[int, int]:
        start = 0
        for group in range(self._file.num_row_groups):
            num_rows = self._file.metadata.row_group(group).num_rows
            if row < start + num_rows:
                return start, group
            start += num_rows
        raise ValueError(f"row {row} is past the file's end at {start}")

    def close(self) -> None:
        self._file.close()


class _DatasetRows:
    """A dataset saved by Hugging Face ``datasets``, read through its memory map."""

    def __init__(self, path: Path, columns: list[str] | None) -> None:
        # Imported here: it takes seconds, and only this kind of input needs it.
        from datasets import load_from_disk

        dataset: Any = load_from_disk(str(path))
        if columns is not None:
            dataset = dataset.select_columns(columns)
        self._dataset: Any = dataset.with_format("arrow")
        self.num_rows: int = dataset.num_rows
        self.schema: pa.Schema = dataset.features.arrow_schema

    def read(self, start: int, stop: int, batch_rows: int) -> Iterator[pa.RecordBatch]:
        for first in range(start, stop, batch_rows):
            table: pa.Table = self._dataset[first : min(first + batch_rows, stop)]
            yield from table.to_batches()

    def close(self) -> None:
        self._dataset = None

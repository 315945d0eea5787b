"""CSV, JSON lines and OpenAI batch requests as input: types found in one pass, rows in slices.

Owns what these formats do not say of themselves, the number of rows and the types; it must not know which
files a job has, nor what columns mean. A file is hashed whole: it has no footer to stand for it.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import IO

import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.json as pa_json

from engine.errors import ConfigError
from pipelines.column_types import STRING
from pipelines.openai_batch import REQUEST_COLUMNS, read_line
from pipelines.source_file import InputFile
from pipelines.source_location import Location

_MAX_ROW_BYTES = 16 << 20
"""A CSV row may be so long, and so much of a file is parsed at once."""

_INFER_BYTES = 4 << 20

_SAMPLING_TYPES = {
    "ignore_eos": pa.bool_(),
    **{name: pa.int64() for name in ("top_k", "seed", "max_tokens", "n", "logprobs")},
    **{name: pa.float64() for name in ("temperature", "top_p", "min_p", "repetition_penalty")},
}
"""CSV columns that are not text."""


def inspect_csv(location: Location, name: str) -> tuple[InputFile, pa.Schema]:
    """Read a file once: its place in the plan and its schema. Raises ``ConfigError``.

    Every column is text, as it stands in the file, but those that are named like a sampling parameter.
    """
    num_rows = 0
    try:
        types = _csv_types(location, name)
        with location.open(name) as file, _open_csv(file, types, list(types)) as reader:
            for batch in reader:
                num_rows += batch.num_rows
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(f"input file {location.describe(name)!r} cannot be read as CSV: {error}") from error
    return _as_input(location, name, num_rows), pa.schema(list(types.items()))


def _csv_types(location: Location, name: str) -> dict[str, pa.DataType]:
    with location.open(name) as file:
        names = pa_csv.read_csv(io.BytesIO(file.readline(_MAX_ROW_BYTES))).column_names
    repeated = [column for column in names if names.count(column) > 1]
    if repeated:
        raise ConfigError(f"input file {location.describe(name)!r} has two columns named {repeated[0]!r}")
    return {column: _SAMPLING_TYPES.get(column, STRING) for column in names}


def _open_csv(
    file: IO[bytes], types: Mapping[str, pa.DataType], columns: Sequence[str]
) -> pa_csv.CSVStreamingReader:
    return pa_csv.open_csv(
        file,
        read_options=pa_csv.ReadOptions(block_size=_MAX_ROW_BYTES, use_threads=False),
        parse_options=pa_csv.ParseOptions(newlines_in_values=True),
        convert_options=pa_csv.ConvertOptions(
            column_types=dict(types),
            include_columns=list(columns),
            check_utf8=False,
            strings_can_be_null=False,
        ),
    )


class CsvRows:
    """A forward cursor over one CSV file; going back begins anew."""

    def __init__(self, location: Location, name: str, columns: Sequence[str], schema: pa.Schema) -> None:
        self._location, self._name = location, name
        self._types = dict(zip(schema.names, schema.types, strict=True))
        self._columns = [column for column in columns if column in self._types]
        self._file: IO[bytes] | None = None
        self._batches: Iterator[pa.RecordBatch] = iter(())
        self._position = 0
        self._rest: pa.RecordBatch | None = None

    def read(self, start: int, stop: int, batch_rows: int) -> Iterator[pa.RecordBatch]:
        """Yield rows ``start <= row < stop``."""
        if self._file is None or self._position > start:
            self.close()
            self._file = self._location.open(self._name)
            self._batches = iter(_open_csv(self._file, self._types, self._columns))
            self._position, self._rest = 0, None
        while self._position < stop:
            batch = self._rest if self._rest is not None else next(self._batches, None)
            if batch is None:
                raise OSError(f"it ends before row {self._position}")
            first = min(max(start - self._position, 0), batch.num_rows)
            last = min(first + batch_rows, stop - self._position, batch.num_rows)
            self._position += last
            self._rest = batch.slice(last) if last < batch.num_rows else None
            if first < last:
                yield batch.slice(first, last - first)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


def inspect_jsonl(location: Location, name: str) -> tuple[InputFile, pa.Schema]:
    """Read a file once: its place in the plan and its schema. Raises ``ConfigError``.

    Blank lines are no rows. Texts stay texts, those that look like times too.
    """
    schema, num_rows = pa.schema([]), 0
    try:
        with location.open(name) as file:
            while lines := file.readlines(_INFER_BYTES):
                kept = [line for line in lines if line.strip()]
                if kept:
                    found = _parse_json(kept, None).schema
                    plain = pa.schema([pa.field(field.name, _untimed(field.type)) for field in found])
                    schema = pa.unify_schemas([schema, plain], promote_options="permissive")
                num_rows += len(kept)
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(
            f"input file {location.describe(name)!r} cannot be read as JSON lines "
            f"(after row {num_rows}): {error}"
        ) from error
    return _as_input(location, name, num_rows), schema


def _parse_json(lines: Sequence[bytes], schema: pa.Schema | None) -> pa.Table:
    # A line without an end would run into the next.
    content = b"".join(line if line.endswith(b"\n") else line + b"\n" for line in lines)
    options = pa_json.ParseOptions()
    if schema is not None:
        options = pa_json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore")
    read_options = pa_json.ReadOptions(use_threads=False, block_size=len(content) + 1)
    return pa_json.read_json(io.BytesIO(content), read_options=read_options, parse_options=options)


def _untimed(type_: pa.DataType) -> pa.DataType:
    """``type_`` without the times that the parser sees in texts."""
    t = pa.types
    if t.is_timestamp(type_):
        return pa.string()
    if t.is_list(type_):
        return pa.list_(_untimed(type_.value_type))
    if t.is_struct(type_):
        return pa.struct([pa.field(field.name, _untimed(field.type)) for field in type_])
    return type_


class LineRows:
    """A forward cursor over the lines of one file; going back begins anew. Blank lines are no rows.

    ``schema`` None: the lines are API requests.
    """

    def __init__(
        self, location: Location, name: str, columns: Sequence[str], schema: pa.Schema | None
    ) -> None:
        self._file = location.open(name)
        self._columns = list(columns)
        self._schema = None
        if schema is not None:
            self._schema = pa.schema([field for field in schema if field.name in columns])
        self._position = 0

    def read(self, start: int, stop: int, batch_rows: int) -> Iterator[pa.RecordBatch]:
        """Yield rows ``start <= row < stop``."""
        if self._position > start:
            self._file.seek(0)
            self._position = 0
        lines = (line for line in self._file if line.strip())
        for _ in islice(lines, start - self._position):
            pass
        self._position = start
        while self._position < stop:
            taken = list(islice(lines, min(batch_rows, stop - self._position)))
            if not taken:
                raise OSError(f"it ends before row {self._position}")
            self._position += len(taken)
            yield self._to_batch(taken)

    def _to_batch(self, lines: Sequence[bytes]) -> pa.RecordBatch:
        if self._schema is not None:
            return _parse_json(lines, self._schema).combine_chunks().to_batches()[0]
        table = pa.table(
            [pa.array(values, STRING) for values in zip(*map(read_line, lines), strict=True)],
            names=list(REQUEST_COLUMNS),
        )
        return table.select(self._columns).to_batches()[0]

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def inspect_requests(location: Location, name: str) -> tuple[InputFile, pa.Schema]:
    """A file of API requests: its place in the plan and its schema. Any line is a row."""
    try:
        with location.open(name) as file:
            num_rows = sum(1 for line in file if line.strip())
    except OSError as error:
        raise ConfigError(f"input file {location.describe(name)!r} cannot be read: {error}") from error
    return _as_input(location, name, num_rows), pa.schema([(column, STRING) for column in REQUEST_COLUMNS])


def looks_like_requests(location: Location, name: str) -> bool:
    """Whether a file's first line is an API request."""
    try:
        with location.open(name) as file:
            first = next((line for line in file if line.strip()), b"")
    except OSError as error:
        raise ConfigError(f"input file {location.describe(name)!r} cannot be read: {error}") from error
    return None not in read_line(first)


def _as_input(location: Location, name: str, num_rows: int) -> InputFile:
    digest = hashlib.blake2b(digest_size=16)
    num_bytes = 0
    with location.open(name) as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
            num_bytes += len(piece)
    return InputFile(path=name, num_rows=num_rows, num_bytes=num_bytes, footer=digest.hexdigest())

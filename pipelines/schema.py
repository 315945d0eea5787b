"""The column contract: what an input must have, what an output will have, decided before a row runs.

Owns names and Arrow types and the turning of finished rows into batches of the output's columns; it
must not know files, shards or engines.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from engine.api import SAMPLING_FIELDS, Completion, RequestOutput
from engine.errors import ConfigError
from pipelines.prompt import PROMPT_COLUMNS

STATUS_OK = "ok"
STATUS_ERROR = "error"

# One string type for every output column, whatever flavour the input files use: Parquet stores them
# alike, and 64-bit offsets cannot overflow when slices are put together.
STRING = pa.large_string()
_BINARY = pa.large_binary()

ROW = "row"
"""The journal's key: the row's number in its shard."""

NUM_PREEMPTIONS = "num_preemptions"
"""What a journal knows of a row and its part does not: how it came about is no part of the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRow:
    """What became of one row: an answer, or an error code and its message."""

    row: int
    output: RequestOutput | None = None
    error: str | None = None
    error_message: str | None = None

    def __post_init__(self) -> None:
        assert (self.output is None) != (self.error is None), self


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnContract:
    """The one schema of a job.

    ``passed`` are the input's columns with their unified types, ``answered`` our columns after
    ``row_id``, without the prefix. ``render_columns`` are what a rank has to read.
    """

    passed: pa.Schema
    answered: pa.Schema
    prefix: str
    prompt_column: str
    render_columns: tuple[str, ...]
    is_list: bool

    @property
    def output(self) -> pa.Schema:
        """The schema of every part."""
        ours = [pa.field("row_id", STRING), *self.answered]
        renamed = [pa.field(self.prefix + field.name, field.type) for field in ours]
        return pa.schema([*self.passed, *renamed])

    @property
    def journal(self) -> pa.Schema:
        """The schema of a journal's batches."""
        ours = [pa.field(ROW, pa.int32()), pa.field(NUM_PREEMPTIONS, pa.int32())]
        return pa.schema([*ours, *self.answered])

    def to_batch(self, rows: Sequence[FinishedRow]) -> pa.RecordBatch:
        """Finished rows as a batch of ``journal``."""
        columns = []
        for field in self.journal:
            value_of = _VALUES[field.name]
            columns.append(pa.array([value_of(row, self.is_list) for row in rows], field.type))
        return pa.RecordBatch.from_arrays(columns, schema=self.journal)

    def to_json(self) -> str:
        """A text that tells apart any two contracts, for the plan's fingerprint."""
        names_and_types = [[field.name, str(field.type)] for field in self.output]
        return json.dumps([names_and_types, self.prompt_column, list(self.render_columns)])


def build_contract(
    files: Sequence[tuple[str, pa.Schema]], *, prefix: str, num_samples: int, has_logprobs: bool
) -> ColumnContract:
    """Decide the job's columns from every input file's name and schema.

    Raises ``ConfigError`` for no or several prompt columns, files that disagree, and name clashes.
    """
    passed = _unify_files(files)
    names = passed.names
    prompts = [name for name in PROMPT_COLUMNS if name in names]
    if not prompts:
        raise ConfigError(
            f"the input has no prompt: it needs one column named {', '.join(PROMPT_COLUMNS[:-1])} or "
            f"{PROMPT_COLUMNS[-1]}, and has only {', '.join(map(repr, names)) or 'no columns'}"
        )
    if len(prompts) > 1:
        raise ConfigError(
            f"the input has {' and '.join(map(repr, prompts))}: it must have exactly one of them"
        )
    is_list = num_samples > 1 or "n" in names
    answered = _answered(is_list, has_logprobs or "logprobs" in names)
    clashes = [name for name in names if name in {prefix + ours for ours in ["row_id", *answered.names]}]
    if clashes:
        raise ConfigError(
            f"input column {clashes[0]!r} has the name of an output column; set output.prefix to keep both"
        )
    optional = [name for name in SAMPLING_FIELDS if name in names]
    return ColumnContract(
        passed=passed,
        answered=answered,
        prefix=prefix,
        prompt_column=prompts[0],
        render_columns=(prompts[0], *optional),
        is_list=is_list,
    )


def _answered(is_list: bool, has_logprobs: bool) -> pa.Schema:
    def per_sample(type_: pa.DataType) -> pa.DataType:
        return pa.list_(type_) if is_list else type_

    fields = [
        pa.field("completion", per_sample(STRING)),
        pa.field("completion_token_ids", per_sample(pa.list_(pa.int32()))),
        pa.field("finish_reason", per_sample(STRING)),
        pa.field("status", STRING),
        pa.field("error", STRING),
        pa.field("error_message", STRING),
        pa.field("num_prompt_tokens", pa.int32()),
        pa.field("num_completion_tokens", per_sample(pa.int32())),
        pa.field("num_cached_tokens", pa.int32()),
        pa.field("output_digest", per_sample(STRING)),
    ]
    if has_logprobs:
        top = pa.struct([pa.field("token_id", pa.int32()), pa.field("logprob", pa.float32())])
        fields.append(pa.field("logprobs", per_sample(pa.list_(pa.float32()))))
        fields.append(pa.field("top_logprobs", per_sample(pa.list_(pa.list_(top)))))
    return pa.schema(fields)


_Value = Callable[[FinishedRow, bool], Any]


def _of_samples(value_of: Callable[[Completion], Any]) -> _Value:
    def value(row: FinishedRow, is_list: bool) -> Any:
        if row.output is None:
            return None
        values = [value_of(completion) for completion in row.output.completions]
        return values if is_list else values[0]

    return value


def _of_output(value_of: Callable[[RequestOutput], Any]) -> _Value:
    return lambda row, is_list: None if row.output is None else value_of(row.output)


def _logprobs(completion: Completion) -> list[float] | None:
    return None if completion.top_logprobs is None else list(completion.logprobs)


def _top_logprobs(completion: Completion) -> list[list[dict[str, Any]]] | None:
    if completion.top_logprobs is None:
        return None
    return [
        [{"token_id": i, "logprob": p} for i, p in zip(top.token_ids, top.logprobs, strict=True)]
        for top in completion.top_logprobs
    ]


_VALUES: dict[str, _Value] = {
    ROW: lambda row, is_list: row.row,
    NUM_PREEMPTIONS: _of_output(lambda o: o.num_preemptions),
    "completion": _of_samples(lambda c: c.text),
    "completion_token_ids": _of_samples(lambda c: list(c.token_ids)),
    "finish_reason": _of_samples(lambda c: c.finish_reason.value),
    "status": lambda row, is_list: STATUS_ERROR if row.output is None else STATUS_OK,
    "error": lambda row, is_list: row.error,
    "error_message": lambda row, is_list: row.error_message,
    "num_prompt_tokens": _of_output(lambda o: o.num_prompt_tokens),
    "num_completion_tokens": _of_samples(lambda c: len(c.token_ids)),
    "num_cached_tokens": _of_output(lambda o: o.num_cached_tokens),
    "output_digest": _of_samples(lambda c: c.output_digest),
    "logprobs": _of_samples(_logprobs),
    "top_logprobs": _of_samples(_top_logprobs),
}


def _unify_files(files: Sequence[tuple[str, pa.Schema]]) -> pa.Schema:
    first_name, first = files[0]
    for name, schema in files:
        repeated = [column for column in schema.names if schema.names.count(column) > 1]
        if repeated:
            raise ConfigError(f"input file {name!r} has two columns named {repeated[0]!r}")
    types = {field.name: _plain(field.type) for field in first}
    for name, schema in files[1:]:
        missing = sorted(types.keys() - set(schema.names))
        extra = sorted(set(schema.names) - types.keys())
        if missing:
            raise ConfigError(f"input file {name!r} lacks column {missing[0]!r}, which {first_name!r} has")
        if extra:
            raise ConfigError(f"input file {name!r} has column {extra[0]!r}, which {first_name!r} lacks")
        for field in schema:
            unified = _unify(types[field.name], _plain(field.type))
            if unified is None:
                raise ConfigError(
                    f"column {field.name!r} is {field.type} in input file {name!r} "
                    f"but {types[field.name]} before it: one type is needed"
                )
            types[field.name] = unified
    return pa.schema([pa.field(name, type_) for name, type_ in types.items()])


def _plain(type_: pa.DataType) -> pa.DataType:
    """``type_`` with every string or binary flavour inside it made the one we write."""
    t = pa.types
    if t.is_string(type_) or t.is_large_string(type_) or t.is_string_view(type_):
        return STRING
    if t.is_binary(type_) or t.is_large_binary(type_) or t.is_binary_view(type_):
        return _BINARY
    if t.is_dictionary(type_):
        plain = _plain(type_.value_type)
        return plain if plain in (STRING, _BINARY) else type_
    if t.is_large_list(type_) or t.is_large_list_view(type_):
        return pa.large_list(_plain(type_.value_type))
    if t.is_list(type_) or t.is_list_view(type_):
        return pa.list_(_plain(type_.value_type))
    if t.is_fixed_size_list(type_):
        return pa.list_(_plain(type_.value_type), type_.list_size)
    if t.is_map(type_):
        return pa.map_(_plain(type_.key_type), _plain(type_.item_type))
    if t.is_struct(type_):
        return pa.struct([pa.field(f.name, _plain(f.type), f.nullable) for f in type_])
    return type_


def _unify(a: pa.DataType, b: pa.DataType) -> pa.DataType | None:
    """The type that holds the values of both, both already plain; None when there is none."""
    t = pa.types
    if a.equals(b) or t.is_null(b):
        return a
    if t.is_null(a):
        return b
    if (t.is_list(a) or t.is_large_list(a)) and (t.is_list(b) or t.is_large_list(b)):
        inner = _unify(a.value_type, b.value_type)
        is_large = t.is_large_list(a) or t.is_large_list(b)
        return None if inner is None else (pa.large_list(inner) if is_large else pa.list_(inner))
    if t.is_struct(a) and t.is_struct(b) and [f.name for f in a] == [f.name for f in b]:
        pairs = [(x.name, _unify(x.type, y.type)) for x, y in zip(a, b, strict=True)]
        return None if any(u is None for _, u in pairs) else pa.struct(pairs)
    if (t.is_integer(a) or t.is_floating(a)) and (t.is_integer(b) or t.is_floating(b)):
        return _wider_number(a, b)
    return None


def _wider_number(a: pa.DataType, b: pa.DataType) -> pa.DataType | None:
    t = pa.types
    if t.is_integer(a) != t.is_integer(b):
        # Whole numbers beyond 2**53 would change when made floating.
        return pa.float64() if (a if t.is_integer(a) else b).bit_width <= 32 else None
    if pa.uint64() in (a, b) and (t.is_signed_integer(a) or t.is_signed_integer(b)):
        return None
    unified = pa.unify_schemas([pa.schema([("x", a)]), pa.schema([("x", b)])], promote_options="permissive")
    return unified.field("x").type

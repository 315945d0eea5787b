"""The column contract: what an input must have, what an output will have, decided before a row runs.

Owns names and Arrow types and the turning of finished rows into batches of the output's columns; it
must not know files, shards or engines.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from engine.api import SAMPLING_FIELDS, Completion, RequestOutput
from engine.errors import ConfigError
from pipelines.chat import CHAT_COLUMNS
from pipelines.column_types import STRING as STRING
from pipelines.column_types import check_convertible, check_writable, unify_files
from pipelines.openai_batch import REQUEST_COLUMNS
from pipelines.prompt import PROMPT_COLUMNS

STATUS_OK = "ok"
STATUS_ERROR = "error"

_NEAR = 0.85
"""How alike a name that is misspelt is to the right one: a letter of seven may be wrong."""

ROW = "row"
"""The journal's key: the row's number in its shard."""

NUM_PREEMPTIONS = "num_preemptions"
"""What a journal knows of a row and its part does not: how it came about is no part of the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRow:
    """What became of one row: an answer, or an error code and its message.

    ``prompt_token_ids`` and ``reasoning`` (one a sample) are for the columns of those names, where a
    job has them; the texts of ``output`` are then without the reasoning.
    """

    row: int
    output: RequestOutput | None = None
    prompt_token_ids: Sequence[int] | None = None
    reasoning: tuple[str | None, ...] | None = None
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
        return pa.schema([*self.passed, *renamed], self.passed.metadata)

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
        columns = self.output.to_string(truncate_metadata=False, show_field_metadata=True)
        return json.dumps([columns, self.prompt_column, list(self.render_columns)])


def find_near_misses(columns: Iterable[str]) -> list[tuple[str, str]]:
    """Columns whose names are all but those of a parameter or of a prompt, each with that name."""
    known = (*SAMPLING_FIELDS, *CHAT_COLUMNS, *PROMPT_COLUMNS)
    found: dict[str, str] = {}
    for column in columns:
        plain = column.lower().replace("-", "_").replace(" ", "_")
        near = difflib.get_close_matches(plain, known, n=1, cutoff=_NEAR)
        if column not in known and near:
            found[column] = near[0]
    return sorted(found.items())


def build_contract(
    files: Sequence[tuple[str, pa.Schema]],
    *,
    prefix: str,
    num_samples: int,
    has_logprobs: bool,
    has_reasoning: bool = False,
    has_prompt_token_ids: bool = False,
    columns: Sequence[str] | None = None,
    fill_missing: bool = False,
    is_requests: bool = False,
) -> ColumnContract:
    """Decide the job's columns from every input file's name and schema.

    ``columns`` are those that pass through (None: all). ``fill_missing`` puts nulls where a file lacks a
    column. ``is_requests`` says that rows are API requests, each with any parameters. Raises
    ``ConfigError`` for no or several prompt columns, files that disagree, and name clashes.
    """
    found = unify_files(files, fill_missing=fill_missing)
    names = found.names
    prompt_column, render_columns = ("body", REQUEST_COLUMNS) if is_requests else _find_prompt(names)
    is_list = num_samples > 1 or "n" in names or is_requests
    answered = _answered(
        is_list,
        has_logprobs=has_logprobs or "logprobs" in names or is_requests,
        has_reasoning=has_reasoning,
        has_prompt_token_ids=has_prompt_token_ids,
    )
    passed = _choose(found, columns)
    check_writable(passed)
    check_convertible(files, passed)
    clashes = set(passed.names) & {prefix + ours for ours in ["row_id", *answered.names]}
    if clashes:
        raise ConfigError(
            f"input column {min(clashes)!r} has the name of an output column; set output.prefix to keep "
            "both, or leave it out with output.columns"
        )
    return ColumnContract(
        passed=passed,
        answered=answered,
        prefix=prefix,
        prompt_column=prompt_column,
        render_columns=render_columns,
        is_list=is_list,
    )


def _find_prompt(names: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """The prompt column, and all columns that say how its rows are answered."""
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
    overrides = (*SAMPLING_FIELDS, *CHAT_COLUMNS) if prompts[0] == "messages" else SAMPLING_FIELDS
    return prompts[0], (prompts[0], *(name for name in overrides if name in names))


def _choose(found: pa.Schema, columns: Sequence[str] | None) -> pa.Schema:
    if columns is None:
        return found
    unknown = [name for name in columns if name not in found.names]
    if unknown:
        raise ConfigError(
            f"output.columns names {unknown[0]!r}, which the input lacks: it has {', '.join(found.names)}"
        )
    return pa.schema([field for field in found if field.name in columns], found.metadata)


def _answered(
    is_list: bool, *, has_logprobs: bool, has_reasoning: bool, has_prompt_token_ids: bool
) -> pa.Schema:
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
    if has_reasoning:
        fields.insert(0, pa.field("reasoning", per_sample(STRING)))
    if has_prompt_token_ids:
        fields.append(pa.field("prompt_token_ids", pa.list_(pa.int32())))
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


def _reasoning(row: FinishedRow, is_list: bool) -> Any:
    if row.reasoning is None:
        return None
    return list(row.reasoning) if is_list else row.reasoning[0]


def _logprobs(completion: Completion) -> list[float] | None:
    return None if completion.top_logprobs is None else list(completion.logprobs)


def _top_logprobs(completion: Completion) -> list[list[dict[str, Any]]] | None:
    if completion.top_logprobs is None:
        return None
    return [
        [{"token_id": i, "logprob": p} for i, p in zip(top.token_ids, top.logprobs, strict=True)]
        for top in completion.top_logprobs
    ]


def _error_message(row: FinishedRow, is_list: bool) -> str | None:
    """It may quote the row, and JSON can say half a surrogate pair, which no text can hold."""
    message = row.error_message
    return None if message is None else message.encode("utf-8", "backslashreplace").decode()


_VALUES: dict[str, _Value] = {
    ROW: lambda row, is_list: row.row,
    NUM_PREEMPTIONS: _of_output(lambda o: o.num_preemptions),
    "reasoning": _reasoning,
    "completion": _of_samples(lambda c: c.text),
    "completion_token_ids": _of_samples(lambda c: list(c.token_ids)),
    "finish_reason": _of_samples(lambda c: c.finish_reason.value),
    "status": lambda row, is_list: STATUS_ERROR if row.output is None else STATUS_OK,
    "error": lambda row, is_list: row.error,
    "error_message": _error_message,
    "num_prompt_tokens": _of_output(lambda o: o.num_prompt_tokens),
    "num_completion_tokens": _of_samples(lambda c: len(c.token_ids)),
    "num_cached_tokens": _of_output(lambda o: o.num_cached_tokens),
    "output_digest": _of_samples(lambda c: c.output_digest),
    "prompt_token_ids": lambda row, is_list: row.prompt_token_ids,
    "logprobs": _of_samples(_logprobs),
    "top_logprobs": _of_samples(_top_logprobs),
}

"""The column contract: what is refused, what is unified, what finished rows become."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from engine import Completion, ConfigError, FinishReason, RequestOutput, TokenLogprobs
from pipelines.schema import ColumnContract, FinishedRow, build_contract, find_near_misses

L = pa.large_string()


def contract(
    *schemas: pa.Schema, prefix: str = "", num_samples: int = 1, has_logprobs: bool = False
) -> ColumnContract:
    files = [(f"{index}.parquet", schema) for index, schema in enumerate(schemas)]
    return build_contract(files, prefix=prefix, num_samples=num_samples, has_logprobs=has_logprobs)


def schema(**types: pa.DataType) -> pa.Schema:
    return pa.schema(list(types.items()))


def test_output_columns_in_order() -> None:
    found = contract(schema(prompt=pa.string(), id=pa.int64()))
    assert found.output.names == [
        "prompt",
        "id",
        "row_id",
        "completion",
        "completion_token_ids",
        "finish_reason",
        "status",
        "error",
        "error_message",
        "num_prompt_tokens",
        "num_completion_tokens",
        "num_cached_tokens",
        "output_digest",
    ]
    assert (found.prompt_column, found.render_columns) == ("prompt", ("prompt",))


@pytest.mark.parametrize("name", ["prompt", "messages", "prompt_token_ids"])
def test_sampling_columns_are_read_with_the_prompt(name: str) -> None:
    found = contract(
        schema(**{"temperature": pa.float64(), "id": pa.int64(), name: pa.null(), "seed": pa.int64()})
    )
    assert found.render_columns == (name, "temperature", "seed")


@pytest.mark.parametrize(
    ("schemas", "says"),
    [
        ([schema(text=pa.string())], "has no prompt"),
        ([schema(prompt=pa.string(), messages=pa.null())], "'prompt' and 'messages'.*exactly one"),
        ([schema(prompt=pa.string(), status=pa.int8())], "'status' has the name of an output column"),
        ([schema(prompt=pa.string(), logprobs=pa.int8())], "'logprobs' has the name of an output column"),
        ([pa.schema([("prompt", pa.string()), ("a", pa.int8()), ("a", pa.int8())])], "two columns named 'a'"),
        (
            [schema(prompt=pa.string(), a=pa.int8()), schema(prompt=pa.string())],
            "1.parquet' lacks column 'a'",
        ),
        ([schema(prompt=pa.string()), schema(prompt=pa.string(), b=L)], "1.parquet' has column 'b', which"),
        (
            [schema(prompt=pa.string(), a=pa.int8()), schema(prompt=pa.string(), a=pa.string())],
            "column 'a' is string in input file '1.parquet' but int8 before it",
        ),
    ],
)
def test_refusals(schemas: list[pa.Schema], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        contract(*schemas)


def test_a_prefix_keeps_both_columns() -> None:
    found = contract(schema(prompt=pa.string(), status=pa.int8()), prefix="out_")
    assert {"status", "out_status", "out_row_id"} <= set(found.output.names)
    with pytest.raises(ConfigError, match="'out_status'"):
        contract(schema(prompt=pa.string(), out_status=pa.int8()), prefix="out_")


@pytest.mark.parametrize(
    ("first", "second", "unified"),
    [
        (pa.string(), pa.large_string(), L),
        (pa.dictionary(pa.int32(), pa.string()), pa.string_view(), L),
        (pa.null(), pa.int16(), pa.int16()),
        (pa.struct([("a", pa.int8())]), pa.null(), pa.struct([("a", pa.int8())])),
        (pa.list_(pa.string()), pa.large_list(pa.large_string()), pa.large_list(L)),
        (pa.list_(pa.null()), pa.list_(pa.int64()), pa.list_(pa.int64())),
        (pa.int8(), pa.int64(), pa.int64()),
        (pa.float32(), pa.int16(), pa.float64()),
        (pa.struct([("a", pa.null())]), pa.struct([("a", pa.string())]), pa.struct([("a", L)])),
        (pa.timestamp("us", "UTC"), pa.timestamp("us", "UTC"), pa.timestamp("us", "UTC")),
        (
            pa.dictionary(pa.int8(), pa.int64()),
            pa.dictionary(pa.int8(), pa.int64()),
            pa.dictionary(pa.int8(), pa.int64()),
        ),
        (pa.binary(), pa.binary_view(), pa.large_binary()),
        (pa.map_(pa.string(), pa.int8()), pa.map_(pa.string(), pa.int8()), pa.map_(L, pa.int8())),
    ],
)
def test_types_unify(first: pa.DataType, second: pa.DataType, unified: pa.DataType) -> None:
    for pair in ((first, second), (second, first)):
        found = contract(*(schema(prompt=pa.string(), x=type_) for type_ in pair))
        assert found.passed.field("x").type == unified


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (pa.int64(), pa.float64()),  # beyond 2**53 a whole number would change
        (pa.int64(), pa.string()),
        (pa.timestamp("us"), pa.timestamp("us", "UTC")),
        (pa.struct([("a", pa.int8())]), pa.struct([("b", pa.int8())])),
        (pa.uint64(), pa.int64()),
    ],
)
def test_types_that_do_not_unify_are_refused(first: pa.DataType, second: pa.DataType) -> None:
    with pytest.raises(ConfigError, match="one type is needed"):
        contract(*(schema(prompt=pa.string(), x=type_) for type_ in (first, second)))


def completion(index: int, ids: tuple[int, ...], **fields: Any) -> Completion:
    return Completion(
        index=index,
        token_ids=ids,
        text=f"text {index}",
        finish_reason=FinishReason.LENGTH,
        logprobs=tuple(-0.5 for _ in ids),
        **fields,
    )


def test_finished_rows_become_columns() -> None:
    found = contract(schema(prompt=pa.string()))
    answer = completion(0, (5, 6))
    output = RequestOutput(request_id="x", completions=(answer,), num_prompt_tokens=3, num_cached_tokens=2)
    batch = found.to_batch(
        [
            FinishedRow(row=4, output=output),
            FinishedRow(row=2, error="empty_prompt", error_message="no tokens"),
        ]
    )
    ok, error = batch.to_pylist()
    assert ok == {
        "row": 4,
        "num_preemptions": 0,
        "completion": "text 0",
        "completion_token_ids": [5, 6],
        "finish_reason": "length",
        "status": "ok",
        "error": None,
        "error_message": None,
        "num_prompt_tokens": 3,
        "num_completion_tokens": 2,
        "num_cached_tokens": 2,
        "output_digest": answer.output_digest,
    }
    assert {name for name, value in error.items() if value is not None} == {
        "row",
        "status",
        "error",
        "error_message",
    }
    assert (error["status"], error["error"]) == ("error", "empty_prompt")


def test_several_samples_make_lists_and_one_row_still() -> None:
    top = TokenLogprobs(token_ids=(1, 2), logprobs=(-0.25, -2.0))
    completions = (completion(0, (5,), top_logprobs=(top,)), completion(1, (6, 7), top_logprobs=(top, top)))
    output = RequestOutput(request_id="x", completions=completions, num_prompt_tokens=3)
    found = contract(schema(prompt=pa.string()), num_samples=2, has_logprobs=True)
    (row,) = found.to_batch([FinishedRow(row=0, output=output)]).to_pylist()
    assert row["completion"] == ["text 0", "text 1"]
    assert row["completion_token_ids"] == [[5], [6, 7]]
    assert row["num_completion_tokens"] == [1, 2]
    assert row["logprobs"] == [[-0.5], [-0.5, -0.5]]
    assert row["top_logprobs"][0] == [[{"token_id": 1, "logprob": -0.25}, {"token_id": 2, "logprob": -2.0}]]
    assert row["status"] == "ok"


def test_a_column_n_makes_lists_too() -> None:
    assert contract(schema(prompt=pa.string(), n=pa.int64())).is_list


def test_reasoning_and_what_was_fed_have_columns_when_asked_for() -> None:
    files = [("a", schema(messages=pa.string(), thinking=pa.bool_(), top_k=pa.int32()))]
    plain = build_contract(files, prefix="", num_samples=1, has_logprobs=False)
    assert plain.render_columns == ("messages", "top_k", "thinking")
    found = build_contract(
        files,
        prefix="",
        num_samples=1,
        has_logprobs=False,
        has_reasoning=True,
        has_prompt_token_ids=True,
    )
    assert set(found.output.names) - set(plain.output.names) == {"reasoning", "prompt_token_ids"}
    output = RequestOutput(request_id="x", completions=(completion(0, (5,)),), num_prompt_tokens=2)
    rows = [
        FinishedRow(row=0, output=output, prompt_token_ids=[1, 2], reasoning=("because",)),
        FinishedRow(row=1, error="empty_prompt", error_message="no tokens"),
    ]
    values = found.to_batch(rows).select(["reasoning", "completion", "prompt_token_ids"]).to_pylist()
    assert values[0] == {"reasoning": "because", "completion": "text 0", "prompt_token_ids": [1, 2]}
    assert set(values[1].values()) == {None}


def test_names_that_are_all_but_ours_are_found_and_others_left_alone() -> None:
    near = {"temprature": "temperature", "max_token": "max_tokens", "top-p": "top_p", "Promt": "prompt"}
    others = ["prompt", "top_k", "n", "id", "text", "title", "system", "url", "name", "temp", "token"]
    assert dict(find_near_misses([*near, *others])) == near

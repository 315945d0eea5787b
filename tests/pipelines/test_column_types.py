"""Pass-through columns: any value of any type that Parquet holds comes out as it went in."""

from __future__ import annotations

import datetime
import random
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from engine import ConfigError
from pipelines.column_types import unify_files
from pipelines.driver import Outcome
from pipelines.manifest import OutputFolder
from pipelines.schema import build_contract
from tests.small_jobs import make_plan, read_output, start_run

Maker = Callable[[random.Random], Any]


def _text(random_: random.Random) -> str:
    return "".join(random_.choice("ab é中\U0001f600\0") for _ in range(random_.randrange(5)))


def _bytes(random_: random.Random) -> bytes:
    return random_.randbytes(random_.randrange(5))


def _whole(type_: pa.DataType, bits: int, *, is_signed: bool = True) -> tuple[pa.DataType, Maker]:
    low = -(2 ** (bits - 1)) if is_signed else 0
    high = 2 ** (bits - 1 if is_signed else bits) - 1
    return type_, lambda random_: random_.choice([low, high, random_.randint(low, high)])


def _decimal(type_: pa.DataType) -> tuple[pa.DataType, Maker]:
    def make(random_: random.Random) -> Decimal:
        digits = tuple(random_.randrange(10) for _ in range(type_.precision))
        return Decimal((random_.randrange(2), digits, -type_.scale))

    return type_, make


LEAVES: list[tuple[pa.DataType, Maker]] = [
    (pa.null(), lambda random_: None),
    (pa.bool_(), lambda random_: random_.random() < 0.5),
    *[_whole(type_, bits) for type_, bits in ((pa.int8(), 8), (pa.int32(), 32), (pa.int64(), 64))],
    *[_whole(type_, bits, is_signed=False) for type_, bits in ((pa.uint16(), 16), (pa.uint64(), 64))],
    (pa.float32(), lambda random_: random_.choice([0.5, -0.0, float("inf"), 2.0**-149])),
    (pa.float64(), lambda random_: random_.choice([0.1, -0.0, float("-inf"), random_.random()])),
    (
        pa.date32(),
        lambda random_: datetime.date(1970, 1, 1) + datetime.timedelta(random_.randrange(-999, 999)),
    ),
    *[
        (pa.timestamp(unit, zone), lambda random_: random_.randrange(-(2**60), 2**60))
        for unit in ("ms", "us", "ns")
        for zone in (None, "UTC", "Europe/Berlin")
    ],
    (pa.time32("ms"), lambda random_: random_.randrange(86_400_000)),
    (pa.time64("ns"), lambda random_: random_.randrange(86_400 * 10**9)),
    *[(pa.duration(unit), lambda random_: random_.randrange(-(2**40), 2**40)) for unit in ("s", "ns")],
    *[_decimal(type_) for type_ in (pa.decimal128(20, 4), pa.decimal256(60, 5))],
    *[(type_, _text) for type_ in (pa.string(), pa.large_string())],
    *[(type_, _bytes) for type_ in (pa.binary(), pa.large_binary())],
    (pa.binary(3), lambda random_: random_.randbytes(3)),
    *[(pa.dictionary(pa.int32(), type_), _text) for type_ in (pa.string(), pa.large_string())],
]


MAX_DEPTH = 3

VIEWS: list[tuple[pa.DataType, Maker]] = [(pa.string_view(), _text), (pa.binary_view(), _bytes)]
"""Not inside others: Arrow cannot write them there in several row groups."""


def random_type(random_: random.Random, depth: int) -> tuple[pa.DataType, Maker]:
    """A type of at most ``depth`` levels and a maker of its values, of which some are null."""
    kind = random_.randrange(6) if depth else 0
    if kind <= 1:
        type_, make = random_.choice([*LEAVES, *VIEWS] if depth == MAX_DEPTH else LEAVES)
        return type_, lambda random_: None if random_.random() < 0.2 else make(random_)
    inner, make_inner = random_type(random_, depth - 1)
    if kind == 2:
        other, make_other = random_type(random_, depth - 1)
        fields = [pa.field("a", inner, metadata={"unit": "m"}), pa.field("b c", other)]
        return pa.struct(fields), _sometimes(lambda r: {"a": make_inner(r), "b c": make_other(r)})
    if kind == 3:
        return pa.list_(inner, 2), _sometimes(lambda r: [make_inner(r), make_inner(r)])
    if kind == 4:
        keys = lambda r: [f"k{i}" for i in range(r.randrange(3))]  # noqa: E731
        return pa.map_(pa.string(), inner), _sometimes(lambda r: [(key, make_inner(r)) for key in keys(r)])
    list_of = random_.choice([pa.list_, pa.large_list, pa.list_view, pa.large_list_view])
    return list_of(inner), _sometimes(lambda r: [make_inner(r) for _ in range(r.randrange(4))])


def _sometimes(make: Maker) -> Maker:
    return lambda random_: None if random_.random() < 0.2 else make(random_)


def random_tables(random_: random.Random) -> list[pa.Table]:
    """A few tables of one random schema, in chunks; in some, some columns are all null, and of type null."""
    columns = {"prompt_token_ids": (pa.list_(pa.int32()), lambda random_: [1])}
    columns |= {f"c.{i}": random_type(random_, MAX_DEPTH) for i in range(6)}
    tables = []
    for index in range(random_.randrange(1, 4)):
        is_null = {name: name.startswith("c.") and random_.random() < 0.15 for name in columns}
        fields = [
            pa.field(name, pa.null() if is_null[name] else type_, metadata={"about": name})
            for name, (type_, _) in columns.items()
        ]
        schema = pa.schema(fields, metadata={"owner": "me", "part": str(index)})
        chunks = [schema.empty_table()]
        for num_rows in [random_.randrange(9) for _ in range(random_.randrange(4))]:
            values = (
                [None if is_null[name] else make(random_) for _ in range(num_rows)]
                for name, (_, make) in columns.items()
            )
            arrays = [pa.array(column, field.type) for column, field in zip(values, fields, strict=True)]
            chunks.append(pa.Table.from_arrays(arrays, schema=schema))
        tables.append(pa.concat_tables(chunks))
    return tables


@pytest.mark.parametrize("seed", range(25))
def test_random_nested_tables_come_out_as_they_went_in(tmp_path: Path, seed: int) -> None:
    print("seed", seed)
    random_ = random.Random(seed)
    tables = random_tables(random_)
    (tmp_path / "in").mkdir()
    for index, table in enumerate(tables):
        path = tmp_path / "in" / f"{index}.parquet"
        with pq.ParquetWriter(path, table.schema) as writer:
            for batch in table.to_batches():
                writer.write_batch(batch)
    folder = OutputFolder(tmp_path / "out")
    plan = make_plan(tmp_path / "in", rows_per_shard=random_.randrange(1, 9))
    driver, _ = start_run(folder, plan)
    assert driver.run() is Outcome.COMMITTED
    output = read_output(folder.path)
    for name in tables[0].column_names:
        before = [value for table in tables for value in as_text(table.column(name))]
        assert as_text(output.column(name)) == before, output.schema.field(name)
    assert output.schema.metadata[b"owner"] == b"me"
    assert (b"part" in output.schema.metadata) == (len(tables) == 1), "files disagree about it"
    assert output.schema.field("c.0").metadata == {b"about": b"c.0"}


def as_text(column: pa.ChunkedArray) -> list[str]:
    """Values in a form that shows each bit of them, and neither the flavour of a text nor of a list."""
    return [_text_of(scalar) for scalar in column]


def _text_of(scalar: pa.Scalar) -> str:
    type_, t = scalar.type, pa.types
    if not scalar.is_valid:
        return "null"
    if t.is_dictionary(type_):
        return _text_of(scalar.value)
    if t.is_struct(type_):
        return "{" + ", ".join(f"{name}: {_text_of(value)}" for name, value in scalar.items()) + "}"
    if t.is_nested(type_):
        return "[" + ", ".join(map(_text_of, scalar.values)) + "]"
    if t.is_temporal(type_):
        return f"{scalar.value} {type_}"
    return repr(scalar.as_py())


@pytest.mark.parametrize(
    "type_",
    [
        pa.struct([]),
        pa.list_(pa.struct([])),
        pa.dense_union([pa.field("a", pa.int8())]),
        pa.run_end_encoded(pa.int32(), pa.int8()),
        pa.month_day_nano_interval(),
        pa.dictionary(pa.int8(), pa.list_(pa.int8())),
    ],
)
def test_what_parquet_cannot_hold_is_refused_and_may_be_left_out(type_: pa.DataType) -> None:
    files = [("a", pa.schema([("prompt", pa.string()), ("odd", type_)]))]
    with pytest.raises(ConfigError, match=r"column 'odd' is .*Parquet cannot hold"):
        build_contract(files, prefix="", num_samples=1, has_logprobs=False)
    found = build_contract(files, prefix="", num_samples=1, has_logprobs=False, columns=["prompt"])
    assert found.passed.names == ["prompt"]


def test_a_type_that_cannot_be_made_the_one_we_write_is_refused() -> None:
    types = (pa.string(), pa.dictionary(pa.int8(), pa.string_view()))
    files = [(f"{i}", pa.schema([("prompt", pa.string()), ("odd", type_)])) for i, type_ in enumerate(types)]
    with pytest.raises(
        ConfigError, match=r"column 'odd' is dictionary.* in input file '1' and cannot be made"
    ):
        build_contract(files, prefix="", num_samples=1, has_logprobs=False)
    build_contract(files, prefix="", num_samples=1, has_logprobs=False, columns=["prompt"])


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (pa.timestamp("s"), pa.timestamp("ms")),
        (pa.timestamp("s", "UTC"), pa.timestamp("ms", "UTC")),
        (pa.time32("s"), pa.time32("ms")),
        (pa.date64(), pa.date32()),
        (pa.dictionary(pa.int8(), pa.int64()), pa.int64()),
        (pa.dictionary(pa.int8(), pa.float64()), pa.float64()),
    ],
)
def test_conversions_of_parquet_itself(tmp_path: Path, written: pa.DataType, read: pa.DataType) -> None:
    pq.write_table(pa.schema([("x", written)]).empty_table(), tmp_path / "a.parquet")
    assert pq.read_schema(tmp_path / "a.parquet").field("x").type == read, "the README says otherwise"


def test_columns_that_are_missing_are_filled_where_that_is_asked_for() -> None:
    files = [
        ("a", pa.schema([pa.field("prompt", pa.string(), nullable=False), ("x", pa.int8())])),
        ("b", pa.schema([pa.field("prompt", pa.string(), nullable=False), ("y", pa.null())])),
        ("c", pa.schema([("y", pa.string())])),
    ]
    with pytest.raises(ConfigError, match=r"'b' lacks column 'x'.*input\.missing_columns"):
        unify_files(files)
    found = unify_files(files, fill_missing=True)
    assert found.names == ["prompt", "x", "y"]
    assert found.field("prompt").nullable
    assert found.field("y").type == pa.large_string()


def test_filled_columns_are_null_in_the_output_and_a_filled_prompt_is_an_error_row(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    ids = pa.array([[1], [2]], pa.list_(pa.int32()))
    pq.write_table(pa.table({"prompt_token_ids": ids, "x": [1, 2]}), tmp_path / "in" / "a.parquet")
    pq.write_table(pa.table({"y": [["p"], None]}), tmp_path / "in" / "b.parquet")
    pq.write_table(pa.table({"y": pa.nulls(0)}), tmp_path / "in" / "c.parquet")
    folder = OutputFolder(tmp_path / "out")
    driver, _ = start_run(folder, make_plan(tmp_path / "in", contract={"fill_missing": True}))
    driver.run()
    output = read_output(folder.path)
    assert output.column("x").to_pylist() == [1, 2, None, None]
    assert output.column("y").to_pylist() == [None, None, ["p"], None]
    assert output.column("error").to_pylist() == [None, None, "null_prompt", "null_prompt"]


@pytest.mark.parametrize("columns", [[], ["b", "a.x"]])
def test_chosen_columns(tmp_path: Path, columns: list[str]) -> None:
    table = {"prompt_token_ids": [[1]] * 3, "a.x": [1, 2, 3], "a": [{"x": 1}] * 3, "b": list("pqr")}
    pq.write_table(pa.table(table), tmp_path / "in.parquet")
    folder = OutputFolder(tmp_path / "out")
    driver, _ = start_run(folder, make_plan(tmp_path / "in.parquet", contract={"columns": columns}))
    driver.run()
    output = read_output(folder.path)
    passed = output.column_names[: output.column_names.index("row_id")]
    assert passed == [name for name in table if name in columns], "in the input's order"
    for name in columns:
        assert output.column(name).to_pylist() == table[name]
    assert output.column("row_id").to_pylist() == [f"in.parquet#{i}" for i in range(3)]


def test_an_unknown_chosen_column_is_refused() -> None:
    files = [("a", pa.schema([("prompt", pa.string())]))]
    with pytest.raises(ConfigError, match=r"output\.columns names 'x', which the input lacks"):
        build_contract(files, prefix="", num_samples=1, has_logprobs=False, columns=["x"])

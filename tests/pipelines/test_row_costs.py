"""What rows are taken to cost, for every kind of prompt, and which are found to begin alike."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.row_costs import RowCosts, estimate_costs, find_early
from pipelines.source import RowReader
from tests.small_jobs import make_plan


def costs_of(tmp_path: Path, table: pa.Table, **settings: Any) -> RowCosts:
    pq.write_table(table, tmp_path / "in.parquet")
    plan = make_plan(tmp_path / "in.parquet", 1000, **settings)
    reader = RowReader(plan.root, plan.kind, plan.files, plan.contract.render_columns)
    return estimate_costs(reader, plan, plan.shards[0])


def test_every_kind_of_prompt_has_a_length(tmp_path: Path) -> None:
    few = {"sampling.max_tokens": 3}
    texts = ["x" * 40, None, "", "é" * 40]
    assert list(costs_of(tmp_path, pa.table({"prompt": texts}), **few).tokens) == [13, 3, 3, 23]
    ids = pa.array([[7] * 10, None, [], [1]], pa.list_(pa.int32()))
    assert list(costs_of(tmp_path, pa.table({"prompt_token_ids": ids}), **few).tokens) == [13, 3, 3, 4]
    messages = [[{"role": "user", "content": "x" * 400}], None, []]
    found = list(costs_of(tmp_path, pa.table({"messages": messages}), **few).tokens)
    assert found[0] == pytest.approx(103, abs=2)
    assert found[1:] == [3, 3]
    binary = pa.array([b"\xff" * 40], pa.binary())
    assert list(costs_of(tmp_path, pa.table({"prompt": binary}), **few).tokens) == [13]
    dictionary = pa.array([b"\xff" * 40]).view(pa.string()).dictionary_encode()
    assert list(costs_of(tmp_path, pa.table({"prompt": dictionary}), **few).tokens) == [13]


def test_what_python_cannot_hold_is_not_read(tmp_path: Path) -> None:
    far = pa.array([2**62], pa.timestamp("us"))
    twice = pa.StructArray.from_arrays([far, pa.array(["x" * 40])], ["a", "a"])
    mapped = pa.array([[("k", "x" * 40)]], pa.map_(pa.string(), pa.string()))
    few = {"sampling.max_tokens": 3}
    for prompt, least in ((far, 3), (twice, 13), (mapped, 13)):
        table = pa.table({"messages": prompt, "max_tokens": far, "n": twice})
        assert least <= costs_of(tmp_path, table, **few).tokens[0] <= least + 1
    ids = pa.array([[2**64 - 1]], pa.list_(pa.uint64()))
    assert list(costs_of(tmp_path, pa.table({"prompt_token_ids": ids}), **few).tokens) == [4]


def test_a_rows_own_limits_count(tmp_path: Path) -> None:
    table = pa.table({"prompt": ["x" * 40] * 3, "max_tokens": [5, None, 100], "n": [2, None, 1]})
    assert list(costs_of(tmp_path, table, **{"sampling.max_tokens": 7}).tokens) == [20, 17, 110]


def test_rows_that_begin_alike_are_a_group(tmp_path: Path) -> None:
    system, first, second = "s" * 300, "a" * 600, "b" * 600
    prompts = [
        f"{system}{first}1",
        f"{system}{second}1",
        "short",
        f"{system}{first}2",
        "short",
        system + second,
    ]
    group = costs_of(tmp_path, pa.table({"prompt": prompts})).group
    assert group[0] == group[3] != group[1] == group[5]
    assert len({group[0], group[1], group[2], group[4]}) == 4
    ids = [[*range(100), i] for i in range(2)] + [list(range(1, 101))]
    table = pa.table({"prompt_token_ids": pa.array(ids, pa.list_(pa.int32()))})
    assert list(costs_of(tmp_path, table).group) == [0, 0, 2]


def test_early_rows_stand_out_and_are_few() -> None:
    costs = {0: RowCosts(array("q", [10] * 99 + [500]), array("i", range(100)))}
    assert find_early(costs, {0: range(100)}, num_lanes=2) == [(0, 99)]
    assert find_early(costs, {0: range(99)}, num_lanes=2) == []
    assert find_early({}, {}, num_lanes=2) == []

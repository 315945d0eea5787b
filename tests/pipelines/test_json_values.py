"""Values that JSON has no word for, at the ends of what their types can hold."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest

from pipelines.json_values import to_json_rows

MOST, LEAST = 2**63 - 1, -(2**63)


@pytest.mark.parametrize(
    ("type_", "number", "expected"),
    [
        (pa.timestamp("us"), 1, "1970-01-01T00:00:00.000001"),
        (pa.timestamp("us", "UTC"), 1, "1970-01-01T00:00:00.000001Z"),
        (pa.timestamp("us", "Mars/Olympus"), 1, "1970-01-01T00:00:00.000001Z"),
        (pa.timestamp("us", "Mars/Olympus"), MOST, MOST),
        *[(pa.timestamp(unit, "UTC"), MOST, MOST) for unit in ("s", "ms", "us")],
        *[(pa.timestamp(unit), LEAST, LEAST) for unit in ("s", "ms", "us")],
        (pa.timestamp("ns"), LEAST, "1677-09-21T00:12:43.145224192"),
        (pa.date32(), 0, "1970-01-01"),
        (pa.date32(), 2**31 - 1, 2**31 - 1),
        (pa.date64(), 86_400_000, "1970-01-02"),
        (pa.date64(), 2**33 * 86_400_000, 2**33 * 86_400_000),
        (pa.time64("ns"), 86_399_999_999_999, "23:59:59.999999999"),
        (pa.time64("us"), MOST, MOST),
        (pa.time32("s"), 2**31 - 1, 2**31 - 1),
        (pa.duration("s"), MOST, MOST),
    ],
    ids=str,
)
def test_every_time_has_a_word(type_: pa.DataType, number: int, expected: Any) -> None:
    storage = pa.int32() if type_.bit_width == 32 else pa.int64()
    column = pa.array([number, None], storage).view(type_)
    rows = to_json_rows(pa.RecordBatch.from_arrays([column], ["t"]))
    assert json.loads(json.dumps(rows, allow_nan=False)) == [{"t": expected}, {"t": None}]

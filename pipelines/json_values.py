"""Arrow values as JSON values: every type has one way to be written.

Owns that way; it must not know columns or files.
"""

from __future__ import annotations

import base64
import math
from typing import Any

import pyarrow as pa

_PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
_CALENDAR_DAYS = 30_000 * 365
"""Arrow counts years in 16 bits: from year 32,768 on its texts are wrong."""


def to_json_rows(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """The batch's rows as objects that ``json`` writes.

    What JSON has no word for is text: times in ISO form (in UTC, if nobody here knows the zone; as a number,
    beyond the calendar), decimals in digits, bytes in base64, NaN and infinities by name. Bytes that are no
    UTF-8 are replaced in texts. Maps are lists of key and value.
    """
    columns = [_to_json(column) for column in batch.columns]
    rows = zip(*columns, strict=True) if columns else iter([()] * batch.num_rows)
    return [dict(zip(batch.schema.names, row, strict=True)) for row in rows]


def _to_json(array: pa.Array) -> list[Any]:
    type_, t = array.type, pa.types
    if isinstance(type_, pa.BaseExtensionType):
        if isinstance(type_, pa.UuidType):
            return [None if value is None else str(value) for value in array.to_pylist()]
        return _to_json(array.storage)
    if t.is_dictionary(type_):
        return _to_json(array.dictionary_decode())
    if t.is_struct(type_):
        names = [field.name for field in type_]
        fields = [_to_json(array.field(index)) for index in range(type_.num_fields)]
        is_valid = array.is_valid().to_pylist()
        rows = zip(*fields, strict=True)
        return [
            dict(zip(names, row, strict=True)) if valid else None
            for row, valid in zip(rows, is_valid, strict=True)
        ]
    if t.is_nested(type_):
        return [_to_json(scalar.values) if scalar.is_valid else None for scalar in array]
    if t.is_string(type_) or t.is_large_string(type_):
        return [_to_text(scalar) for scalar in array]
    if t.is_binary(type_) or t.is_large_binary(type_) or t.is_fixed_size_binary(type_):
        return [None if value is None else base64.b64encode(value).decode() for value in array.to_pylist()]
    if t.is_floating(type_):
        return [_to_number(value) for value in array.to_pylist()]
    if t.is_duration(type_):
        return [None if value is None else int(value) for value in array.cast(pa.int64()).to_pylist()]
    if t.is_temporal(type_):
        return _to_times(array)
    if t.is_decimal(type_):
        return [None if value is None else format(value, "f") for value in array.to_pylist()]
    values = array.to_pylist()
    return list(values)


def _to_times(array: pa.Array) -> list[Any]:
    numbers = array.cast(pa.int32() if array.type.bit_width == 32 else pa.int64()).to_pylist()
    try:
        texts = array.cast(pa.string()).to_pylist()
    except pa.ArrowInvalid:
        texts = array.cast(pa.timestamp(array.type.unit, "UTC")).cast(pa.string()).to_pylist()
    limit = _last_time(array.type)
    return [
        number if number is None or abs(number) > limit else text.replace(" ", "T", 1)
        for number, text in zip(numbers, texts, strict=True)
    ]


def _last_time(type_: pa.DataType) -> int:
    """How far from zero a time may lie, in the type's units, to have a text."""
    t = pa.types
    if t.is_date32(type_):
        return _CALENDAR_DAYS
    days = 1 if t.is_time(type_) else _CALENDAR_DAYS
    return days * 86_400 * _PER_SECOND["ms" if t.is_date64(type_) else type_.unit]


def _to_text(scalar: pa.Scalar) -> str | None:
    try:
        text: str | None = scalar.as_py()
    except UnicodeDecodeError:
        text = scalar.as_buffer().to_pybytes().decode("utf-8", "replace")
    return text


def _to_number(value: Any) -> float | str | None:
    if value is None or math.isfinite(value):
        return None if value is None else float(value)
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"

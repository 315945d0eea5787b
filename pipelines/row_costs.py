"""What rows will cost and which of them begin alike, estimated before any of them runs.

Owns the estimate for one shard, from lengths alone: a tokenizer would take longer than the order is
worth. It must not know ranks, leases or what is done with the estimate.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import pyarrow as pa
import pyarrow.compute as pc

from pipelines.plan import Plan
from pipelines.source import RowReader, Shard

BYTES_PER_TOKEN = 4
"""What a token of text is taken to have: near enough to put rows in order."""

_KEY_BYTES = 4096
_MIN_SHARED_BYTES = 256


@dataclass(frozen=True, slots=True)
class RowCosts:
    """One shard's rows: each one's tokens in and out, and the first row of its group.

    Rows of a group share at least half of the shorter one's first 4 KiB with a neighbour of it.
    """

    tokens: array[int]
    group: array[int]


def estimate_costs(reader: RowReader, plan: Plan, shard: Shard) -> RowCosts:
    """Read the shard's prompts once and estimate. ``reader`` yields the plan's render columns."""
    job_out = _number(plan.settings.get("sampling.max_tokens", 256), 0)
    job_n = _number(plan.settings.get("sampling.n", 1), 1)
    tokens, keys = array("q"), []
    for batch in reader.read(shard.path, shard.start, shard.stop):
        prompts = _prompts(batch.column(plan.contract.prompt_column))
        own_out, own_n = _own_numbers(batch, "max_tokens"), _own_numbers(batch, "n")
        for (num_tokens, key), out, n in zip(prompts, own_out, own_n, strict=True):
            tokens.append(max(1, num_tokens + _number(out, job_out) * _number(n, job_n)))
            keys.append(key)
    return RowCosts(tokens, _group(keys))


def _own_numbers(batch: pa.RecordBatch, name: str) -> list[object]:
    """The rows' own values of a count. Nothing else is read: Python may not be able to hold it."""
    type_ = batch.schema.field(name).type if name in batch.schema.names else pa.null()
    is_number = pa.types.is_integer(type_) or pa.types.is_floating(type_)
    return list(batch.column(name).to_pylist()) if is_number else [None] * batch.num_rows


def _number(value: object, default: int) -> int:
    """A row's own count, where it is one; a wrong one is the renderer's to refuse."""
    return int(value) if isinstance(value, int | float) and 0 <= value < 2**31 else default


def _prompts(column: pa.Array) -> Iterator[tuple[int, bytes]]:
    """Each prompt's tokens, about, and how it begins."""
    t = column.type
    if pa.types.is_dictionary(t):
        column = column.dictionary_decode()
        t = column.type
    if _is_list(t) and pa.types.is_integer(t.value_type):
        heads = pc.list_slice(column, 0, _KEY_BYTES // 8)
        for length, head in zip(pc.list_value_length(column).to_pylist(), heads.to_pylist(), strict=True):
            yield length or 0, array("Q", [(i or 0) % 2**64 for i in head or ()]).tobytes()
    else:
        for value in column:
            data = _text(value)
            yield len(data) // BYTES_PER_TOKEN, data[:_KEY_BYTES]


def _is_list(type_: pa.DataType) -> bool:
    return bool(
        pa.types.is_list(type_) or pa.types.is_large_list(type_) or pa.types.is_fixed_size_list(type_)
    )


def _text(value: pa.Scalar) -> bytes:
    """A text's bytes, or those of all texts inside messages, in their order. Nothing else is read."""
    if not value.is_valid:
        return b""
    if isinstance(value, pa.ListScalar):
        return b"\n".join(map(_text, value.values))
    if isinstance(value, pa.StructScalar):  # by number: two of its fields may have one name
        return b"\n".join(_text(value[index]) for index in range(value.type.num_fields))
    if isinstance(value, pa.DictionaryScalar):
        return _text(value.value)
    if isinstance(value, pa.StringScalar | pa.BinaryScalar):
        data: bytes = value.as_buffer().to_pybytes()
        return data
    return b""


def _group(keys: Sequence[bytes]) -> array[int]:
    """The number of the first row of each row's group. Sorted, rows that begin alike are neighbours."""
    group = array("i", range(len(keys)))
    order = sorted(range(len(keys)), key=keys.__getitem__)
    for left, right in pairwise(order):
        a, b = keys[left], keys[right]
        length = max(_MIN_SHARED_BYTES, min(len(a), len(b)) // 2)
        if min(len(a), len(b)) >= _MIN_SHARED_BYTES and a[:length] == b[:length]:
            group[right] = group[left]
    return group


def order_rows(costs: RowCosts, rows: Sequence[int]) -> list[int]:
    """``rows`` (ascending) in the order to run them: groups together, those with the longest row first.

    Lengths are compared by their power of two, so that rows much alike stay in the order in which a
    file yields them.
    """
    longest: dict[int, int] = {}
    first: dict[int, int] = {}
    for row in rows:
        group = costs.group[row]
        longest[group] = max(longest.get(group, 0), costs.tokens[row])
        first.setdefault(group, row)

    def place(row: int) -> tuple[int, int, int]:
        group = costs.group[row]
        return -longest[group].bit_length(), first[group], row

    return sorted(rows, key=place)


def find_early(
    costs: Mapping[int, RowCosts], rows: Mapping[int, Sequence[int]], num_lanes: int
) -> list[tuple[int, int]]:
    """(shard, row) of the rows that would hold up the end if they came late, the longest first.

    ``num_lanes`` rows run at once. Such a row takes more than a tenth of what each lane has to do in all,
    and stands out from the others: there are at most ten a lane.
    """
    num_tokens = sum(costs[shard].tokens[row] for shard, found in rows.items() for row in found)
    num_rows = sum(map(len, rows.values()))
    limit = max(num_tokens / (10 * num_lanes), 4 * num_tokens / max(num_rows, 1))
    found = [(shard, row) for shard, own in rows.items() for row in own if costs[shard].tokens[row] > limit]
    return sorted(found, key=lambda place: (-costs[place[0]].tokens[place[1]], place))

"""Arrow types of pass-through columns: one type for every flavour, one schema for many files.

Owns what unifies, what Parquet cannot write, and bringing a column to its decided type. It must not know
prompts, answers or where files lie.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from engine.errors import ConfigError

# One string type for every output column, whatever flavour the input files use: Parquet stores them
# alike, and 64-bit offsets cannot overflow when slices are put together.
STRING = pa.large_string()
BINARY = pa.large_binary()

_FILL_HINT = "(input.missing_columns: fill puts nulls there)"


def unify_files(files: Sequence[tuple[str, pa.Schema]], *, fill_missing: bool = False) -> pa.Schema:
    """The one schema that holds every file's rows, named by file. Raises ``ConfigError`` when there is none.

    Columns come in the order in which they are first seen. ``fill_missing`` allows files that lack some.
    What every file that has a column or the schema says of it in its metadata is kept.
    """
    for name, schema in files:
        repeated = [column for column in schema.names if schema.names.count(column) > 1]
        if repeated:
            raise ConfigError(f"input file {name!r} has two columns named {repeated[0]!r}")
    first_name, first = files[0]
    fields = {field.name: _plain_field(field) for field in first}
    for name, schema in files[1:]:
        if not fill_missing:
            _check_names(first_name, fields.keys(), name, schema.names)
        for field in schema:
            fields[field.name] = _unify_fields(fields.get(field.name), field, name)
    for _, schema in files:
        for missing in fields.keys() - set(schema.names):
            fields[missing] = fields[missing].with_nullable(True)
    return pa.schema(list(fields.values()), _shared_metadata([schema.metadata for _, schema in files]))


def _check_names(first_name: str, known: Iterable[str], name: str, names: Iterable[str]) -> None:
    missing = sorted(set(known) - set(names))
    extra = sorted(set(names) - set(known))
    if missing:
        raise ConfigError(
            f"input file {name!r} lacks column {missing[0]!r}, which {first_name!r} has {_FILL_HINT}"
        )
    if extra:
        raise ConfigError(
            f"input file {name!r} has column {extra[0]!r}, which {first_name!r} lacks {_FILL_HINT}"
        )


def _unify_fields(known: pa.Field | None, found: pa.Field, file_name: str) -> pa.Field:
    original, found = found, _plain_field(found)
    if known is None:
        return found
    unified = _unify(known.type, found.type)
    if unified is None:
        raise ConfigError(
            f"column {found.name!r} is {original.type} in input file {file_name!r} "
            f"but {known.type} before it: one type is needed"
        )
    return _merge(known, found, unified)


def _merge(a: pa.Field, b: pa.Field, type_: pa.DataType) -> pa.Field:
    metadata = _shared_metadata([a.metadata, b.metadata])
    return pa.field(a.name, type_, nullable=a.nullable or b.nullable, metadata=metadata)


def _shared_metadata(found: Sequence[dict[bytes, bytes] | None]) -> dict[bytes, bytes] | None:
    """The entries of all, less those in which two disagree."""
    merged: dict[bytes, bytes] = {}
    disputed: set[bytes] = set()
    for metadata in found:
        for key, value in (metadata or {}).items():
            if merged.setdefault(key, value) != value:
                disputed.add(key)
    kept = {key: value for key, value in merged.items() if key not in disputed}
    return kept or None


def check_convertible(files: Sequence[tuple[str, pa.Schema]], schema: pa.Schema) -> None:
    """Refuse a column that Arrow cannot bring from a file's type to ``schema``'s, by doing it to a null."""
    wanted = [(field.name, field.type) for field in schema]
    tried: set[tuple[str, pa.DataType]] = set()
    for file_name, file in files:
        types = dict(zip(file.names, file.types, strict=True))
        for name, type_ in wanted:
            found = types.get(name, pa.null())
            if (name, found) in tried:
                continue
            tried.add((name, found))
            try:
                _conform(pa.nulls(1, found), type_)
            except pa.ArrowException as error:
                raise ConfigError(
                    f"column {name!r} is {found} in input file {file_name!r} and cannot be made {type_}: "
                    f"leave it out with output.columns, or write it otherwise ({error})"
                ) from error


def check_writable(schema: pa.Schema) -> None:
    """Refuse a column that Parquet has no place for, by asking the writer itself for place for a null."""
    for field in schema:
        alone = pa.schema([field.with_nullable(True)])
        try:
            with pq.ParquetWriter(io.BytesIO(), alone) as writer:
                writer.write_table(pa.Table.from_arrays([pa.nulls(1, field.type)], schema=alone))
        except (pa.ArrowException, NotImplementedError) as error:
            raise ConfigError(
                f"column {field.name!r} is {field.type}, which Parquet cannot hold: leave it out with "
                f"output.columns, or write it otherwise ({error})"
            ) from error


def _plain_field(field: pa.Field) -> pa.Field:
    return field.with_type(plain(field.type))


def plain(type_: pa.DataType) -> pa.DataType:
    """``type_`` with every string or binary flavour inside it made the one we write."""
    t = pa.types
    if t.is_string(type_) or t.is_large_string(type_) or t.is_string_view(type_):
        return STRING
    if t.is_binary(type_) or t.is_large_binary(type_) or t.is_binary_view(type_):
        return BINARY
    if t.is_dictionary(type_):
        value = plain(type_.value_type)
        return value if value in (STRING, BINARY) else type_
    if t.is_large_list(type_) or t.is_large_list_view(type_):
        return pa.large_list(_plain_field(type_.value_field))
    if t.is_list(type_) or t.is_list_view(type_):
        return pa.list_(_plain_field(type_.value_field))
    if t.is_fixed_size_list(type_):
        return pa.list_(_plain_field(type_.value_field), type_.list_size)
    if t.is_map(type_):
        return pa.map_(_plain_field(type_.key_field), _plain_field(type_.item_field), type_.keys_sorted)
    if t.is_struct(type_):
        return pa.struct([_plain_field(field) for field in type_])
    return type_


def _unify(a: pa.DataType, b: pa.DataType) -> pa.DataType | None:
    """The type that holds the values of both, both already plain; None when there is none."""
    t = pa.types
    if a.equals(b, check_metadata=True) or t.is_null(b):
        return a
    if t.is_null(a):
        return b
    if (t.is_list(a) or t.is_large_list(a)) and (t.is_list(b) or t.is_large_list(b)):
        inner = _unify_inner(a.value_field, b.value_field)
        is_large = t.is_large_list(a) or t.is_large_list(b)
        return None if inner is None else (pa.large_list(inner) if is_large else pa.list_(inner))
    if t.is_fixed_size_list(a) and t.is_fixed_size_list(b) and a.list_size == b.list_size:
        inner = _unify_inner(a.value_field, b.value_field)
        return None if inner is None else pa.list_(inner, a.list_size)
    if t.is_map(a) and t.is_map(b):
        key, item = _unify_inner(a.key_field, b.key_field), _unify_inner(a.item_field, b.item_field)
        is_sorted = a.keys_sorted and b.keys_sorted
        return None if key is None or item is None else pa.map_(key, item, is_sorted)
    if t.is_struct(a) and t.is_struct(b) and [f.name for f in a] == [f.name for f in b]:
        unified = (_unify_inner(x, y) for x, y in zip(a, b, strict=True))
        fields = [field for field in unified if field is not None]
        return pa.struct(fields) if len(fields) == a.num_fields else None
    if (t.is_integer(a) or t.is_floating(a)) and (t.is_integer(b) or t.is_floating(b)):
        return _wider_number(a, b)
    return a if a.equals(b) else None


def _unify_inner(a: pa.Field, b: pa.Field) -> pa.Field | None:
    unified = _unify(a.type, b.type)
    return None if unified is None else _merge(a, b, unified)


def _wider_number(a: pa.DataType, b: pa.DataType) -> pa.DataType | None:
    t = pa.types
    if t.is_integer(a) != t.is_integer(b):
        # Whole numbers beyond 2**53 would change when made floating.
        return pa.float64() if (a if t.is_integer(a) else b).bit_width <= 32 else None
    if pa.uint64() in (a, b) and (t.is_signed_integer(a) or t.is_signed_integer(b)):
        return None
    unified = pa.unify_schemas([pa.schema([("x", a)]), pa.schema([("x", b)])], promote_options="permissive")
    return unified.field("x").type


def conform(batch: pa.RecordBatch, schema: pa.Schema) -> list[pa.Array]:
    """The batch's columns of ``schema``'s names, each brought to its type there."""
    return [_conform(batch.column(field.name), field.type) for field in schema]


def _conform(array: pa.Array, type_: pa.DataType) -> pa.Array:
    """Nested arrays are rebuilt level by level: casts of whole ones fail on some slices and dictionaries."""
    t = pa.types
    if array.type.equals(type_, check_metadata=True):
        return array
    if t.is_dictionary(array.type) and not t.is_dictionary(type_):
        return array.dictionary_decode().cast(type_)
    if not t.is_nested(type_) or t.is_null(array.type):
        return array.cast(type_)
    is_null = array.is_null()
    if t.is_struct(type_):
        columns = [_conform(array.field(index), field.type) for index, field in enumerate(type_)]
        return pa.StructArray.from_arrays(columns, fields=list(type_), mask=is_null)
    if t.is_map(type_):
        offsets = array.offsets.to_numpy()
        first, length = offsets[0], offsets[-1] - offsets[0]
        keys = _conform(array.keys.slice(first, length), type_.key_type)
        items = _conform(array.items.slice(first, length), type_.item_type)
        starts = pa.array(offsets - first, pa.int32())
        return pa.MapArray.from_arrays(starts, keys, items, type_, mask=is_null)
    values = _conform(array.flatten(), type_.value_type)
    if t.is_fixed_size_list(type_):
        values = _spread(values, is_null, type_.list_size)
        return pa.FixedSizeListArray.from_arrays(values, type=type_, mask=is_null)
    lengths = pc.fill_null(pc.list_value_length(array), 0)
    offsets = np.concatenate([[0], np.cumsum(lengths.to_numpy(zero_copy_only=False))])
    list_class, offset_type = pa.ListArray, pa.int32()
    if t.is_large_list(type_):
        list_class, offset_type = pa.LargeListArray, pa.int64()
    return list_class.from_arrays(pa.array(offsets, offset_type), values, type_, mask=is_null)


def _spread(values: pa.Array, is_null: pa.Array, list_size: int) -> pa.Array:
    """Put nulls where the values of null lists would be, which flattening leaves out."""
    is_valid = np.repeat(~is_null.to_numpy(zero_copy_only=False), list_size)
    places = np.where(is_valid, np.cumsum(is_valid) - 1, 0)
    return values.take(pa.array(places, pa.int64(), mask=~is_valid))

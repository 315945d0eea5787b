"""Hugging Face datasets as input: one saved to a folder, or one by its name.

Owns what the ``datasets`` library calls them and where their rows are; it must not know what columns mean.
A dataset is one file to the rest: its name with its split, or its folder.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from engine.errors import ConfigError
from pipelines.source_file import InputFile
from pipelines.source_location import Location

HUB = "hf://"
"""Begins a dataset's name; ``hf://datasets/...`` are files on the hub instead."""


def is_saved_dataset(path: Path) -> bool:
    """Whether a folder was written by ``save_to_disk``."""
    names = ("state.json", "dataset_info.json", "dataset_dict.json")
    return any((path / name).is_file() for name in names)


def is_dataset_name(path: str) -> bool:
    """Whether a path names a dataset: ``hf://NAME`` or ``hf://NAME:SPLIT``."""
    return path.startswith(HUB) and not path.startswith(f"{HUB}datasets/")


def find_saved_dataset(location: Location, name: str) -> tuple[InputFile, pa.Schema]:
    """A saved dataset's place in the plan and its schema. Raises ``ConfigError``."""
    path = Path(location.describe(name))
    if not (path / "state.json").is_file():
        raise ConfigError(
            f"input.path {str(path)!r} is not one saved dataset: name one split's folder inside it"
        )
    rows = DatasetRows(_load_saved(path), None)
    file = InputFile(
        path=name,
        num_rows=rows.num_rows,
        num_bytes=sum(p.stat().st_size for p in path.glob("*.arrow")),
        footer=hashlib.blake2b((path / "state.json").read_bytes(), digest_size=16).hexdigest(),
    )
    return file, rows.schema


def resolve_dataset_name(path: str) -> tuple[Location, str]:
    """A dataset's root and its name with its split. Raises ``ConfigError`` if the split is not clear.

    Of a local folder of data files, the folder above is the root, so that row ids do not name it.
    """
    name, _, split = path.removeprefix(HUB).partition(":")
    root = HUB
    if name.startswith((".", "/", "~")):
        folder = Path(name).expanduser().absolute()
        if is_saved_dataset(folder):
            raise ConfigError(
                f"input.path {path!r} names a folder that save_to_disk wrote: give the folder itself, "
                f"without {HUB}; of several splits, one split's folder inside it"
            )
        root, name = f"{HUB}{folder.parent}", folder.name
    if not split:
        splits = list(_load(_full_name(root, name), None))
        if len(splits) != 1:
            raise ConfigError(f"input.path {path!r} has the splits {', '.join(splits)}: add :SPLIT for one")
        split = splits[0]
    return Location(root), f"{name}:{split}"


def find_named_dataset(location: Location, name: str) -> tuple[InputFile, pa.Schema]:
    """A named dataset's place in the plan and its schema, after it was fetched if need be."""
    dataset = open_dataset(location, name)
    file = InputFile(
        path=name,
        num_rows=dataset.num_rows,
        num_bytes=dataset.data.nbytes,
        footer=hashlib.blake2b(dataset._fingerprint.encode(), digest_size=16).hexdigest(),
    )
    return file, dataset.features.arrow_schema


def open_dataset(location: Location, name: str) -> Any:
    """The dataset of a root and a name: saved, or named with its split."""
    if not location.root.startswith(HUB):
        return _load_saved(Path(location.describe(name)))
    dataset_name, _, split = name.rpartition(":")
    return _load(_full_name(location.root, dataset_name), split)


def _full_name(root: str, name: str) -> str:
    folder = root.removeprefix(HUB)
    return f"{folder}/{name}" if folder else name


def _load_saved(path: Path) -> Any:
    # Imported here and below: it takes seconds, and only this kind of input needs it.
    from datasets import load_from_disk

    return load_from_disk(str(path))


def _load(name: str, split: str | None) -> Any:
    from datasets import load_dataset

    try:
        return load_dataset(name, split=split)
    except Exception as error:  # the library and what it loads with have many kinds
        raise ConfigError(f"dataset {name!r} cannot be loaded: {type(error).__name__}: {error}") from error


class DatasetRows:
    """A dataset's rows, read through its memory map."""

    def __init__(self, dataset: Any, columns: Sequence[str] | None) -> None:
        if columns is not None:
            dataset = dataset.select_columns([name for name in columns if name in dataset.column_names])
        self._dataset: Any = dataset.with_format("arrow")
        self.num_rows: int = dataset.num_rows
        self.schema: pa.Schema = dataset.features.arrow_schema

    def read(self, start: int, stop: int, batch_rows: int) -> Iterator[pa.RecordBatch]:
        """Yield rows ``start <= row < stop``."""
        for first in range(start, stop, batch_rows):
            table: pa.Table = self._dataset[first : min(first + batch_rows, stop)]
            yield from table.to_batches()

    def close(self) -> None:
        """Let go of the map."""
        self._dataset = None

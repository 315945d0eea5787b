"""What every kind of input is made of: a file as the plan remembers it, and rows that can be read in slices.

Owns these two words only; it must not know any kind.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa


@dataclass(frozen=True, slots=True, kw_only=True)
class InputFile:
    """One input file as the plan remembers it. ``path`` is relative to the input root, with ``/``.

    ``footer`` hashes what describes the file's content (a Parquet footer, a saved dataset's state), or the
    content itself where nothing describes it.
    """

    path: str
    num_rows: int
    num_bytes: int
    footer: str


class FileRows(Protocol):
    """One open file. Reading onwards from where the last read ended is cheap."""

    def read(self, start: int, stop: int, batch_rows: int) -> Iterator[pa.RecordBatch]:
        """Yield rows ``start <= row < stop`` in order, with those of the wanted columns that there are."""

    def close(self) -> None:
        """Close the file."""

"""Where n-gram tables lie, and a step's rows of them, fetched while other work runs.

Layers ask the same way wherever tables lie: ``prefetch`` when the step begins, ``looked_up`` when the rows
are needed. Owns tables and which rows n-grams are; must not know what the rows are multiplied by.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from engine.batch import upload
from engine.checkpoint import StoredTensor
from engine.config import TablePlace, padded
from engine.errors import ConfigError
from engine.layers.ngrams import NgramTables, ngram_classes
from engine.layers.ops import Ops
from engine.loader import WeightReader
from engine.locked_memory import lock_pages
from engine.models.deepseek_v41_config import DeepseekV41Config
from engine.node_memory import share_bytes
from engine.staged_rows import RowReader, StagedTable
from kernels.engram import engram_hash_reference
from kernels.number_formats import SCALE_BLOCK

_ALIGNMENT = 4096

Part = tuple[str, tuple[int, ...]]
"""A tensor's name and shape: a table has its values, and scales where it is quantised."""


NgramClasses = Callable[[], np.ndarray]
"""[num_rows, N] classes of each row's last tokens; called where they are needed, maybe beside the step."""


@dataclass(frozen=True, slots=True)
class TableRows:
    """A step's rows of one table, on their way.

    ``hash_rows()`` [num_rows, num_lookups] are their numbers; ``looked_up()`` [num_rows, num_lookups * dim]
    the rows in the engine's dtype, for what is launched on the device's current stream from then on.
    """

    hash_rows: Callable[[], Tensor]
    looked_up: Callable[[], Tensor]


class _Table(Protocol):
    def prefetch(self, ngram_classes: NgramClasses) -> TableRows: ...


class EngramTables:
    """The tables of every engram layer on one rank.

    ``place`` "gpu" is the device's memory; "host" is memory of the node that its ranks share and their
    devices read; "mmap" leaves rows in the checkpoint's files, and needs ``max_num_rows``, the most of a
    step. ``may_share`` is asked before a node's memory is filled; where it says no, and nobody has filled it
    yet, "host" becomes "mmap".
    """

    def __init__(
        self,
        reader: WeightReader,
        config: DeepseekV41Config,
        ngrams: NgramTables,
        ops: Ops,
        *,
        place: TablePlace = "gpu",
        max_num_rows: int = 0,
        may_share: Callable[[], bool] = lambda: True,
    ) -> None:
        layers = range(len(config.engram_layer_ids))
        parts = [_table_parts(reader, config, index) for index in layers]
        held: list[list[Tensor]] | None = None
        if place == "gpu":
            held = [[reader.raw(*part) for part in table] for table in parts]
        elif place == "host":
            assert reader.device.type == "cpu" or ops.impl == "triton", "only kernels read them there"
            held = _share_on_node(reader, parts, may_share)
        self.place: TablePlace = "mmap" if held is None else place
        self._ngrams = ngrams
        self._reader: RowReader | None = None
        self._staged: list[_TableInFiles] = []
        self._tables: Sequence[_Table]
        if held is None:
            self._reader = RowReader(reader.device)
            most = padded(max_num_rows)
            self._tables = self._staged = [
                _TableInFiles(reader, parts[i], _NgramHash(ngrams, i), ops, self._reader, most)
                for i in layers
            ]
        else:
            # The link to the host is slow: rows travel beside what the device computes.
            is_far = place == "host" and reader.device.type == "cuda"
            stream = torch.cuda.Stream(reader.device) if is_far else None  # type: ignore[no-untyped-call]
            hashes = [_NgramHash(ngrams, i, reader.device) for i in layers]
            self._tables = [_TableInReach(held[i], hashes[i], ops, reader.dtype, stream) for i in layers]

    @property
    def is_read_ahead(self) -> bool:
        """Whether ``look_ahead`` does anything."""
        return self._reader is not None and self._reader.is_threaded

    @property
    def waited_s(self) -> float:
        """How long, in all, steps were launched no further because rows were not read yet."""
        return 0.0 if self._reader is None else self._reader.waited_s

    def prefetch(self, index: int, ngram_classes: NgramClasses) -> TableRows:
        """Set out for what rows of these classes look up in the table of engram layer number ``index``."""
        return self._tables[index].prefetch(ngram_classes)

    def look_ahead(self, spans: Sequence[tuple[list[int], int, int]]) -> None:
        """Tokens, and which positions [start, end) of them the next step will likely run; no promise."""
        if self._reader is None or not self._reader.is_threaded or not spans:
            return

        def touch() -> None:
            classes = np.concatenate([ngram_classes(self._ngrams, *span) for span in spans])
            for table in self._staged:
                table.touch(classes)

        self._reader.look_ahead(touch)


class _NgramHash:
    """Classes of a position's last tokens to rows of one layer's table."""

    def __init__(self, ngrams: NgramTables, index: int, device: torch.device | str = "cpu") -> None:
        self._device = device
        self.num_lookups = ngrams.primes[index].size
        of_layer = (ngrams.multipliers[index], ngrams.primes[index], ngrams.offsets[index])
        self._numbers = [torch.from_numpy(numbers).to(device) for numbers in of_layer]

    def __call__(self, classes: np.ndarray) -> Tensor:
        """[num_rows, N] -> [num_rows, (N - 1) * num_heads]."""
        return engram_hash_reference(upload(classes, self._device), *self._numbers)


class _TableInReach:
    """A table that the op reads where it is; beside other work if there is a ``stream``."""

    def __init__(
        self,
        parts: list[Tensor],
        ngram_hash: _NgramHash,
        ops: Ops,
        dtype: torch.dtype,
        stream: torch.cuda.Stream | None,
    ) -> None:
        self._values = parts[0]
        self._scale = parts[1].view(torch.uint8) if len(parts) > 1 else None
        self._hash = ngram_hash
        self._ops = ops
        self._dtype = dtype
        self._stream = stream

    def prefetch(self, ngram_classes: NgramClasses) -> TableRows:
        @cache
        def hash_rows() -> Tensor:
            return self._hash(ngram_classes())

        if self._stream is None:
            return TableRows(hash_rows, lambda: self._look_up(hash_rows()))
        found = hash_rows()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            looked_up = self._look_up(found)
            is_there = self._stream.record_event()
        found.record_stream(self._stream)  # a step may end before this layer, and forget it

        def take() -> Tensor:
            torch.cuda.current_stream().wait_event(is_there)
            return looked_up

        return TableRows(hash_rows, take)

    def _look_up(self, hash_rows: Tensor) -> Tensor:
        return self._ops.engram_gather(self._values, self._scale, hash_rows, dtype=self._dtype)


class _TableInFiles:
    """A table of which only the rows of two steps are in memory, and of one on the device."""

    def __init__(
        self,
        weights: WeightReader,
        parts: Sequence[Part],
        ngram_hash: _NgramHash,
        ops: Ops,
        reader: RowReader,
        max_num_rows: int,
    ) -> None:
        self._stored_dtype = weights.dtype_of(*parts[0])
        self._hash = ngram_hash
        self._ops = ops
        self._dtype = weights.dtype
        stored = [weights.pass_over(*part) for part in parts]
        most_lookups = max_num_rows * ngram_hash.num_lookups
        self._staged = StagedTable(reader, stored, max_num_rows=most_lookups)
        self._numbers = torch.arange(most_lookups, device=weights.device, dtype=torch.int32)

    def prefetch(self, ngram_classes: NgramClasses) -> TableRows:
        future = self._staged.fetch(lambda: self._hash(ngram_classes()).numpy())

        def take() -> Tensor:
            with self._staged.taken(future) as fetched:
                values, *scale = fetched.tensors
                return self._ops.engram_gather(
                    values.view(self._stored_dtype),
                    scale[0] if scale else None,
                    self._numbers[: fetched.ids.size].view(fetched.ids.shape),
                    dtype=self._dtype,
                )

        return TableRows(lambda: torch.from_numpy(future.result().ids), take)

    def touch(self, classes: np.ndarray) -> None:
        """Bring rows into the page cache."""
        self._staged.touch(self._hash(classes).numpy())


def _table_parts(reader: WeightReader, config: DeepseekV41Config, index: int) -> list[Part]:
    """What a table is made of. Raises ``ConfigError`` where it is stored as something else."""
    name = f"layers.{config.engram_layer_ids[index]}.engram.embed"
    num_rows, dim = config.engram_num_embeddings[index], config.engram_head_dim
    is_scaled = reader.has(f"{name}.scale")
    known = (torch.float8_e4m3fn,) if is_scaled else (torch.bfloat16, torch.float32)
    stored = reader.dtype_of(f"{name}.weight", (num_rows, dim))
    if stored not in known:
        raise ConfigError(
            f"tensor {name}.weight is stored as {stored}, expected {' or '.join(map(str, known))}"
        )
    scale: list[Part] = [(f"{name}.scale", (num_rows, dim // SCALE_BLOCK))] if is_scaled else []
    return [(f"{name}.weight", (num_rows, dim)), *scale]


def _share_on_node(
    reader: WeightReader, tables: Sequence[Sequence[Part]], may_share: Callable[[], bool]
) -> list[list[Tensor]] | None:
    """All tables in memory that the ranks of a node have in common; None where it may not be filled."""
    parts = [part for table in tables for part in table]
    stored = [reader.find(*part) for part in parts]
    starts = np.cumsum([0, *(-(-tensor.num_bytes // _ALIGNMENT) * _ALIGNMENT for tensor in stored)]).tolist()

    def views(memory: np.ndarray) -> list[Tensor]:
        pieces = [memory[start : start + t.num_bytes] for start, t in zip(starts, stored, strict=False)]
        shapes = [(reader.dtype_of(*part), part[1]) for part in parts]
        return [
            torch.from_numpy(piece).view(dtype).view(shape)
            for piece, (dtype, shape) in zip(pieces, shapes, strict=True)
        ]

    is_filled = False

    def fill(memory: np.ndarray) -> None:
        nonlocal is_filled
        is_filled = True
        reader.fill([(name, place) for (name, _), place in zip(parts, views(memory), strict=True)])

    memory = share_bytes(_identity(stored), starts[-1], fill, may_share)
    if memory is None:
        return None
    if not is_filled:
        for part in parts:
            reader.pass_over(*part)
    if reader.device.type == "cuda":
        lock_pages(memory, "engine.engram is host")
    found = iter(views(memory))
    return [[next(found) for _ in table] for table in tables]


def _identity(stored: Sequence[StoredTensor]) -> str:
    """Of these very bytes: files that are written anew are others."""
    facts = [(os.stat(tensor.path), tensor.offset, tensor.num_bytes) for tensor in stored]
    named = [(f.st_dev, f.st_ino, f.st_size, f.st_mtime_ns, *place) for f, *place in facts]
    return blake2b(repr(named).encode(), digest_size=12).hexdigest()

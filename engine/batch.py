"""ScheduledBatch to BatchInputs: the packed index tensors of any step.

All sequences of a step share one packed row axis. Every index a layer needs (which rows it runs,
which window rows and ring slots they read, which compression groups they complete, where entries
go) is computed here, from what the host knows, so that layers only gather. It never looks at activations.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from engine.config import KV_BLOCK_SIZE, ROW_PADDING, padded
from engine.layer_rows import LayerRows, ModelShape
from engine.layers.ngrams import NgramTables, packed_ngram_classes
from engine.scheduled_batch import ScheduledBatch, ScheduledChunk
from engine.step_inputs import CompressInputs, LayerInputs, RowSet, SelectInputs, WindowInputs


def upload(array: np.ndarray, device: torch.device | str) -> Tensor:
    """A copy on the device, for which the host does not wait."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if torch.device(device).type == "cuda":
        # The driver copies pageable memory only once the device has done all that was asked of it before.
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


@dataclass(frozen=True, slots=True)
class PackedRows(RowSet):
    """What the host knows of them."""

    first: np.ndarray  # [num_chunks] first absolute row of each chunk; >= its end where it has none
    offset: np.ndarray  # [num_chunks] packed index of that row
    host_positions: np.ndarray  # [num_padded]
    host_chunks: np.ndarray  # [num_padded]


@dataclass(frozen=True, slots=True)
class PackedLayer(LayerInputs):
    """The same of a layer."""

    rows: PackedRows
    output_rows: PackedRows


class BatchInputs:
    """One step's tensors; index sets are built once per distinct set of rows."""

    def __init__(
        self,
        batch: ScheduledBatch,
        shape: ModelShape,
        tables: NgramTables | None,
        device: torch.device,
        *,
        num_states: int,
    ) -> None:
        self.device = device
        self._num_states = num_states
        self._chunks = batch.chunks
        self._window = shape.window
        self._tables = tables
        self._starts = np.array([c.start for c in batch.chunks], dtype=np.int64)
        self._ends = np.array([c.end for c in batch.chunks], dtype=np.int64)
        self._slots = np.array([c.seq.state_slot for c in batch.chunks], dtype=np.int64)
        self._cached = np.array([c.cached_until for c in batch.chunks], dtype=np.int64)
        self._rows: list[LayerRows] = [c.layer_rows(shape) for c in batch.chunks]
        self._row_sets: dict[tuple[int, ...], PackedRows] = {}
        self._windows: dict[tuple[object, ...], WindowInputs] = {}
        self._compress: dict[tuple[object, ...], CompressInputs] = {}
        self._selects: dict[tuple[object, ...], SelectInputs] = {}
        self.layers = [self._layer_inputs(layer) for layer in range(shape.num_layers)]

    @property
    def first_rows(self) -> PackedRows:
        """The rows whose embeddings enter layer 0."""
        return self.layers[0].rows

    @cached_property
    def token_ids(self) -> Tensor:
        """[num_padded] int64 ids of ``first_rows``."""
        rows = self.first_rows
        ids = np.zeros(rows.num_padded, dtype=np.int64)
        for index, chunk in enumerate(self._chunks):
            first = rows.first[index]
            if first < chunk.end:
                begin = rows.offset[index]
                ids[begin : begin + chunk.end - first] = chunk.seq.token_ids[first : chunk.end]
        return self._upload(ids)

    @cached_property
    def sample_rows(self) -> Tensor:
        """Rows of the last layer's output whose logits are wanted, in chunk order, padded with row 0."""
        rows = self.layers[-1].output_rows
        wanted = [rows.offset[i] + c.end - 1 - rows.first[i] for i, c in enumerate(self._chunks) if c.samples]
        return self._upload(np.array(wanted + [0] * (-len(wanted) % ROW_PADDING), dtype=np.int64))

    @property
    def sample_chunks(self) -> list[ScheduledChunk]:
        """The chunks of ``sample_rows``."""
        return [c for c in self._chunks if c.samples]

    def ngram_classes(self, layer: int) -> np.ndarray:
        """[num_padded, N] int64 classes of the last N tokens of each of a layer's rows, newest first.

        Pad where a look-back crosses the start of the sequence.
        """
        rows = self.layers[layer].rows
        assert self._tables is not None, "the model has no engram layer"
        firsts = rows.first.tolist()
        spans = [(c.seq.token_ids, first, c.end) for c, first in zip(self._chunks, firsts, strict=True)]
        return packed_ngram_classes(self._tables, spans, rows.num_padded)

    def has_window_rows(self, layer: int) -> bool:
        """Whether any row's window KV at this layer is read later or now."""
        return any(c.end > r.first_window[layer] for c, r in zip(self._chunks, self._rows, strict=True))

    def window_inputs(self, layer: int) -> WindowInputs:
        """Window indices of a layer."""
        inputs = self.layers[layer]
        floors = np.array([r.first_window[layer] for r in self._rows], dtype=np.int64)
        # A floor below all that the rows reach changes nothing: without it most layers are alike.
        floors[floors <= inputs.output_rows.first - self._window + 1] = 0
        floors = floors.clip(min=0)
        key = (id(inputs.rows), id(inputs.output_rows), floors.tobytes())
        if key not in self._windows:
            self._windows[key] = self._build_window(inputs.rows, inputs.output_rows, floors)
        return self._windows[key]

    def compress_inputs(self, layer: int, ratio: int) -> CompressInputs:
        """Completed and open groups of a KV source."""
        rows = self.layers[layer].rows
        key = (id(rows), ratio)
        if key not in self._compress:
            self._compress[key] = self._build_compress(rows, ratio)
        return self._compress[key]

    def select_inputs(self, layer: int, ratio: int) -> SelectInputs:
        """Visible entries of a layer's output rows."""
        rows = self.layers[layer].output_rows
        key = (id(rows), ratio)
        if key not in self._selects:
            visible = (rows.host_positions + 1) // ratio
            visible[rows.num_rows :] = 0
            self._selects[key] = SelectInputs(
                self._upload(visible),
                max(int(visible.max(initial=0)), 1),
                rows.chunks,
                self._block_tables,
                KV_BLOCK_SIZE // ratio,
            )
        return self._selects[key]

    def _upload(self, array: np.ndarray) -> Tensor:
        return upload(array, self.device)

    @cached_property
    def _block_tables(self) -> Tensor:
        width = max(len(c.seq.block_table) for c in self._chunks)
        tables = np.zeros((len(self._chunks), max(width, 1)), dtype=np.int64)
        for index, chunk in enumerate(self._chunks):
            tables[index, : len(chunk.seq.block_table)] = chunk.seq.block_table
        return self._upload(tables)

    def _layer_inputs(self, layer: int) -> PackedLayer:
        rows = self._row_set([r.first_input[layer] for r in self._rows])
        output = self._row_set([r.first_output[layer] for r in self._rows])
        if output is rows:
            return PackedLayer(rows, output, None)
        keep = np.zeros(output.num_padded, dtype=np.int64)
        n = output.num_rows
        chunks = output.host_chunks[:n]
        keep[:n] = rows.offset[chunks] + output.host_positions[:n] - rows.first[chunks]
        return PackedLayer(rows, output, self._upload(keep))

    def _row_set(self, firsts: list[int]) -> PackedRows:
        first = np.minimum(np.maximum(np.array(firsts, dtype=np.int64), self._starts), self._ends)
        key = tuple(first.tolist())
        if key not in self._row_sets:
            counts = self._ends - first
            offset = np.cumsum(counts) - counts
            num_rows = int(counts.sum())
            num_padded = padded(num_rows)
            chunks = np.repeat(np.arange(len(counts)), counts)
            # Padding rows name the last real chunk, so that a tile of one sequence stays one.
            chunks = np.pad(chunks, (0, num_padded - num_rows), mode="edge") if num_rows else chunks
            positions = np.zeros(num_padded, dtype=np.int64)
            positions[:num_rows] = np.arange(num_rows) - np.repeat(offset - first, counts)
            self._row_sets[key] = PackedRows(
                num_rows,
                self._upload(positions),
                self._upload(chunks),
                first,
                offset,
                positions,
                chunks,
            )
        return self._row_sets[key]

    def _build_window(self, rows: PackedRows, output: PackedRows, floors: np.ndarray) -> WindowInputs:
        window = self._window
        n = rows.num_rows
        position, chunk = rows.host_positions[:n], rows.host_chunks[:n]
        sources = np.flatnonzero(position >= self._ends[chunk] - window)
        targets = self._slots[chunk[sources]] * window + position[sources] % window
        return WindowInputs(
            self._window_rows(rows, output, floors), self._upload(sources), self._upload(targets)
        )

    def _window_rows(self, rows: PackedRows, output: PackedRows, floors: np.ndarray) -> Tensor:
        """``WindowInputs.rows``; on the device, since the host would take longer than a layer does."""
        window = self._window
        in_rows = self._num_states * window + rows.offset - rows.first
        facts = self._upload(np.stack([self._slots * window, in_rows, rows.first, floors]))
        in_ring, in_own, first, floor = facts[:, output.chunks, None]
        floor[output.num_rows :] = torch.iinfo(torch.int64).max
        key = output.positions[:, None] + torch.arange(1 - window, 1, device=self.device)
        key_rows = torch.where(key >= first, in_own + key, in_ring + key % window)
        return torch.where(key >= floor, key_rows, -1).int()

    def _build_compress(self, rows: PackedRows, ratio: int) -> CompressInputs:
        num_stored = ratio - 1
        # A group is this step's to write when its last token is: earlier ones are in the pool already.
        first = np.maximum(self._starts, self._cached) // ratio
        counts = np.maximum(self._ends // ratio - first, 0)
        num_groups = int(counts.sum())
        chunk = np.repeat(np.arange(len(counts)), counts)
        group = np.arange(num_groups) - np.repeat(np.cumsum(counts) - counts - first, counts)
        token = group[:, None] * ratio + np.arange(ratio)
        in_rows = self._num_states * num_stored + rows.offset[chunk, None] + token - rows.first[chunk, None]
        in_state = self._slots[chunk, None] * num_stored + token % ratio
        group_rows = np.where(token >= rows.first[chunk, None], in_rows, in_state)
        slots = [self._entry_slots(i, group[chunk == i], ratio) for i in range(len(counts))]
        padding = -num_groups % ROW_PADDING
        n = rows.num_rows
        position, row_chunk = rows.host_positions[:n], rows.host_chunks[:n]
        is_open = position >= (self._ends[row_chunk] // ratio) * ratio
        sources = np.flatnonzero(is_open)
        targets = self._slots[row_chunk[sources]] * num_stored + position[sources] % ratio
        return CompressInputs(
            self._upload(np.pad(group_rows, ((0, padding), (0, 0)))),
            self._upload(np.pad(group * ratio, (0, padding))),
            self._upload(
                np.pad(np.concatenate([*slots, np.empty(0, np.int64)]), (0, padding), constant_values=-1)
            ),
            self._upload(sources),
            self._upload(targets),
        )

    def _entry_slots(self, index: int, groups: np.ndarray, ratio: int) -> np.ndarray:
        per_block = KV_BLOCK_SIZE // ratio
        table = np.asarray(self._chunks[index].seq.block_table, dtype=np.int64)
        slots: np.ndarray = table[groups // per_block] * per_block + groups % per_block
        return slots

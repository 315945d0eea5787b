"""What layers are told of a step: index tensors, and nothing of sequences or how they were scheduled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RowSet:
    """The rows of some layers' input or output. Rows from ``num_rows`` on are padding (position 0)."""

    num_rows: int
    positions: Tensor  # [num_padded] int64
    chunks: Tensor  # [num_padded] int64 index of the row's chunk

    @property
    def num_padded(self) -> int:
        """Rows with padding."""
        return self.positions.shape[0]


@dataclass(frozen=True, slots=True)
class WindowInputs:
    """Where window keys come from: ``cat(rings, the layer's own input rows)``, and what the ring keeps."""

    rows: Tensor  # [num_output_rows, window] int32 into the concatenation, positions ascending; -1 is none
    ring_sources: Tensor  # [n] input rows that the ring keeps
    ring_targets: Tensor  # [n] flat ring rows, -1 = not kept


@dataclass(frozen=True, slots=True)
class CompressInputs:
    """Groups that complete in this step: rows of ``cat(open groups, the layer's input rows)``."""

    group_rows: Tensor  # [num_groups, ratio]; padded to a multiple of ROW_PADDING
    group_positions: Tensor  # [num_groups] position of the group's first token
    entry_slots: Tensor  # [num_groups] pool slot, -1 = do not write
    open_sources: Tensor  # [n] input rows that stay open
    open_targets: Tensor  # [n] flat rows of the open-group state, -1 = not kept


@dataclass(frozen=True, slots=True)
class SelectInputs:
    """What a query may select from."""

    num_visible: Tensor  # [num_output_rows] int64 entries visible to the row; 0 for padding
    max_visible: int  # the most of any row, at least 1
    chunks: Tensor  # [num_output_rows] int64
    block_tables: Tensor  # [num_chunks, max_blocks] int64
    entries_per_block: int


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """One layer's share of the step."""

    rows: RowSet  # input
    output_rows: RowSet
    keep: Tensor | None  # [output num_padded] into the input rows; None where nothing is cut


class StepInputs(Protocol):
    """One step's index tensors. Those of a layer are asked for when it runs."""

    @property
    def device(self) -> torch.device:
        """Where they are."""

    @property
    def token_ids(self) -> Tensor:
        """[num_padded] int64 ids of the rows that enter layer 0."""

    @property
    def layers(self) -> Sequence[LayerInputs]:
        """Each layer's rows."""

    def has_window_rows(self, layer: int) -> bool:
        """Whether any row's window KV at this layer is read later or now."""

    def window_inputs(self, layer: int) -> WindowInputs:
        """Window indices of a layer."""

    def compress_inputs(self, layer: int, ratio: int) -> CompressInputs:
        """Completed and open groups of a KV source."""

    def select_inputs(self, layer: int, ratio: int) -> SelectInputs:
        """Visible entries of a layer's output rows."""

"""Where the rows of a launch find their index keys, and what is selected. Tensors only, no device code."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class KeyPages(NamedTuple):
    """Where the rows of a launch find their keys.

    keys: [num_slots, width] contiguous; uint8 (packed FP4: D / 2 nibble bytes, low nibble first, then D / 32
        power-of-two exponents) or float (width D).
    block_tables: [num_sequences, max_blocks] int64, last axis dense.
    sequences: [num_rows] int64 row of ``block_tables``, ascending.
    num_visible: [num_rows] int64 entries that the row sees; 0 for a padding row.
    entries_per_block: slots of one block; entry e is slot ``table[e // n] * n + e % n``.
    max_entries: no row sees more (known to the host).
    """

    keys: Tensor
    block_tables: Tensor
    sequences: Tensor
    num_visible: Tensor
    entries_per_block: int
    max_entries: int


class SelectedEntries(NamedTuple):
    """Entries of each row, ascending, -1 behind; and the kept candidate blocks where asked for."""

    entries: Tensor  # [num_rows, k] int64
    blocks: Tensor | None  # [num_rows, num_blocks] int64

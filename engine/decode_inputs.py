"""The index tensors of a step in which every sequence runs one row, computed on the device.

Such a step differs from the last one only in what ``DecodeRows`` names: a row's token, position, state slot
and KV blocks. All that layers gather by follows from these, in operations whose shapes depend on nothing else
than how many rows and tokens there is room for; so a step can be captured once and replayed. It must not look
at the host's sequences: what it answers is the same for every step that fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.batch import upload
from engine.block_manager import num_blocks_for
from engine.config import KV_BLOCK_SIZE
from engine.layer_rows import ModelShape
from engine.scheduled_batch import ScheduledChunk
from engine.step_inputs import CompressInputs, LayerInputs, RowSet, SelectInputs, WindowInputs

_TOKEN, _POSITION, _SLOT = range(3)


def is_decode(chunk: ScheduledChunk) -> bool:
    """Whether a chunk is one row behind everything its sequence has cached, and is sampled from."""
    is_last = chunk.samples and chunk.tail_end == chunk.end
    return is_last and chunk.num_tokens == 1 and chunk.cached_until <= chunk.start


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """Where the rows of one step lie on the device, padding included, in contexts up to ``num_tokens``.

    ``facts`` [3, num_rows] int64: token, position, state slot (-1: padding, a row of its own at position 0).
    ``block_tables`` [num_rows, num_tokens / KV_BLOCK_SIZE] int64. Behind a row's own blocks, and in padding
    rows, stands what other steps left: numbers of blocks that there are, whoever's. Who reads such an entry
    may look into that block, and has to mask what it finds there by the row's position or slot.
    """

    facts: Tensor
    block_tables: Tensor

    @property
    def num_rows(self) -> int:
        """Rows with padding."""
        return self.facts.shape[1]

    @property
    def num_tokens(self) -> int:
        """Of the longest context that there is room for."""
        return self.block_tables.shape[1] * KV_BLOCK_SIZE


class DecodeBuffers:
    """Where rooms of up to ``max_rows`` rows have their rows: all rooms in the same place.

    Steps come one after another, in one stream, and each brings all that it reads. Nothing is ever moved or
    freed, as graphs read it where it is. A context's size takes memory from its first step on.
    """

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self._facts = torch.zeros(3, max_rows, dtype=torch.int64, device=device)
        self._block_tables: dict[int, Tensor] = {}  # by tokens of a context

    def load(self, chunks: Sequence[ScheduledChunk], num_rows: int, num_tokens: int) -> DecodeRows:
        """Send a step's rows to the device; the host does not wait."""
        device, max_rows = self._facts.device, self._facts.shape[1]
        if num_tokens not in self._block_tables:
            # Zeros: an entry that no step has brought yet is the number of a block, too.
            self._block_tables[num_tokens] = torch.zeros(
                max_rows, num_tokens // KV_BLOCK_SIZE, dtype=torch.int64, device=device
            )
        tables = self._block_tables[num_tokens]
        rows = DecodeRows(self._facts[:, :num_rows], tables[:num_rows])
        facts = np.zeros((3, num_rows), dtype=np.int64)
        facts[_SLOT] = -1
        facts[:, : len(chunks)] = np.transpose(
            [(chunk.seq.token_ids[chunk.start], chunk.start, chunk.seq.state_slot) for chunk in chunks]
        )
        # Only blocks that the step's sequences have travel: tables of long contexts are mostly room.
        blocks = [chunk.seq.block_table[: num_blocks_for(chunk.end)] for chunk in chunks]
        counts = np.array(list(map(len, blocks)))
        # How far each row's blocks are sent from where they belong in all tables.
        moves = np.arange(len(chunks)) * tables.shape[1] - (np.cumsum(counts) - counts)
        sent = upload(np.concatenate([facts.ravel(), moves, counts, *blocks]), device)
        sizes = [facts.size, len(chunks), len(chunks), int(counts.sum())]
        sent_facts, sent_moves, sent_counts, sent_blocks = torch.split(sent, sizes)
        rows.facts.copy_(sent_facts.view(facts.shape))
        # Told how many there are, torch does not ask the device.
        places = torch.repeat_interleave(sent_moves, sent_counts, output_size=sizes[-1])
        places += torch.arange(sizes[-1], device=device)
        tables.view(-1).index_copy_(0, places, sent_blocks)
        return rows


class DecodeInputs:
    """What ``BatchInputs`` is to layers, for one pass over ``rows``; index tensors are made once a pass."""

    def __init__(self, rows: DecodeRows, shape: ModelShape, *, num_states: int) -> None:
        self.device = rows.facts.device
        self._room = rows
        self._window = shape.window
        self._num_states = num_states
        self.token_ids = rows.facts[_TOKEN]
        self._positions = rows.facts[_POSITION]
        self._slots = rows.facts[_SLOT]
        self._is_real = self._slots >= 0
        self._states = self._slots.clamp(min=0)
        self._numbers = torch.arange(rows.num_rows, device=self.device)
        same = RowSet(rows.num_rows, self._positions, self._numbers)
        self.layers = [LayerInputs(same, same, None)] * shape.num_layers
        self._windows: WindowInputs | None = None
        self._compress: dict[int, CompressInputs] = {}
        self._selects: dict[int, SelectInputs] = {}

    def has_window_rows(self, layer: int) -> bool:
        """Every row's window is read."""
        return True

    def window_inputs(self, layer: int) -> WindowInputs:
        """The same for every layer: no decoder prefill mode cuts the window of a sequence's newest row."""
        if self._windows is None:
            window, position = self._window, self._positions[:, None]
            key = position + torch.arange(1 - window, 1, device=self.device)
            in_ring = self._states[:, None] * window + key % window
            own = self._num_states * window + self._numbers[:, None]
            key_rows = torch.where(key == position, own, in_ring)
            is_there = (key >= 0) & self._is_real[:, None]
            self._windows = WindowInputs(
                torch.where(is_there, key_rows, -1).int(),
                self._numbers,
                self._where_real(self._states * window + self._positions % window),
            )
        return self._windows

    def compress_inputs(self, layer: int, ratio: int) -> CompressInputs:
        """The group of every row; most are not complete, and not stored."""
        if ratio not in self._compress:
            num_stored, per_block = ratio - 1, KV_BLOCK_SIZE // ratio
            group = self._positions // ratio
            token = group[:, None] * ratio + torch.arange(ratio, device=self.device)
            in_state = self._states[:, None] * num_stored + token % ratio
            own = self._num_states * num_stored + self._numbers[:, None]
            is_complete = (self._positions + 1) % ratio == 0
            # Of a padding row somebody's block, perhaps: its slot is -1.
            block = self._room.block_tables.gather(1, group[:, None] // per_block)[:, 0]
            slots = self._where_real(block * per_block + group % per_block)
            kept = self._where_real(self._states * num_stored + self._positions % ratio)
            self._compress[ratio] = CompressInputs(
                # Of a group that is not complete some row is read that is there, and nothing stored.
                torch.where(token >= self._positions[:, None], own, in_state),
                group * ratio,
                torch.where(is_complete, slots, -1),
                self._numbers,
                torch.where(is_complete, -1, kept),
            )
        return self._compress[ratio]

    def select_inputs(self, layer: int, ratio: int) -> SelectInputs:
        """Entries up to each row's position: all that is behind them in a table is masked by that."""
        if ratio not in self._selects:
            visible = torch.where(self._is_real, (self._positions + 1) // ratio, 0)
            self._selects[ratio] = SelectInputs(
                visible,
                max(self._room.num_tokens // ratio, 1),
                self._numbers,
                self._room.block_tables,
                KV_BLOCK_SIZE // ratio,
            )
        return self._selects[ratio]

    def _where_real(self, rows: Tensor) -> Tensor:
        return torch.where(self._is_real, rows, -1)

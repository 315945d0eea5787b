"""The memory of the engine: paged pools of packed entries and index keys, window rings, open groups.

It stores and moves bytes; which block or slot belongs to whom is the block manager's business. The
bytes are the model page's section 14; without cache quantisation they are the engine's dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from engine.block_manager import Move
from engine.config import KV_BLOCK_SIZE
from engine.models.deepseek_v41_config import DeepseekV41Config
from kernels.number_formats import (
    ENTRY_BLOCK,
    SCALE_BLOCK,
    pack_fp4_entry,
    pack_fp4_index,
    pack_fp8,
    unpack_fp4_entry,
    unpack_fp4_index,
    unpack_fp8,
)


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """Bytes and shapes of what a block and a state slot hold."""

    config: DeepseekV41Config
    is_quantised: bool
    dtype: torch.dtype

    def entry_width(self) -> int:
        """Elements of one compressed entry in its pool."""
        head_dim = self.config.head_dim
        return head_dim // 2 + head_dim // ENTRY_BLOCK if self.is_quantised else head_dim

    def index_key_width(self) -> int:
        """Elements of one index key in its pool."""
        dim = self.config.index_head_dim
        return dim // 2 + dim // SCALE_BLOCK if self.is_quantised else dim

    def window_width(self) -> int:
        """Elements of one window row in its ring."""
        head_dim = self.config.head_dim
        return head_dim + head_dim // SCALE_BLOCK if self.is_quantised else head_dim

    @property
    def storage_dtype(self) -> torch.dtype:
        """uint8 for packed bytes, else the engine's dtype."""
        return torch.uint8 if self.is_quantised else self.dtype

    @property
    def num_bytes_per_block(self) -> int:
        """Bytes of one KV block over all sources."""
        widths = self.entry_width() + self.index_key_width()
        entries = sum(
            KV_BLOCK_SIZE // self.config.compress_ratios[s] for s in self.config.kv_source_layer_ids
        )
        return entries * widths * self.storage_dtype.itemsize

    @property
    def num_bytes_per_state(self) -> int:
        """Bytes of one sequence's rings and open groups."""
        config = self.config
        rings = (
            config.num_hidden_layers
            * config.sliding_window
            * self.window_width()
            * self.storage_dtype.itemsize
        )
        open_rows = sum(config.compress_ratios[s] - 1 for s in config.kv_source_layer_ids)
        return rings + open_rows * 2 * config.head_dim * 4


class _Memory:
    """Blocks and state slots on one device. Each pool has one spare row at its end: slot -1 writes there."""

    def __init__(self, layout: CacheLayout, num_blocks: int, num_states: int, device: torch.device) -> None:
        config = layout.config
        self.entries: dict[int, Tensor] = {}
        self.index_keys: dict[int, Tensor] = {}
        self.open_groups: dict[int, Tensor] = {}

        def zeros(*shape: int, dtype: torch.dtype = layout.storage_dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        for source in config.kv_source_layer_ids:
            ratio = config.compress_ratios[source]
            num_slots = num_blocks * (KV_BLOCK_SIZE // ratio) + 1
            self.entries[source] = zeros(num_slots, layout.entry_width())
            self.index_keys[source] = zeros(num_slots, layout.index_key_width())
            self.open_groups[source] = zeros(
                num_states * (ratio - 1), 2, config.head_dim, dtype=torch.float32
            )
        self.windows = [
            zeros(num_states * config.sliding_window, layout.window_width())
            for _ in range(config.num_hidden_layers)
        ]
        self.num_blocks = num_blocks
        self.num_states = num_states

    def block_views(self) -> list[Tensor]:
        """Every pool as [num_blocks, ...]."""
        pools = [*self.entries.values(), *self.index_keys.values()]
        return [pool[:-1].view(self.num_blocks, -1) for pool in pools] if self.num_blocks else []

    def state_views(self) -> list[Tensor]:
        """Every per-sequence buffer as [num_states, ...]."""
        buffers = [*self.windows, *(t for t in self.open_groups.values() if t.numel())]
        return [buffer.view(self.num_states, -1) for buffer in buffers] if self.num_states else []


def _direction(move: Move) -> tuple[str, str, str]:
    """Moves that agree in this may be done at once: no source of one is another's target."""
    assert move.source_place != move.target_place, "a move changes the place"
    return move.kind, move.source_place, move.target_place


class KVCache:
    """Device and host memory of one rank, read and written by layers through packed formats."""

    def __init__(
        self,
        layout: CacheLayout,
        *,
        num_blocks: int,
        num_states: int,
        num_host_blocks: int,
        num_host_states: int,
        device: torch.device,
    ) -> None:
        self.layout = layout
        device_memory = _Memory(layout, num_blocks, num_states, device)
        host_memory = _Memory(layout, num_host_blocks, num_host_states, torch.device("cpu"))
        self._memory = {"device": device_memory, "host": host_memory}
        self._views = {("block", place): memory.block_views() for place, memory in self._memory.items()} | {
            ("state", place): memory.state_views() for place, memory in self._memory.items()
        }
        self._pools = device_memory

    def apply(self, moves: list[Move]) -> None:
        """Carry out moves in order; a run of one kind and direction travels together."""
        for (kind, source_place, target_place), run in groupby(moves, key=_direction):
            pairs = [(move.source, move.target) for move in run]
            sources = torch.tensor([source for source, _ in pairs])
            targets = torch.tensor([target for _, target in pairs])
            views = zip(self._views[kind, source_place], self._views[kind, target_place], strict=True)
            for source, target in views:
                target[targets.to(target.device)] = source[sources.to(source.device)].to(target.device)

    def pack_window(self, rows: Tensor) -> Tensor:
        """[n, head_dim] -> what a ring stores."""
        return pack_fp8(rows) if self.layout.is_quantised else rows.to(self.layout.dtype)

    def unpack_window(self, packed: Tensor) -> Tensor:
        """What a ring stores -> [n, head_dim] fp32."""
        return unpack_fp8(packed) if self.layout.is_quantised else packed.float()

    def read_window(self, layer: int, rows: Tensor) -> Tensor:
        """Packed ring rows [n, width]."""
        return self._pools.windows[layer][rows]

    def write_window(self, layer: int, rows: Tensor, packed: Tensor) -> None:
        """Store packed rows."""
        self._pools.windows[layer][rows] = packed

    def read_open_groups(self, source: int, rows: Tensor) -> Tensor:
        """Keys and gates of open groups: [n, 2, head_dim] fp32."""
        return self._pools.open_groups[source][rows]

    def write_open_groups(self, source: int, rows: Tensor, keys_and_gates: Tensor) -> None:
        """Store keys and gates of tokens whose group is not complete."""
        self._pools.open_groups[source][rows] = keys_and_gates

    def write_entries(self, source: int, slots: Tensor, entries: Tensor, index_keys: Tensor) -> None:
        """Quantise, store rotated entries [n, head_dim] and index keys [n, index_head_dim]; slot -1 skips."""
        quantised = self.layout.is_quantised
        self._pools.entries[source][slots] = (
            pack_fp4_entry(entries) if quantised else entries.to(self.layout.dtype)
        )
        self._pools.index_keys[source][slots] = (
            pack_fp4_index(index_keys) if quantised else index_keys.to(self.layout.dtype)
        )

    def read_entries(self, source: int, slots: Tensor) -> Tensor:
        """slots [...] -> [..., head_dim] fp32."""
        stored = self._pools.entries[source][slots]
        return unpack_fp4_entry(stored) if self.layout.is_quantised else stored.float()

    def read_index_keys(self, source: int, slots: Tensor) -> Tensor:
        """slots [...] -> [..., index_head_dim] fp32."""
        stored = self._pools.index_keys[source][slots]
        return unpack_fp4_index(stored) if self.layout.is_quantised else stored.float()

    def quantise_index_query(self, q: Tensor) -> Tensor:
        """Index queries as keys are stored: fp32 values of the fp4 format."""
        return unpack_fp4_index(pack_fp4_index(q)) if self.layout.is_quantised else q.float()

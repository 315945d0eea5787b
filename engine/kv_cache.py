"""The memory of the engine: paged pools of packed entries and index keys, window rings, open groups.

It stores and moves bytes; which block or slot belongs to whom is the block manager's business. The
bytes are the model page's section 14; without cache quantisation they are the engine's dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from engine.batch import upload
from engine.block_manager import Move
from engine.config import KV_BLOCK_SIZE
from engine.locked_memory import locked_zeros
from engine.models.deepseek_v41_config import DeepseekV41Config
from kernels.cache_store import copy_rows_reference
from kernels.number_formats import ENTRY_BLOCK, SCALE_BLOCK


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
    """Blocks and state slots in one place; ``allocate`` gives zeros there, of a shape and a dtype."""

    def __init__(
        self,
        layout: CacheLayout,
        num_blocks: int,
        num_states: int,
        allocate: Callable[[tuple[int, ...], torch.dtype], Tensor],
    ) -> None:
        config = layout.config
        self.entries: dict[int, Tensor] = {}
        self.index_keys: dict[int, Tensor] = {}
        self.open_groups: dict[int, Tensor] = {}

        def zeros(*shape: int, dtype: torch.dtype = layout.storage_dtype) -> Tensor:
            return allocate(shape, dtype)

        for source in config.kv_source_layer_ids:
            ratio = config.compress_ratios[source]
            num_slots = num_blocks * (KV_BLOCK_SIZE // ratio)
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
        return [pool.view(self.num_blocks, -1) for pool in pools] if self.num_blocks else []

    def state_views(self) -> list[Tensor]:
        """Every per-sequence buffer as [num_states, ...]."""
        buffers = [*self.windows, *(t for t in self.open_groups.values() if t.numel())]
        return [buffer.view(self.num_states, -1) for buffer in buffers] if self.num_states else []


def _direction(move: Move) -> tuple[str, str, str]:
    """Moves that agree in this may be done at once: no source of one is another's target."""
    assert move.source_place != move.target_place, "a move changes the place"
    return move.kind, move.source_place, move.target_place


class KVCache:
    """Device and host memory of one rank.

    By KV source: ``entries`` [num_slots, entry_width], ``index_keys`` [num_slots, index_key_width],
    ``open_groups`` [num_states * (ratio - 1), 2, head_dim] fp32. By layer: ``windows``
    [num_states * window, window_width], position p of a state's sequence in row p modulo the window.

    ``copy_rows`` (the op's signature) moves bytes; host memory of a GPU's cache is page-locked, so that the
    device copies in its order of work and the host does not wait.
    """

    def __init__(
        self,
        layout: CacheLayout,
        *,
        num_blocks: int,
        num_states: int,
        num_host_blocks: int,
        num_host_states: int,
        device: torch.device,
        copy_rows: Callable[..., None] = copy_rows_reference,
    ) -> None:
        def on_device(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        def on_host(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            remedy = "set it to 0, or raise the limit on locked memory, ulimit -l"
            return locked_zeros(shape, dtype, f"engine.host_memory_bytes is not 0 ({remedy})")

        self.layout = layout
        self._device = device
        self._copy_rows = copy_rows
        device_memory = _Memory(layout, num_blocks, num_states, on_device)
        host_memory = _Memory(
            layout, num_host_blocks, num_host_states, on_host if device.type == "cuda" else on_device
        )
        self._memory = {"device": device_memory, "host": host_memory}
        self._views = {("block", place): memory.block_views() for place, memory in self._memory.items()} | {
            ("state", place): memory.state_views() for place, memory in self._memory.items()
        }
        self.num_states = num_states
        self.entries = device_memory.entries
        self.index_keys = device_memory.index_keys
        self.open_groups = device_memory.open_groups
        self.windows = device_memory.windows

    def apply(self, moves: list[Move]) -> None:
        """Carry out moves in order; a run of one kind and direction travels together."""
        for (kind, source_place, target_place), run in groupby(moves, key=_direction):
            pairs = np.array([(move.source, move.target) for move in run], dtype=np.int64)
            sources, targets = upload(pairs.T, self._device)
            views = zip(self._views[kind, source_place], self._views[kind, target_place], strict=True)
            for source, target in views:
                self._copy_rows(source, target, sources, targets)

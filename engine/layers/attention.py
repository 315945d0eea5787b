"""Attention of one layer: window + selected compressed entries, one softmax with a sink.

Keys of a query come in one fixed order (window positions ascending, then selected entries
ascending), whatever chunk they were computed in; the model page's section 3.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.batch import BatchInputs
from engine.kv_cache import KVCache
from engine.layers.compressor import Compressor
from engine.layers.indexer import Indexer, IndexKeys, Selection
from engine.layers.linear import ActivationFormat, Linear
from engine.layers.norm import RMSNorm
from engine.layers.rotary import RotaryEmbedding, RotaryTables
from engine.loader import WeightReader
from engine.models.deepseek_v41_config import DeepseekV41Config
from kernels.sparse_attention import sparse_attention_reference

QUERY_TILE = 32


class Attention:
    """Weights and the forward pass of one layer's attention; also a KV or index source where it is one."""

    def __init__(
        self,
        reader: WeightReader,
        prefix: str,
        config: DeepseekV41Config,
        layer: int,
        activations: ActivationFormat,
        rotary: RotaryEmbedding,
    ) -> None:
        self.layer = layer
        self.config = config
        self.ratio = config.compress_ratios[layer]
        self.kv_source = config.kv_source_of(layer)
        self._activations = activations
        self._rotary = rotary
        hidden, heads, head_dim = config.hidden_size, config.num_attention_heads, config.head_dim
        group_in = heads * head_dim // config.o_groups

        def norm(name: str, size: int) -> RMSNorm:
            return RMSNorm(
                reader.tensor(f"{prefix}.{name}.weight", (size,), torch.float32), config.rms_norm_eps
            )

        self._wq_a = Linear(reader.linear(f"{prefix}.wq_a", config.q_lora_rank, hidden))
        self._q_norm = norm("q_norm", config.q_lora_rank)
        self._wq_b = Linear(reader.linear(f"{prefix}.wq_b", heads * head_dim, config.q_lora_rank))
        self._wkv = Linear(reader.linear(f"{prefix}.wkv", head_dim, hidden))
        self._kv_norm = norm("kv_norm", head_dim)
        self._sink = reader.tensor(f"{prefix}.attn_sink", (heads,), torch.float32)
        wo_a = reader.linear(f"{prefix}.wo_a", config.o_groups * config.o_lora_rank, group_in)
        self._wo_a = [Linear(group) for group in wo_a.split(config.o_lora_rank)]
        self._wo_b = Linear(reader.linear(f"{prefix}.wo_b", hidden, config.o_groups * config.o_lora_rank))
        self._compressor: Compressor | None = None
        self._index_keys: IndexKeys | None = None
        self._indexer: Indexer | None = None
        if layer in config.kv_source_layer_ids:
            self._compressor = Compressor(reader, f"{prefix}.compressor", config, layer)
            self._index_keys = IndexKeys(reader, f"{prefix}.indexer", config)
        if layer in config.index_source_layer_ids:
            self._indexer = Indexer(reader, f"{prefix}.indexer", config, layer, activations)

    def store(self, x: Tensor, batch: BatchInputs, cache: KVCache) -> Tensor | None:
        """Every input row's share of the caches; runs also where no row has an output.

        Returns the window keys of history and input rows, [n, head_dim] fp32, or None when no
        window row of this layer is ever read.
        """
        self._store_entries(x, batch, cache)
        return self._store_window(x, batch, cache) if batch.has_window_rows(self.layer) else None

    def _store_entries(self, x: Tensor, batch: BatchInputs, cache: KVCache) -> None:
        """A KV source compresses complete groups and stores entries and index keys."""
        if self._compressor is None or self._index_keys is None:
            return
        inputs = batch.compress_inputs(self.layer, self.ratio)
        if inputs.group_positions.shape[0] == 0:
            # No group completes, but open tokens still have to be kept.
            self._compressor(x, inputs, cache)
            return
        latents = self._compressor(x, inputs, cache)
        tables = self._rotary.tables(inputs.group_positions, is_compressing=True)
        index_keys = self._index_keys(latents, tables)
        cache.write_entries(self.layer, inputs.entry_slots, tables.rotate(latents), index_keys)

    def __call__(
        self, x: Tensor, window_keys: Tensor, batch: BatchInputs, cache: KVCache, selection: Selection | None
    ) -> tuple[Tensor, Selection | None]:
        """x [input rows, hidden] -> ([output rows, hidden], the selection later layers reuse).

        ``window_keys`` come from ``store``; ``selection`` holds the rows of this layer's output.
        """
        inputs = batch.layers[self.layer]
        if inputs.keep is not None:
            x = x[inputs.keep]
        tables = self._rotary.tables(inputs.output_rows.positions, is_compressing=self.ratio > 0)
        q_latent = self._q_norm(self._wq_a(self._activations(x)))
        if self._indexer is not None:
            blocks = None if selection is None else selection.blocks
            select = batch.select_inputs(self.layer, self.ratio)
            selection = self._indexer(x, q_latent, tables, select, cache, blocks)
        config = self.config
        q = self._wq_b(self._activations(q_latent)).unflatten(
            1, (config.num_attention_heads, config.head_dim)
        )
        attended = self._attend(tables.rotate(q), window_keys, batch, cache, selection)
        return self._project(tables.rotate(attended, inverse=True)), selection

    def _store_window(self, x: Tensor, batch: BatchInputs, cache: KVCache) -> Tensor:
        """Window keys of history and input rows; the ring takes the newest rows."""
        inputs = batch.window_inputs(self.layer)
        rows = batch.layers[self.layer].rows
        tables: RotaryTables = self._rotary.tables(rows.positions, is_compressing=self.ratio > 0)
        kv = tables.rotate(self._kv_norm(self._wkv(self._activations(x))))
        packed = cache.pack_window(kv)
        # History is read before the ring is written: the newest rows overwrite the oldest.
        history = cache.read_window(self.layer, inputs.history_rows)
        cache.write_window(self.layer, inputs.ring_targets, packed[inputs.ring_sources])
        return cache.unpack_window(torch.cat([history, packed]))

    def _attend(
        self, q: Tensor, window_keys: Tensor, batch: BatchInputs, cache: KVCache, selection: Selection | None
    ) -> Tensor:
        """[num_rows, num_heads, head_dim] -> the same shape; one fixed tile of queries at a time."""
        window = batch.window_inputs(self.layer)
        out = []
        for start in range(0, q.shape[0], QUERY_TILE):
            rows = slice(start, start + QUERY_TILE)
            # Stale bytes behind an invalid key could be NaN, and NaN times zero is NaN.
            is_valid = window.is_valid[rows]
            keys = window_keys[window.key_rows[rows]].masked_fill(~is_valid[..., None], 0.0)
            if self.kv_source is not None:
                assert selection is not None, "a compressing layer runs after its index source"
                entries = selection.entries[rows]
                keys = torch.cat([keys, self._read_entries(entries, rows, batch, cache)], dim=1)
                is_valid = torch.cat([is_valid, entries >= 0], dim=1)
            scale = self.config.head_dim**-0.5
            out.append(sparse_attention_reference(q[rows], keys, is_valid, self._sink, scale=scale))
        return torch.cat(out)

    def _read_entries(self, entries: Tensor, rows: slice, batch: BatchInputs, cache: KVCache) -> Tensor:
        """Selected entries [n, index_topk] -> [n, index_topk, head_dim] fp32, zeros where there is none."""
        assert self.kv_source is not None
        select = batch.select_inputs(self.layer, self.ratio)
        # Only as many columns are read as the tile can have; the shape stays the same for every tile.
        most = min(int(select.host_num_visible[rows].max()), entries.shape[1])
        wanted = entries[:, :most]
        slots = select.slots(wanted.clamp_min(0), select.chunks[rows])
        read = cache.read_entries(self.kv_source, slots).masked_fill((wanted < 0)[..., None], 0.0)
        return torch.nn.functional.pad(read, (0, 0, 0, entries.shape[1] - most))

    def _project(self, attended: Tensor) -> Tensor:
        """Grouped output: consecutive heads share a down-projection. ``wo_a`` reads unquantised input."""
        groups = attended.flatten(1).chunk(self.config.o_groups, dim=1)
        low = torch.cat([wo(group) for wo, group in zip(self._wo_a, groups, strict=True)], dim=1)
        return self._wo_b(self._activations(low))

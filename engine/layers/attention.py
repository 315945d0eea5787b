"""Attention of one layer: window + selected compressed entries, one softmax with a sink.

Keys of a query come in one fixed order (window positions ascending, then selected entries
ascending), whatever chunk they were computed in; the model page's section 3.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kv_cache import KVCache
from engine.layers.compressor import Compressor
from engine.layers.indexer import Indexer, Selection
from engine.layers.linear import ActivationFormat, QuantisedLinear
from engine.layers.norm import RMSNorm
from engine.layers.ops import Ops
from engine.layers.rotary import RotaryEmbedding, RotaryTables
from engine.loader import WeightReader
from engine.models.deepseek_v41_config import DeepseekV41Config
from engine.step_inputs import StepInputs
from kernels.number_formats import QuantisedRows


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
        ops: Ops,
    ) -> None:
        self._layer = layer
        self._config = config
        self._ratio = config.compress_ratios[layer]
        self._kv_source = config.kv_source_of(layer)
        self._activations = activations
        self._rotary = rotary
        self._ops = ops
        hidden, heads, head_dim = config.hidden_size, config.num_attention_heads, config.head_dim
        group_in = heads * head_dim // config.o_groups

        def projection(name: str, out_features: int, in_features: int) -> QuantisedLinear:
            weight = reader.quantised([f"{prefix}.{name}"], out_features, in_features)
            return activations.projection(weight, reader.dtype)

        self._wq_a = projection("wq_a", config.q_lora_rank, hidden)
        q_norm = reader.tensor(f"{prefix}.q_norm.weight", (config.q_lora_rank,), torch.float32)
        self._q_norm = RMSNorm(q_norm, config.rms_norm_eps, ops)
        self._wq_b = projection("wq_b", heads * head_dim, config.q_lora_rank)
        self._wkv = projection("wkv", head_dim, hidden)
        self._kv_norm = reader.tensor(f"{prefix}.kv_norm.weight", (head_dim,), torch.float32)
        self._sink = reader.tensor(f"{prefix}.attn_sink", (heads,), torch.float32)
        low_rank = config.o_groups * config.o_lora_rank
        self._wo_a = reader.quantised([f"{prefix}.wo_a"], low_rank, group_in)
        self._wo_b = projection("wo_b", hidden, low_rank)
        self._compressor: Compressor | None = None
        self._indexer: Indexer | None = None
        if layer in config.kv_source_layer_ids:
            self._compressor = Compressor(reader, prefix, config, layer, rotary, ops)
        if layer in config.index_source_layer_ids:
            self._indexer = Indexer(reader, f"{prefix}.indexer", config, layer, activations, ops)

    def __call__(
        self, x: Tensor, batch: StepInputs, cache: KVCache, selection: Selection | None
    ) -> tuple[Tensor | None, Selection | None]:
        """Every input row enters the caches; rows with an output attend.

        Args:
            x: [input rows, hidden], normed.
            selection: of this layer's output rows, from the last index source.

        Returns:
            [output rows, hidden], or None where no row has an output; and the selection later layers reuse.
        """
        inputs = batch.layers[self._layer]
        if self._compressor is not None:
            self._compressor(x, batch.compress_inputs(self._layer, self._ratio), cache)
        if not batch.has_window_rows(self._layer):
            return None, None
        tables = self._rotary.tables(inputs.rows.positions, is_compressing=self._ratio > 0)
        rounded = self._activations(x)
        own_rows = self._ops.store_window_kv(
            self._wkv(rounded),
            self._kv_norm,
            tables.cos,
            tables.sin,
            eps=self._config.rms_norm_eps,
            is_packed=cache.layout.is_quantised,
        )
        y: Tensor | None = None
        if inputs.output_rows.num_rows:
            if inputs.keep is not None:
                x, tables = x[inputs.keep], tables.take(inputs.keep)
                rounded = self._activations(x)
            y, selection = self._attend(x, rounded, tables, own_rows, batch, cache, selection)
        # Only now: the newest rows overwrite the oldest, which this step's queries still read.
        window = batch.window_inputs(self._layer)
        self._ops.copy_rows(own_rows, cache.windows[self._layer], window.ring_sources, window.ring_targets)
        return y, selection

    def _attend(
        self,
        x: Tensor,
        rounded: QuantisedRows | Tensor,
        tables: RotaryTables,
        own_rows: Tensor,
        batch: StepInputs,
        cache: KVCache,
        selection: Selection | None,
    ) -> tuple[Tensor, Selection | None]:
        config = self._config
        q_latent = self._q_norm(self._wq_a(rounded))
        if self._indexer is not None:
            blocks = None if selection is None else selection.blocks
            select = batch.select_inputs(self._layer, self._ratio)
            selection = self._indexer(x, q_latent, tables, select, cache, blocks)
        q = self._wq_b(self._activations(q_latent)).unflatten(
            1, (config.num_attention_heads, config.head_dim)
        )
        assert selection is not None or self._kv_source is None, "a compressing layer follows an index source"
        has_entries = self._kv_source is not None and selection is not None
        attended = self._ops.paged_sparse_attention(
            self._ops.rotate_queries(q, tables.cos, tables.sin),
            cache.windows[self._layer],
            own_rows,
            batch.window_inputs(self._layer).rows,
            cache.entries[self._kv_source] if self._kv_source is not None else None,
            selection.slots if has_entries and selection is not None else None,
            self._sink,
            tables.cos,
            tables.sin,
            scale=config.head_dim**-0.5,
        )
        return self._project(attended), selection

    def _project(self, attended: Tensor) -> Tensor:
        """Grouped output: consecutive heads share a down-projection. ``wo_a`` reads unquantised input."""
        low = self._ops.grouped_linear(attended.flatten(1), self._wo_a, num_groups=self._config.o_groups)
        return self._wo_b(self._activations(low))

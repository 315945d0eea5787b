"""Indexer: which compressed entries a query attends to, and which blocks later reindexing may look in."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from engine.kv_cache import KVCache
from engine.layers.linear import ActivationFormat, Linear
from engine.layers.ops import Ops
from engine.layers.rotary import RotaryTables
from engine.loader import WeightReader
from engine.models.deepseek_v41_config import DeepseekV41Config
from engine.step_inputs import SelectInputs
from kernels.indexer import KeyPages


class Selection(NamedTuple):
    """Entries of each row, ascending, -1 behind; their pool slots; kept candidate blocks where published."""

    entries: Tensor  # [num_rows, index_topk] int64
    slots: Tensor  # [num_rows, index_topk] int32
    blocks: Tensor | None  # [num_rows, candidate_topk_blocks] int64

    def take(self, rows: Tensor) -> Selection:
        """The selection of some rows."""
        return Selection(
            self.entries[rows], self.slots[rows], None if self.blocks is None else self.blocks[rows]
        )


class Indexer:
    """Queries of an index source and its selection; the model page's section 6."""

    def __init__(
        self,
        reader: WeightReader,
        prefix: str,
        config: DeepseekV41Config,
        layer: int,
        activations: ActivationFormat,
        ops: Ops,
    ) -> None:
        heads, dim = config.index_n_heads, config.index_head_dim
        wq_b = reader.quantised([f"{prefix}.wq_b"], heads * dim, config.q_lora_rank)
        self._wq_b = activations.projection(wq_b, reader.dtype)
        weights_proj = reader.linear(f"{prefix}.weights_proj", heads, config.hidden_size)
        self._weights_proj = Linear(weights_proj, ops)
        self._activations = activations
        self._config = config
        self._ops = ops
        source = config.kv_source_of(layer)
        assert source is not None, "an index source compresses"
        self._source = source
        self._publishes_blocks = layer == config.candidate_source_layer_id
        self._is_reindex = config.is_reindex(layer)

    def __call__(
        self,
        x: Tensor,
        q_latent: Tensor,
        tables: RotaryTables,
        inputs: SelectInputs,
        cache: KVCache,
        blocks: Tensor | None,
    ) -> Selection:
        """Select for every row.

        Args:
            x: [num_rows, hidden] normed input; q_latent: [num_rows, q_lora_rank].
            blocks: [num_rows, candidate_topk_blocks] of the candidate source, for a reindex layer.
        """
        config = self._config
        assert blocks is not None or not self._is_reindex, "a reindex layer runs after its candidate source"
        q = self._wq_b(self._activations(q_latent)).unflatten(
            1, (config.index_n_heads, config.index_head_dim)
        )
        head_scale = config.index_head_dim**-0.5 * config.index_n_heads**-0.5
        pages = KeyPages(
            cache.index_keys[self._source],
            inputs.block_tables,
            inputs.chunks,
            inputs.num_visible,
            inputs.entries_per_block,
            inputs.max_visible,
        )
        q = self._ops.rotate_queries(q, tables.cos, tables.sin)
        selected = self._ops.select_entries(
            self._ops.pack_index_queries(q) if cache.layout.is_quantised else q,
            self._weights_proj(x).float() * head_scale,
            pages,
            k=config.index_topk,
            block_size=config.candidate_block_size,
            num_blocks=config.candidate_topk_blocks if self._publishes_blocks else 0,
            blocks=blocks if self._is_reindex else None,
        )
        slots = self._ops.selection_slots(
            selected.entries,
            inputs.chunks,
            inputs.block_tables,
            entries_per_block=inputs.entries_per_block,
        )
        return Selection(selected.entries, slots, selected.blocks if self._publishes_blocks else blocks)

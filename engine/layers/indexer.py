"""Indexer: which compressed entries a query attends to, and which blocks later reindexing may look in.

Rows are scored in fixed row tiles against fixed entry tiles, so a score never depends on the batch
and the scratch never on the context.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from engine.batch import SelectInputs
from engine.kv_cache import KVCache
from engine.layers.linear import ActivationFormat, Linear
from engine.layers.norm import RMSNorm
from engine.layers.rotary import RotaryTables
from engine.loader import WeightReader
from engine.models.deepseek_v41_config import DeepseekV41Config
from kernels.indexer import (
    ascending_selection_reference,
    block_maxima_reference,
    index_scores_reference,
    merge_topk_reference,
)

ROW_TILE = 32
ENTRY_TILE = {"cpu": 128, "cuda": 2048}


class Selection(NamedTuple):
    """Entries of each row, ascending, -1 behind; and the kept candidate blocks where published."""

    entries: Tensor  # [num_rows, index_topk] int64
    blocks: Tensor | None  # [num_rows, candidate_topk_blocks] int64


class IndexKeys:
    """A KV source's index keys; the model page's section 6."""

    def __init__(self, reader: WeightReader, prefix: str, config: DeepseekV41Config) -> None:
        dim = config.index_head_dim
        self._wk = Linear(reader.linear(f"{prefix}.wk", dim, config.head_dim))
        self._norm = RMSNorm(
            reader.tensor(f"{prefix}.k_norm.weight", (dim,), torch.float32), config.rms_norm_eps
        )

    def __call__(self, latents: Tensor, tables: RotaryTables) -> Tensor:
        """Unrotated latents [num_groups, head_dim] -> rotated keys [num_groups, index_head_dim]."""
        return tables.rotate(self._norm(self._wk(latents)))


class Indexer:
    """Queries of an index source and its selection."""

    def __init__(
        self,
        reader: WeightReader,
        prefix: str,
        config: DeepseekV41Config,
        layer: int,
        activations: ActivationFormat,
    ) -> None:
        heads, dim = config.index_n_heads, config.index_head_dim
        self._wq_b = Linear(reader.linear(f"{prefix}.wq_b", heads * dim, config.q_lora_rank))
        self._weights_proj = Linear(reader.linear(f"{prefix}.weights_proj", heads, config.hidden_size))
        self._activations = activations
        self._config = config
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
        q = self._wq_b(self._activations(q_latent)).unflatten(
            1, (config.index_n_heads, config.index_head_dim)
        )
        q = cache.quantise_index_query(tables.rotate(q))
        head_scale = config.index_head_dim**-0.5 * config.index_n_heads**-0.5
        head_weights = self._weights_proj(x).float() * head_scale
        tiles = []
        for start in range(0, x.shape[0], ROW_TILE):
            rows = slice(start, start + ROW_TILE)
            if self._is_reindex:
                assert blocks is not None, "a reindex layer runs after its candidate source"
                tiles.append(self._select_in_blocks(q, head_weights, inputs, cache, blocks, rows))
            else:
                tiles.append(self._select(q, head_weights, inputs, cache, rows))
        if self._publishes_blocks:
            blocks = torch.cat([tile.blocks for tile in tiles if tile.blocks is not None])
        return Selection(torch.cat([tile.entries for tile in tiles]), blocks)

    def _select(
        self, q: Tensor, head_weights: Tensor, inputs: SelectInputs, cache: KVCache, rows: slice
    ) -> Selection:
        config, device = self._config, q.device
        visible = inputs.num_visible[rows]
        max_visible = int(inputs.host_num_visible[rows].max())
        size = config.candidate_block_size
        num_rows = visible.shape[0]
        newest = torch.where(visible > 0, (visible - 1) // size, -1)
        if max_visible <= config.index_topk and max_visible <= size * config.candidate_topk_blocks:
            # Everything visible is selected, and every block kept: there is nothing to score.
            return Selection(
                _all_below(visible, config.index_topk), _all_below(newest + 1, config.candidate_topk_blocks)
            )
        best = _empty_best(num_rows, config.index_topk, device)
        best_blocks = _empty_best(num_rows, config.candidate_topk_blocks, device)
        chunks = inputs.chunks[rows]
        host_chunks = inputs.host_chunks[rows]
        is_shared = bool((host_chunks == host_chunks[0]).all())
        # A tile of entries holds whole candidate blocks.
        step = max(ENTRY_TILE[device.type] // size, 1) * size
        for first in range(0, max_visible, step):
            entries = torch.arange(first, first + step, device=device)
            wanted = entries[None].expand(1 if is_shared else num_rows, -1)
            slots = inputs.slots(wanted, chunks[: wanted.shape[0]])
            keys = cache.read_index_keys(self._source, slots)
            scores = index_scores_reference(q[rows], head_weights[rows], keys)
            scores = scores.masked_fill(entries[None] >= visible[:, None], float("-inf"))
            best = merge_topk_reference(*best, scores, entries)
            if self._publishes_blocks:
                maxima = block_maxima_reference(scores, newest, first // size, size)
                numbers = torch.arange(first // size, first // size + maxima.shape[1], device=device)
                best_blocks = merge_topk_reference(*best_blocks, maxima, numbers)
        blocks = ascending_selection_reference(*best_blocks) if self._publishes_blocks else None
        return Selection(ascending_selection_reference(*best), blocks)

    def _select_in_blocks(
        self,
        q: Tensor,
        head_weights: Tensor,
        inputs: SelectInputs,
        cache: KVCache,
        blocks: Tensor,
        rows: slice,
    ) -> Selection:
        """Score only the entries of each row's kept blocks, in ascending order."""
        config, device = self._config, q.device
        visible = inputs.num_visible[rows]
        max_visible = int(inputs.host_num_visible[rows].max())
        if max_visible <= config.index_topk and max_visible <= config.candidate_block_size * blocks.shape[1]:
            return Selection(_all_below(visible, config.index_topk), None)
        size = config.candidate_block_size
        kept = blocks[rows]
        best = _empty_best(visible.shape[0], config.index_topk, device)
        step = max(ENTRY_TILE[device.type] // size, 1)
        num_blocks = min(kept.shape[1], -(-max_visible // size))
        for first in range(0, num_blocks, step):
            some = kept[:, first : first + step]
            if some.shape[1] < step:
                some = torch.nn.functional.pad(some, (0, step - some.shape[1]), value=-1)
            entries = (some[:, :, None] * size + torch.arange(size, device=device)).flatten(1)
            is_out = (some < 0).repeat_interleave(size, dim=1) | (entries >= visible[:, None])
            slots = inputs.slots(entries.clamp_min(0), inputs.chunks[rows])
            keys = cache.read_index_keys(self._source, slots)
            scores = index_scores_reference(q[rows], head_weights[rows], keys).masked_fill(
                is_out, float("-inf")
            )
            best = merge_topk_reference(*best, scores, entries)
        return Selection(ascending_selection_reference(*best), None)


def _all_below(counts: Tensor, width: int) -> Tensor:
    """[n] counts -> [n, width] int64: 0 .. count - 1, then -1."""
    numbers = torch.arange(width, device=counts.device)[None]
    return torch.where(numbers < counts[:, None], numbers, -1)


def _empty_best(num_rows: int, k: int, device: torch.device) -> tuple[Tensor, Tensor]:
    scores = torch.full((num_rows, k), float("-inf"), device=device)
    return scores, torch.full((num_rows, k), -1, dtype=torch.int64, device=device)

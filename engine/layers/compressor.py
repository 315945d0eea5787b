"""Compressor: a KV source's entries and index keys from complete groups; open groups wait for their rest."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kv_cache import KVCache
from engine.layers.linear import Linear
from engine.layers.ops import Ops
from engine.layers.rotary import RotaryEmbedding
from engine.loader import WeightReader
from engine.models.deepseek_v41_config import DeepseekV41Config
from engine.step_inputs import CompressInputs


class Compressor:
    """The model page's sections 5 and 6 (keys). Ratio 1 projects; higher ratios pool in fp32 with gates."""

    def __init__(
        self,
        reader: WeightReader,
        prefix: str,
        config: DeepseekV41Config,
        layer: int,
        rotary: RotaryEmbedding,
        ops: Ops,
    ) -> None:
        hidden, head_dim, index_dim = config.hidden_size, config.head_dim, config.index_head_dim
        self._layer = layer
        self._eps = config.rms_norm_eps
        self._rotary = rotary
        self._ops = ops
        self._dtype = reader.dtype
        own, keys = f"{prefix}.compressor", f"{prefix}.indexer"
        ratio = config.compress_ratios[layer]
        self._wkv: Linear | None = None
        if ratio == 1:
            self._wkv = Linear(reader.linear(f"{own}.wkv", head_dim, hidden), ops)
        else:
            self._pooled_weight = reader.fp32_linear([f"{own}.wkv", f"{own}.wgate"], head_dim, hidden)
        self._norm = reader.tensor(f"{own}.norm.weight", (head_dim,), torch.float32)
        self._wk = Linear(reader.linear(f"{keys}.wk", index_dim, head_dim), ops)
        self._k_norm = reader.tensor(f"{keys}.k_norm.weight", (index_dim,), torch.float32)

    def __call__(self, x: Tensor, inputs: CompressInputs, cache: KVCache) -> None:
        """x [num_rows, hidden] normed: store what completes, keep what stays open."""
        open_groups = None
        if self._wkv is not None:
            source = self._wkv(x)
        else:
            source = self._ops.fp32_linear(x, self._pooled_weight).unflatten(1, (2, -1))
            open_groups = cache.open_groups[self._layer]
        if inputs.entry_slots.shape[0]:
            self._store(source, open_groups, inputs, cache)
        if open_groups is not None:
            self._ops.copy_rows(source, open_groups, inputs.open_sources, inputs.open_targets)

    def _store(
        self, source: Tensor, open_groups: Tensor | None, inputs: CompressInputs, cache: KVCache
    ) -> None:
        tables = self._rotary.tables(inputs.group_positions, is_compressing=True)
        latents = self._ops.compress_and_store(
            source,
            open_groups,
            inputs.group_rows,
            self._norm,
            tables.cos,
            tables.sin,
            inputs.entry_slots,
            cache.entries[self._layer],
            eps=self._eps,
            dtype=self._dtype,
        )
        self._ops.store_index_keys(
            self._wk(latents),
            self._k_norm,
            tables.cos,
            tables.sin,
            inputs.entry_slots,
            cache.index_keys[self._layer],
            eps=self._eps,
        )

"""Engram of one layer: hashed n-gram rows, projected and gated into the streams; the model page's section 8.

The table stays as stored (memory-mapped on a CPU): only the rows that are looked up are widened.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.layers.linear import ActivationFormat, QuantisedLinear
from engine.layers.ngrams import NgramTables
from engine.layers.ops import Ops
from engine.loader import WeightReader
from engine.models.deepseek_v41_config import DeepseekV41Config
from kernels.engram import engram_hash_reference
from kernels.number_formats import SCALE_BLOCK


class Engram:
    """Weights and the forward pass of one engram layer."""

    def __init__(
        self,
        reader: WeightReader,
        prefix: str,
        config: DeepseekV41Config,
        index: int,
        tables: NgramTables,
        activations: ActivationFormat,
        ops: Ops,
    ) -> None:
        k, hidden, dim = config.hc_mult, config.hidden_size, config.engram_head_dim
        num_rows = config.engram_num_embeddings[index]
        width = (config.engram_max_ngram_size - 1) * config.engram_n_heads * dim
        self._config = config
        self._dtype = reader.dtype
        self._activations = activations
        self._ops = ops
        stored = reader.mapped if reader.device.type == "cpu" else reader.raw
        self._table = stored(f"{prefix}.embed.weight", (num_rows, dim))
        is_scaled = reader.has(f"{prefix}.embed.scale")
        known = (torch.float8_e4m3fn,) if is_scaled else (torch.bfloat16, torch.float32)
        if self._table.dtype not in known:
            raise ConfigError(
                f"tensor {prefix}.embed.weight is stored as {self._table.dtype}, "
                f"expected {' or '.join(map(str, known))}"
            )
        self._table_scale: Tensor | None = None
        if is_scaled:
            scale = stored(f"{prefix}.embed.scale", (num_rows, dim // SCALE_BLOCK))
            self._table_scale = scale.view(torch.uint8)
        wkv = reader.quantised([f"{prefix}.wkv"], (k + 1) * hidden, width)
        self._wkv = QuantisedLinear(wkv, reader.dtype, ops)
        self._q_weight = reader.tensor(f"{prefix}.q_weight", (k, hidden), torch.float32)
        self._k_weight = reader.tensor(f"{prefix}.k_weight", (k, hidden), torch.float32)
        self._multipliers = torch.from_numpy(tables.multipliers[index]).to(reader.device)
        self._primes = torch.from_numpy(tables.primes[index]).to(reader.device)
        self._offsets = torch.from_numpy(tables.offsets[index]).to(reader.device)

    def hash_rows(self, ngram_classes: Tensor) -> Tensor:
        """[num_rows, N] int64 classes -> [num_rows, (N - 1) * num_heads] int64 table rows."""
        return engram_hash_reference(ngram_classes, self._multipliers, self._primes, self._offsets)

    def __call__(self, streams: Tensor, hash_rows: Tensor) -> Tensor:
        """streams [num_rows, K, hidden], hash_rows [num_rows, n] -> new streams."""
        k, hidden = self._config.hc_mult, self._config.hidden_size
        looked_up = self._ops.engram_gather(self._table, self._table_scale, hash_rows, dtype=self._dtype)
        projected = self._wkv(self._activations(looked_up))
        keys = projected[:, : k * hidden].unflatten(1, (k, hidden))
        value = projected[:, k * hidden :]
        return self._ops.engram_gate(
            streams, keys, value, self._q_weight, self._k_weight, eps=self._config.rms_norm_eps
        )

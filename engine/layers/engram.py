"""Engram of one layer: hashed n-gram rows, projected and gated into the streams; the model page's section 8.

Where the rows' table lies is ``engine/engram_tables.py``'s business.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from engine.engram_tables import EngramTables, TableRows
from engine.layers.linear import ActivationFormat
from engine.layers.ops import Ops
from engine.loader import WeightReader
from engine.models.deepseek_v41_config import DeepseekV41Config


class Engram:
    """Weights and the forward pass of one engram layer."""

    def __init__(
        self,
        reader: WeightReader,
        prefix: str,
        config: DeepseekV41Config,
        index: int,
        tables: EngramTables,
        activations: ActivationFormat,
        ops: Ops,
    ) -> None:
        k, hidden, dim = config.hc_mult, config.hidden_size, config.engram_head_dim
        width = (config.engram_max_ngram_size - 1) * config.engram_n_heads * dim
        self._config = config
        self._activations = activations
        self._ops = ops
        self._tables = tables
        self._index = index
        wkv = reader.quantised([f"{prefix}.wkv"], (k + 1) * hidden, width)
        self._wkv = activations.projection(wkv, reader.dtype)
        self._q_weight = reader.tensor(f"{prefix}.q_weight", (k, hidden), torch.float32)
        self._k_weight = reader.tensor(f"{prefix}.k_weight", (k, hidden), torch.float32)

    def prefetch(self, ngram_classes: Callable[[], np.ndarray]) -> TableRows:
        """Set out for what rows will look up: the longer before they are needed, the better."""
        return self._tables.prefetch(self._index, ngram_classes)

    def __call__(self, streams: Tensor, rows: TableRows) -> Tensor:
        """streams [num_rows, K, hidden] and what their rows look up -> new streams."""
        k, hidden = self._config.hc_mult, self._config.hidden_size
        projected = self._wkv(self._activations(rows.looked_up()))
        keys = projected[:, : k * hidden].unflatten(1, (k, hidden))
        value = projected[:, k * hidden :]
        return self._ops.engram_gate(
            streams, keys, value, self._q_weight, self._k_weight, eps=self._config.rms_norm_eps
        )

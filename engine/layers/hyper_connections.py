"""Hyper-connections of one site: how a sublayer reads from and writes to the residual streams."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.loader import WeightReader
from engine.models.deepseek_v41_config import DeepseekV41Config
from kernels.hyper_connections import StreamMix, mix_streams_reference


class HyperConnection:
    """Mixing weights of one site; the model page's section 7."""

    def __init__(self, reader: WeightReader, prefix: str, config: DeepseekV41Config) -> None:
        k = config.hc_mult
        size = 2 * k + k * k
        self._config = config
        self._fn = reader.tensor(f"{prefix}_fn", (size, k * config.hidden_size), torch.float32)
        self._base = reader.tensor(f"{prefix}_base", (size,), torch.float32)
        self._scale = reader.tensor(f"{prefix}_scale", (3,), torch.float32)

    def __call__(self, streams: Tensor) -> StreamMix:
        """[num_rows, K, hidden] -> the site's mix."""
        config = self._config
        return mix_streams_reference(
            streams,
            self._fn,
            self._base,
            self._scale,
            num_iterations=config.hc_sinkhorn_iters,
            eps=config.hc_eps,
            norm_eps=config.rms_norm_eps,
        )

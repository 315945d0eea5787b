"""Compressor: a KV source's latents from complete groups, with open groups kept between steps."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.batch import CompressInputs
from engine.kv_cache import KVCache
from engine.layers.linear import Linear
from engine.layers.norm import RMSNorm
from engine.loader import WeightReader
from engine.models.deepseek_v41_config import DeepseekV41Config
from kernels.compressor import pool_groups_reference


class Compressor:
    """The model page's section 5. Ratio 1 projects; higher ratios pool in fp32 with per-channel gates."""

    def __init__(self, reader: WeightReader, prefix: str, config: DeepseekV41Config, layer: int) -> None:
        hidden, head_dim = config.hidden_size, config.head_dim
        self.layer = layer
        self.ratio = config.compress_ratios[layer]
        self._dtype = reader.dtype
        dtype = reader.dtype if self.ratio == 1 else torch.float32
        self._wkv = Linear(reader.linear(f"{prefix}.wkv", head_dim, hidden, dtype))
        self._wgate = (
            Linear(reader.linear(f"{prefix}.wgate", head_dim, hidden, dtype)) if self.ratio > 1 else None
        )
        self._norm = RMSNorm(
            reader.tensor(f"{prefix}.norm.weight", (head_dim,), torch.float32), config.rms_norm_eps
        )

    def __call__(self, x: Tensor, inputs: CompressInputs, cache: KVCache) -> Tensor:
        """Latents of the groups that complete: x [num_rows, hidden] -> [num_groups, head_dim], unrotated."""
        if self._wgate is None:
            return self._norm(self._wkv(x)[inputs.group_rows[:, 0]])
        wide = x.float()
        fresh = torch.stack([self._wkv(wide), self._wgate(wide)], dim=1)
        rows = torch.cat([cache.read_open_groups(self.layer, inputs.open_rows), fresh])
        latents = pool_groups_reference(rows, inputs.group_rows).to(self._dtype)
        cache.write_open_groups(self.layer, inputs.open_targets, fresh[inputs.open_sources])
        return self._norm(latents)

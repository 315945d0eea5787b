"""Rotary tables of some rows, from two bases: window-only layers and compressing layers."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.models.deepseek_v41_config import DeepseekV41Config
from kernels.rope import YarnScaling, rope_frequencies, rope_tables


class RotaryEmbedding:
    """Frequencies of both bases; the model page's section 4."""

    def __init__(self, config: DeepseekV41Config, device: torch.device) -> None:
        dim = config.qk_rope_head_dim
        yarn = YarnScaling(
            factor=config.yarn_factor,
            beta_fast=config.yarn_beta_fast,
            beta_slow=config.yarn_beta_slow,
            original_max_position_embeddings=config.yarn_original_max_position_embeddings,
        )
        # Frequencies are made on the CPU, so that every device rotates by the same angles.
        self._window = rope_frequencies(dim, config.rope_theta, None).to(device)
        self._compressed = rope_frequencies(dim, config.compress_rope_theta, yarn).to(device)
        self._newest: dict[bool, tuple[Tensor, RotaryTables]] = {}

    def tables(self, positions: Tensor, *, is_compressing: bool) -> RotaryTables:
        """Tables for positions [num_rows]; ``is_compressing``: the layer's ratio is above 0.

        Most layers of a step run the same rows: asked again for the same tensor, it gives the same tables.
        """
        known = self._newest.get(is_compressing)
        if known is None or known[0] is not positions:
            frequencies = self._compressed if is_compressing else self._window
            known = positions, RotaryTables(*rope_tables(positions, frequencies))
            self._newest[is_compressing] = known
        return known[1]


class RotaryTables:
    """Cosines and sines of some rows, each [num_rows, rope_dim / 2] fp32."""

    def __init__(self, cos: Tensor, sin: Tensor) -> None:
        self.cos = cos
        self.sin = sin

    def take(self, rows: Tensor) -> RotaryTables:
        """The tables of some rows."""
        return RotaryTables(self.cos[rows], self.sin[rows])

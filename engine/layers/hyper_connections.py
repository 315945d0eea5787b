"""The residual streams and the sites that read from and write to them; the model page's sections 2 and 7.

A site's ``pre`` weights collapse the streams for the *next* site: the first attention reads stream 0
alone. What a sublayer wrote is expanded together with the next site's read, in one pass.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.layers.ops import Ops
from engine.loader import WeightReader
from engine.models.deepseek_v41_config import DeepseekV41Config
from kernels.hyper_connections import StreamMix


class HyperConnection:
    """Weights of one site: its mix, and the norm of what its sublayer reads."""

    def __init__(
        self, reader: WeightReader, prefix: str, norm_name: str, config: DeepseekV41Config, ops: Ops
    ) -> None:
        k = config.hc_mult
        size = 2 * k + k * k
        self.norm_weight = reader.tensor(norm_name, (config.hidden_size,), torch.float32)
        fn = reader.finite(f"{prefix}_fn", (size, k * config.hidden_size))
        self.fn = ops.mix_weight(fn, reader.dtype)
        self.base = reader.tensor(f"{prefix}_base", (size,), torch.float32)
        self.scale = reader.tensor(f"{prefix}_scale", (3,), torch.float32)


class ResidualStreams:
    """K streams of every row: [num_rows, K, hidden], and the last site's mix."""

    def __init__(self, embedded: Tensor, config: DeepseekV41Config, ops: Ops) -> None:
        self._config = config
        self._ops = ops
        self._streams = embedded[:, None].repeat(1, config.hc_mult, 1)
        self._pre = torch.zeros(self._streams.shape[:2], dtype=torch.float32, device=embedded.device)
        self._pre[:, 0] = 1.0
        self._mix: StreamMix | None = None
        self._written: Tensor | None = None

    @property
    def streams(self) -> Tensor:
        """The streams, with everything written so far."""
        if self._written is not None and self._mix is not None:
            post, comb = self._mix.post, self._mix.comb
            self._streams = self._ops.expand_streams(self._written, self._streams, post, comb)
            self._written = None
        return self._streams

    @streams.setter
    def streams(self, streams: Tensor) -> None:
        self._streams, self._written = streams, None

    @property
    def pre(self) -> Tensor:
        """[num_rows, K] fp32, what collapses the streams for the next reader."""
        return self._pre

    def read(self, site: HyperConnection) -> Tensor:
        """The next sublayer's input, [num_rows, hidden], collapsed and normed; its mix is kept."""
        config = self._config
        weights = (self._pre, site.norm_weight, site.fn, site.base, site.scale)
        options = {
            "num_iterations": config.hc_sinkhorn_iters,
            "eps": config.hc_eps,
            "norm_eps": config.rms_norm_eps,
        }
        if self._written is None or self._mix is None:
            found = self._ops.read_streams(self._streams, *weights, **options)
        else:
            found = self._ops.update_streams(self._written, self._streams, self._mix, *weights, **options)
        self._streams, self._mix, self._written = found.streams, found.mix, None
        self._pre = found.mix.pre
        return found.x

    def write(self, y: Tensor) -> None:
        """What the sublayer that read last gives: y [num_rows, hidden]."""
        self._written = y

    def take(self, rows: Tensor) -> None:
        """Keep some rows only."""
        self._streams, self._pre = self._streams[rows], self._pre[rows]
        if self._mix is not None:
            self._mix = StreamMix(*(part[rows] for part in self._mix))
        if self._written is not None:
            self._written = self._written[rows]

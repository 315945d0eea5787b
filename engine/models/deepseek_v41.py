"""DeepSeek-V4.1's text model: embedding, layers with the one-site lag, head; the model page's section 2.

The residual is K streams wide. A site's ``pre`` weights collapse the streams for the *next* site:
the first attention reads stream 0 alone, and the last FFN's ``pre`` does the final collapse.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from engine.batch import BatchInputs
from engine.kv_cache import KVCache
from engine.layers.attention import Attention
from engine.layers.engram import Engram
from engine.layers.hyper_connections import HyperConnection
from engine.layers.indexer import Selection
from engine.layers.linear import ActivationFormat, Linear
from engine.layers.moe import MoE
from engine.layers.ngrams import NgramTables
from engine.layers.norm import RMSNorm
from engine.layers.rotary import RotaryEmbedding
from engine.loader import WeightReader
from engine.models.deepseek_v41_config import DeepseekV41Config
from kernels.hyper_connections import collapse_streams_reference, expand_streams_reference

Trace = Callable[[str, Tensor], None]
"""Called with a name such as ``streams.layer3`` and that layer's rows, padding included."""


class DecoderLayer:
    """Engram (where the layer has one), attention and MoE, each between two hyper-connection mixes."""

    def __init__(
        self,
        reader: WeightReader,
        config: DeepseekV41Config,
        layer: int,
        tables: NgramTables | None,
        activations: ActivationFormat,
        rotary: RotaryEmbedding,
    ) -> None:
        prefix = f"layers.{layer}"
        self._layer = layer
        self._engram: Engram | None = None
        if layer in config.engram_layer_ids:
            assert tables is not None, "a model with engram layers has n-gram tables"
            index = config.engram_layer_ids.index(layer)
            self._engram = Engram(reader, f"{prefix}.engram", config, index, tables, activations)

        def norm(name: str) -> RMSNorm:
            weight = reader.tensor(f"{prefix}.{name}.weight", (config.hidden_size,), torch.float32)
            return RMSNorm(weight, config.rms_norm_eps)

        self._attn_norm, self._ffn_norm = norm("attn_norm"), norm("ffn_norm")
        self._attn_mix = HyperConnection(reader, f"{prefix}.hc_attn", config)
        self._ffn_mix = HyperConnection(reader, f"{prefix}.hc_ffn", config)
        self._attn = Attention(reader, f"{prefix}.attn", config, layer, activations, rotary)
        self._moe = MoE(reader, f"{prefix}.ffn", config, activations)

    def __call__(
        self,
        streams: Tensor,
        pre: Tensor,
        batch: BatchInputs,
        cache: KVCache,
        selection: Selection | None,
        trace: Trace | None,
    ) -> tuple[Tensor, Tensor, Selection | None]:
        """Input rows in, output rows out: streams [rows, K, hidden], pre [rows, K], and the selection."""
        inputs = batch.layers[self._layer]
        if self._engram is not None:
            rows = self._engram.hash_rows(batch.ngram_classes(inputs.rows))
            streams = self._engram(streams, rows)
            _record(trace, f"hash_ids.layer{self._layer}", rows)
        x = self._attn_norm(collapse_streams_reference(streams, pre))
        window_keys = self._attn.store(x, batch, cache)
        if inputs.output_rows.num_rows == 0:
            return streams[:0], pre[:0], None
        assert window_keys is not None, "a row with an output reads its window"
        if inputs.keep is not None:
            streams = streams[inputs.keep]
            selection = _take(selection, inputs.keep)
        mix = self._attn_mix(streams)
        y, selection = self._attn(x, window_keys, batch, cache, selection)
        _record(trace, f"attn_out.layer{self._layer}", y)
        streams = expand_streams_reference(y, streams, mix.post, mix.comb)
        x = self._ffn_norm(collapse_streams_reference(streams, mix.pre))
        mix = self._ffn_mix(streams)
        y, routes = self._moe(x)
        streams = expand_streams_reference(y, streams, mix.post, mix.comb)
        _record(trace, f"route_ids.layer{self._layer}", routes.expert_ids)
        _record(trace, f"route_weights.layer{self._layer}", routes.weights)
        _record(trace, f"streams.layer{self._layer}", streams)
        _record(trace, f"pre_mix.layer{self._layer}", mix.pre)
        if selection is not None:
            _record(trace, f"topk.layer{self._layer}", selection.entries)
            if selection.blocks is not None:
                _record(trace, f"blocks.layer{self._layer}", selection.blocks)
        return streams, mix.pre, selection


class DeepseekV41Model:
    """All weights of one rank, and the forward pass of one step."""

    def __init__(
        self,
        folder: str | Path,
        config: DeepseekV41Config,
        tables: NgramTables | None,
        *,
        dtype: torch.dtype,
        device: torch.device,
        activations: ActivationFormat,
    ) -> None:
        reader = WeightReader(folder, dtype=dtype, device=device)
        vocab, hidden = config.vocab_size, config.hidden_size
        self.config = config
        self._embed = reader.tensor("embed.weight", (vocab, hidden))
        rotary = RotaryEmbedding(config, device)
        self._layers = [
            DecoderLayer(reader, config, layer, tables, activations, rotary)
            for layer in range(config.num_hidden_layers)
        ]
        self._norm = RMSNorm(reader.tensor("norm.weight", (hidden,), torch.float32), config.rms_norm_eps)
        self._head = Linear(reader.tensor("head.weight", (vocab, hidden), torch.float32))
        reader.finish()

    def forward(self, batch: BatchInputs, cache: KVCache, trace: Trace | None = None) -> Tensor:
        """Run one step and return the fp32 logits of the batch's sampled rows, [num_samples, vocab]."""
        embedded = self._embed[batch.token_ids]
        streams = embedded[:, None].repeat(1, self.config.hc_mult, 1)
        pre = torch.zeros(streams.shape[:2], dtype=torch.float32, device=batch.device)
        pre[:, 0] = 1.0
        selection: Selection | None = None
        for layer in self._layers:
            streams, pre, selection = layer(streams, pre, batch, cache, selection, trace)
            if streams.shape[0] == 0:
                # Every chunk is far from its prompt's end: no later layer has a row to run.
                return embedded.new_empty((0, self.config.vocab_size), dtype=torch.float32)
        rows = batch.sample_rows
        return self.logits(streams[rows], pre[rows])[: len(batch.sample_chunks)]

    def logits(self, streams: Tensor, pre: Tensor) -> Tensor:
        """Final collapse, norm and head: [n, K, hidden], [n, K] -> [n, vocab] fp32."""
        return self._head(self._norm(collapse_streams_reference(streams, pre)).float())


def _record(trace: Trace | None, name: str, value: Tensor) -> None:
    if trace is not None:
        trace(name, value)


def _take(selection: Selection | None, keep: Tensor) -> Selection | None:
    if selection is None:
        return None
    return Selection(selection.entries[keep], None if selection.blocks is None else selection.blocks[keep])

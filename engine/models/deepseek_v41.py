"""DeepSeek-V4.1's text model: embedding, layers with the one-site lag, head; the model page's section 2.

The residual is K streams wide. A site's ``pre`` weights collapse the streams for the *next* site:
the first attention reads stream 0 alone, and the last FFN's ``pre`` does the final collapse.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from engine.batch import BatchInputs
from engine.engram_tables import EngramTables, TableRows
from engine.kv_cache import KVCache
from engine.layers.attention import Attention
from engine.layers.engram import Engram
from engine.layers.hyper_connections import HyperConnection, ResidualStreams
from engine.layers.indexer import Selection
from engine.layers.linear import ActivationFormat
from engine.layers.moe import MoE
from engine.layers.ops import Ops
from engine.layers.rotary import RotaryEmbedding
from engine.loader import WeightReader
from engine.models.deepseek_v41_config import DeepseekV41Config
from engine.parallel import ExpertExchange, ExpertGroup
from engine.step_inputs import StepInputs
from kernels.moe import Routes

Trace = Callable[[str, Tensor], None]
"""Called with a name such as ``streams.layer3`` and that layer's rows, padding included."""


class DecoderLayer:
    """Engram (where the layer has one), attention and MoE, each between two hyper-connection mixes."""

    def __init__(
        self,
        reader: WeightReader,
        config: DeepseekV41Config,
        layer: int,
        tables: EngramTables | None,
        activations: ActivationFormat,
        rotary: RotaryEmbedding,
        ops: Ops,
        group: ExpertGroup | None,
    ) -> None:
        prefix = f"layers.{layer}"
        self._layer = layer
        self._engram: Engram | None = None
        if layer in config.engram_layer_ids:
            assert tables is not None, "a model with engram layers has tables"
            index = config.engram_layer_ids.index(layer)
            self._engram = Engram(reader, f"{prefix}.engram", config, index, tables, activations, ops)
        self._attn_site = HyperConnection(
            reader, f"{prefix}.hc_attn", f"{prefix}.attn_norm.weight", config, ops
        )
        self._ffn_site = HyperConnection(reader, f"{prefix}.hc_ffn", f"{prefix}.ffn_norm.weight", config, ops)
        self._attn = Attention(reader, f"{prefix}.attn", config, layer, activations, rotary, ops)
        exchange = None if group is None else ExpertExchange(group, layer)
        self._moe = MoE(reader, f"{prefix}.ffn", config, activations, ops, exchange)

    def prefetch(self, ngram_classes: Callable[[int], np.ndarray]) -> TableRows | None:
        """Set out for the table rows that this layer will look up, if it does."""
        if self._engram is None:
            return None
        return self._engram.prefetch(lambda: ngram_classes(self._layer))

    def __call__(
        self,
        residual: ResidualStreams,
        batch: StepInputs,
        cache: KVCache,
        selection: Selection | None,
        table_rows: dict[int, TableRows],
        trace: Trace | None,
    ) -> tuple[bool, Selection | None]:
        """Input rows become output rows, in place. Returns whether there are any, and the selection."""
        inputs = batch.layers[self._layer]
        if self._engram is not None:
            rows = table_rows.pop(self._layer)
            residual.streams = self._engram(residual.streams, rows)
            if trace is not None:
                trace(f"hash_ids.layer{self._layer}", rows.hash_rows())
            del rows  # they may hold what was looked up
        x = residual.read(self._attn_site)
        if inputs.keep is not None and selection is not None:
            selection = selection.take(inputs.keep)
        y, selection = self._attn(x, batch, cache, selection)
        if y is None:
            return False, None
        if inputs.keep is not None:
            residual.take(inputs.keep)
        residual.write(y)
        _record(trace, f"attn_out.layer{self._layer}", y)
        y, routes = self._moe(residual.read(self._ffn_site))
        residual.write(y)
        if trace is not None:
            self._record_outcome(trace, residual, routes, selection)
        return True, selection

    def join(self) -> None:
        """This layer in a step in which this rank has no rows of its own here."""
        self._moe.join()

    def _record_outcome(
        self, trace: Trace, residual: ResidualStreams, routes: Routes, selection: Selection | None
    ) -> None:
        trace(f"route_ids.layer{self._layer}", routes.expert_ids)
        trace(f"route_weights.layer{self._layer}", routes.weights)
        trace(f"streams.layer{self._layer}", residual.streams)
        trace(f"pre_mix.layer{self._layer}", residual.pre)
        if selection is not None:
            trace(f"topk.layer{self._layer}", selection.entries)
            if selection.blocks is not None:
                trace(f"blocks.layer{self._layer}", selection.blocks)


class DeepseekV41Model:
    """All weights of one rank, and the forward pass of one step."""

    def __init__(
        self,
        reader: WeightReader,
        config: DeepseekV41Config,
        tables: EngramTables | None,
        *,
        activations: ActivationFormat,
        ops: Ops,
        group: ExpertGroup | None = None,
    ) -> None:
        vocab, hidden = config.vocab_size, config.hidden_size
        self.config = config
        self._ops = ops
        self._embed = reader.tensor("embed.weight", (vocab, hidden))
        rotary = RotaryEmbedding(config, reader.device)
        self._layers = [
            DecoderLayer(reader, config, layer, tables, activations, rotary, ops, group)
            for layer in range(config.num_hidden_layers)
        ]
        self._norm = reader.tensor("norm.weight", (hidden,), torch.float32)
        self._head = reader.fp32_linear(["head"], vocab, hidden)
        reader.finish()

    def forward(self, batch: BatchInputs, cache: KVCache, trace: Trace | None = None) -> Tensor:
        """Run one step and return the fp32 logits of the batch's sampled rows, [num_samples, vocab]."""
        residual = self.run_layers(batch, cache, self.prefetch(batch.ngram_classes), trace)
        if residual is None:
            return torch.empty((0, self.config.vocab_size), dtype=torch.float32, device=batch.device)
        residual.take(batch.sample_rows)
        return self.logits(residual.streams, residual.pre)[: len(batch.sample_chunks)]

    def prefetch(self, ngram_classes: Callable[[int], np.ndarray]) -> dict[int, TableRows]:
        """Set out for what engram layers will look up: by layer. ``ngram_classes`` are a layer's rows'."""
        found = {index: layer.prefetch(ngram_classes) for index, layer in enumerate(self._layers)}
        return {index: rows for index, rows in found.items() if rows is not None}

    def run_layers(
        self, batch: StepInputs, cache: KVCache, table_rows: dict[int, TableRows], trace: Trace | None = None
    ) -> ResidualStreams | None:
        """The streams of the last layer's output rows; None where it has none."""
        residual = ResidualStreams(self._embed[batch.token_ids], self.config, self._ops)
        selection: Selection | None = None
        for index, layer in enumerate(self._layers):
            has_rows, selection = layer(residual, batch, cache, selection, table_rows, trace)
            if not has_rows:
                # Every chunk is far from its prompt's end: no later layer has a row of this rank to run.
                self.join(index)
                return None
        return residual

    def join(self, first_layer: int = 0) -> None:
        """Run this rank's experts for other ranks' rows, from a layer on at which this one has none."""
        for layer in self._layers[first_layer:]:
            layer.join()

    def logits(self, streams: Tensor, pre: Tensor) -> Tensor:
        """Final collapse, norm and head: [n, K, hidden], [n, K] -> [n, vocab] fp32."""
        eps = self.config.rms_norm_eps
        return self._ops.fp32_linear(self._ops.collapse_norm(streams, pre, self._norm, eps=eps), self._head)


def _record(trace: Trace | None, name: str, value: Tensor) -> None:
    if trace is not None:
        trace(name, value)

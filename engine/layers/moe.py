"""Mixture of experts of one layer: router, routed experts, one shared expert; the model page's section 9."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.layers.linear import ActivationFormat
from engine.layers.ops import Ops
from engine.loader import WeightReader
from engine.models.deepseek_v41_config import DeepseekV41Config
from engine.parallel import ExpertExchange
from kernels.moe import Routes
from kernels.number_formats import QuantisedRows


class MoE:
    """Weights and the forward pass. A row's slots are summed in its routes' order.

    With an ``exchange``, the reader's share of the routed experts serves the rows of all ranks.
    """

    def __init__(
        self,
        reader: WeightReader,
        prefix: str,
        config: DeepseekV41Config,
        activations: ActivationFormat,
        ops: Ops,
        exchange: ExpertExchange | None = None,
    ) -> None:
        hidden, intermediate, experts = (
            config.hidden_size,
            config.moe_intermediate_size,
            config.n_routed_experts,
        )
        self._config = config
        self._activations = activations
        self._ops = ops
        self._exchange = exchange
        self._dtype, self._device = reader.dtype, reader.device
        self._expert_options = {
            "limit": config.swiglu_limit,
            "mode": activations.mode,
            "dtype": reader.dtype,
        }
        gate = reader.finite(f"{prefix}.gate.weight", (experts, hidden))
        self._gate = ops.gate_weight(gate, reader.dtype)
        self._bias = reader.tensor(f"{prefix}.gate.bias", (experts,), torch.float32)
        # The bias of image tokens; text never uses it, but it is part of every checkpoint.
        reader.raw(f"{prefix}.gate.bias_vl", (experts,))

        names = [f"{prefix}.experts.{expert}" for expert in range(experts)]
        w13 = reader.experts(names, ("w1", "w3"), intermediate, hidden)
        w2 = reader.experts(names, ("w2",), hidden, intermediate)
        self._w13, self._w2 = ops.expert_weights(w13, w2, reader.dtype)
        shared = f"{prefix}.shared_experts"
        shared_w13 = reader.quantised([f"{shared}.w1", f"{shared}.w3"], intermediate, hidden)
        self._shared_w13 = activations.projection(shared_w13, reader.dtype)
        shared_w2 = reader.quantised([f"{shared}.w2"], hidden, intermediate)
        self._shared_w2 = activations.projection(shared_w2, reader.dtype)

    def __call__(self, x: Tensor) -> tuple[Tensor, Routes]:
        """[num_rows, hidden] -> ([num_rows, hidden], the routes taken)."""
        config, ops, quantise = self._config, self._ops, self._activations
        routes = ops.route_tokens(
            x,
            self._gate,
            self._bias,
            top_k=config.num_experts_per_tok,
            routed_scale=config.routed_scaling_factor,
        )
        rows = quantise(x)
        if self._exchange is None:
            slots = self._slots(rows, routes)
        else:
            slots = self._exchanged_slots(self._exchange, rows, routes)
        hidden = ops.swiglu(self._shared_w13(rows), None, limit=config.swiglu_limit)
        return ops.combine_experts(slots, self._shared_w2(quantise(hidden))), routes

    def join(self) -> None:
        """Take part in the exchange of a step in which this rank has no rows here, where others have."""
        if self._exchange is None or not self._exchange.has_rows:
            return
        config = self._config
        x = torch.empty(0, config.hidden_size, dtype=self._dtype, device=self._device)
        ids = torch.empty(0, config.num_experts_per_tok, dtype=torch.int64, device=self._device)
        self._exchanged_slots(self._exchange, self._activations(x), Routes(ids, ids.float()))

    def _exchanged_slots(
        self, exchange: ExpertExchange, rows: QuantisedRows | Tensor, routes: Routes
    ) -> Tensor:
        """Outputs of every slot of own rows, each from the rank that has its expert."""
        all_rows, here = exchange.dispatch(rows, routes)
        if exchange.homes is None:
            return exchange.combine(self._slots(all_rows, here), routes)
        self._ops.expert_mlp_at_homes(
            all_rows, here, self._w13, self._w2, exchange.homes, **self._expert_options
        )
        return exchange.collect(len(routes.expert_ids))

    def _slots(self, rows: QuantisedRows | Tensor, routes: Routes) -> Tensor:
        """Outputs of every slot whose expert is held here."""
        return self._ops.expert_mlp(rows, routes, self._w13, self._w2, **self._expert_options)

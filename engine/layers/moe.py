"""Mixture of experts of one layer: router, routed experts, one shared expert; the model page's section 9."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.layers.linear import ActivationFormat, QuantisedLinear
from engine.layers.ops import Ops
from engine.loader import WeightReader
from engine.models.deepseek_v41_config import DeepseekV41Config
from kernels.moe import Routes


class MoE:
    """Weights and the forward pass. A row's slots are summed in its routes' order."""

    def __init__(
        self,
        reader: WeightReader,
        prefix: str,
        config: DeepseekV41Config,
        activations: ActivationFormat,
        ops: Ops,
    ) -> None:
        hidden, intermediate, experts = (
            config.hidden_size,
            config.moe_intermediate_size,
            config.n_routed_experts,
        )
        self._config = config
        self._activations = activations
        self._ops = ops
        gate = reader.tensor(f"{prefix}.gate.weight", (experts, hidden), torch.float32)
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
        self._shared_w13 = QuantisedLinear(shared_w13, reader.dtype, ops)
        shared_w2 = reader.quantised([f"{shared}.w2"], hidden, intermediate)
        self._shared_w2 = QuantisedLinear(shared_w2, reader.dtype, ops)

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
        slots = ops.expert_mlp(x, routes, self._w13, self._w2, limit=config.swiglu_limit, mode=quantise.mode)
        hidden = ops.swiglu(self._shared_w13(quantise(x)), None, limit=config.swiglu_limit)
        return ops.combine_experts(slots, self._shared_w2(quantise(hidden))), routes

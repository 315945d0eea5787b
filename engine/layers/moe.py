"""Mixture of experts of one layer: router, routed experts, one shared expert; the model page's section 9."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.layers.linear import ActivationFormat, Linear
from engine.loader import WeightReader
from engine.models.deepseek_v41_config import DeepseekV41Config
from kernels.moe import (
    Routes,
    combine_experts_reference,
    expert_mlp_reference,
    route_tokens_reference,
    swiglu_reference,
)


class MoE:
    """Weights and the forward pass. A row's slots are summed in its routes' order."""

    def __init__(
        self, reader: WeightReader, prefix: str, config: DeepseekV41Config, activations: ActivationFormat
    ) -> None:
        hidden, intermediate, experts = (
            config.hidden_size,
            config.moe_intermediate_size,
            config.n_routed_experts,
        )
        self._config = config
        self._activations = activations
        self._gate = reader.tensor(f"{prefix}.gate.weight", (experts, hidden), torch.float32)
        self._bias = reader.tensor(f"{prefix}.gate.bias", (experts,), torch.float32)
        # The bias of image tokens; text never uses it, but it is part of every checkpoint.
        reader.raw(f"{prefix}.gate.bias_vl", (experts,))

        def gate_and_up(name: str) -> Tensor:
            parts = [reader.linear(f"{name}.{part}", intermediate, hidden) for part in ("w1", "w3")]
            return torch.cat(parts)

        names = [f"{prefix}.experts.{expert}" for expert in range(experts)]
        self._w13 = torch.stack([gate_and_up(name) for name in names])
        self._w2 = torch.stack([reader.linear(f"{name}.w2", hidden, intermediate) for name in names])
        self._shared_w13 = Linear(gate_and_up(f"{prefix}.shared_experts"))
        self._shared_w2 = Linear(reader.linear(f"{prefix}.shared_experts.w2", hidden, intermediate))

    def __call__(self, x: Tensor) -> tuple[Tensor, Routes]:
        """[num_rows, hidden] -> ([num_rows, hidden], the routes taken)."""
        config, quantise = self._config, self._activations
        routes = route_tokens_reference(
            x,
            self._gate,
            self._bias,
            top_k=config.num_experts_per_tok,
            routed_scale=config.routed_scaling_factor,
        )
        slots = expert_mlp_reference(
            x, routes, self._w13, self._w2, limit=config.swiglu_limit, mode=quantise.mode
        )
        hidden = swiglu_reference(self._shared_w13(quantise(x)), None, limit=config.swiglu_limit)
        return combine_experts_reference(slots, self._shared_w2(quantise(hidden))), routes

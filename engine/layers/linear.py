"""Linear layers and what enters them: the engine's one place that knows ``activation_quantisation``.

A weight is held as the checkpoint stores it where a kernel multiplies by it directly, else it was widened at
load; the caller does not see which.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.layers.ops import Ops
from kernels.linear import ROUNDING, Fp8Weight, align_scales
from kernels.number_formats import ActivationMode, QuantisedRows, dequantise_activations


@dataclass(frozen=True, slots=True)
class ActivationFormat:
    """How the input of a quantised projection is rounded: 32-wide blocks, one scale a row, or not."""

    mode: ActivationMode
    ops: Ops

    def __call__(self, x: Tensor) -> QuantisedRows | Tensor:
        """[num_rows, n] as a quantised projection reads it; ``x`` itself under "none"."""
        return x if self.mode == "none" else self.ops.quantise_activations(x, mode=self.mode)

    def projection(self, weight: Fp8Weight | Tensor, dtype: torch.dtype) -> QuantisedLinear:
        """The layer [out_features, in_features] that reads such inputs, with outputs in ``dtype``."""
        is_fp8_product = self.mode == "row" and dtype == torch.bfloat16
        # On "meta" there are no values to look at.
        if is_fp8_product and isinstance(weight, Fp8Weight) and not weight.values.is_meta:
            weight = align_scales(weight, rounding=ROUNDING)
        return QuantisedLinear(weight, dtype, self.ops)


@dataclass(frozen=True, slots=True)
class Linear:
    """``x @ weight^T`` without bias; ``weight`` [out_features, in_features] in the dtype of ``x``."""

    weight: Tensor
    ops: Ops

    def __call__(self, x: Tensor) -> Tensor:
        """[num_rows, in_features] -> [num_rows, out_features]."""
        return self.ops.linear(x, self.weight)


@dataclass(frozen=True, slots=True)
class QuantisedLinear:
    """A linear layer whose weight the release stores in fp8; it reads what an ``ActivationFormat`` gives."""

    weight: Fp8Weight | Tensor
    dtype: torch.dtype
    ops: Ops

    def __call__(self, x: QuantisedRows | Tensor) -> Tensor:
        """[num_rows, in_features] -> [num_rows, out_features] in ``dtype``."""
        if isinstance(self.weight, Fp8Weight):
            return self.ops.fp8_linear(x, self.weight, dtype=self.dtype)
        wide = dequantise_activations(x, self.dtype) if isinstance(x, QuantisedRows) else x
        return self.ops.linear(wide, self.weight)

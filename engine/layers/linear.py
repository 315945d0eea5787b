"""Linear layers and what enters them: the engine's one place that knows ``activation_quantisation``."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kernels.linear import linear_reference
from kernels.number_formats import ActivationMode, dequantise_activations, quantise_activations_reference


@dataclass(frozen=True, slots=True)
class ActivationFormat:
    """How the input of a quantised projection is rounded: 32-wide blocks, one scale a row, or not."""

    mode: ActivationMode

    def __call__(self, x: Tensor) -> Tensor:
        """[num_rows, n] -> the same shape and dtype, with fp8 values unless the mode is "none"."""
        if self.mode == "none":
            return x
        return dequantise_activations(quantise_activations_reference(x, mode=self.mode), x.dtype)


@dataclass(frozen=True, slots=True)
class Linear:
    """``x @ weight^T`` without bias; ``weight`` [out_features, in_features]."""

    weight: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """[num_rows, in_features] -> [num_rows, out_features]."""
        return linear_reference(x, self.weight)

"""RMSNorm with its weight."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kernels.rms_norm import rms_norm_reference


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """``weight`` [n] fp32."""

    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """[..., n] -> the same shape and dtype."""
        return rms_norm_reference(x, self.weight, eps=self.eps)

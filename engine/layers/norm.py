"""RMSNorm with its weight."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from engine.layers.ops import Ops


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """``weight`` [n] fp32."""

    weight: Tensor
    eps: float
    ops: Ops

    def __call__(self, x: Tensor) -> Tensor:
        """[num_rows, n] -> the same shape and dtype."""
        return self.ops.rms_norm(x, self.weight, eps=self.eps)

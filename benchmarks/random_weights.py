"""A model's weights in the release's formats, drawn at random on the device: no checkpoint, no files.

It answers as the loader's ``WeightReader`` does, so that a model is built from it unchanged. A tensor depends
on its name and shape alone, whatever else is read. It knows how tensors are stored, not what they are for.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.loader import WeightReader
from kernels.number_formats import SCALE_BLOCK

_FP8 = re.compile(
    r"\.(attn\.(wq_a|wq_b|wkv|wo_a|wo_b|indexer\.wq_b)|ffn\.shared_experts\.w[123]|engram\.(wkv|embed))$"
)
_MXFP4 = re.compile(r"\.ffn\.experts\.\d+\.w[123]$")
_FLOAT32 = re.compile(r"(attn_sink|gate\.bias|gate\.bias_vl|hc_(attn|ffn)_(fn|base|scale))$")
_ROUTER = re.compile(r"\.ffn\.gate\.(weight|bias|bias_vl)$")
_E2M1_STD = 2.93  # of the sixteen codes, each as likely
_SCALE_SPREAD = 2  # scales lie in a range of four powers of two


class RandomWeights(WeightReader):
    """``router_factor``: times as many router rows as asked for, since a router knows all ranks' experts."""

    def __init__(
        self,
        *,
        dtype: torch.dtype,
        device: torch.device,
        keeps_quantised: bool = False,
        router_factor: int = 1,
        local_experts: range | None = None,
    ) -> None:
        self.dtype = dtype
        self.device = device
        self.keeps_quantised = keeps_quantised
        self.local_experts = local_experts
        self._router_factor = router_factor
        self._widths: dict[str, int] = {}

    def has(self, name: str) -> bool:
        """A scale exists beside a quantised weight only; everything else exists."""
        stem, _, kind = name.rpartition(".")
        return kind != "scale" or self._format(stem) != "plain"

    def raw(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A tensor as a checkpoint stores it, already on the device."""
        stem, _, kind = name.rpartition(".")
        stored = self._format(stem)
        if stored != "plain" and kind == "scale":
            return self._scales(name, stem, shape)
        if stored == "fp8":
            self._widths[stem] = shape[-1]
            return self._fp8(name, shape)
        if stored == "mxfp4":
            self._widths[stem] = 2 * shape[-1]
            values = torch.randint(-128, 128, shape, generator=self._generator(name), **self._on(torch.int8))
            return values
        return self._plain(name, shape)

    def dtype_of(self, name: str, shape: tuple[int, ...]) -> torch.dtype:
        """Of a quantised weight; what else there is, is not asked for."""
        assert self._format(name.rpartition(".")[0]) == "fp8", name
        return torch.float8_e4m3fn

    def fill(self, wanted: Sequence[tuple[str, Tensor]]) -> None:
        """Drawn into places of their shapes."""
        for name, place in wanted:
            place.copy_(self.raw(name, tuple(place.shape)).view(place.dtype))

    def _stored_dtype(self, name: str) -> str:
        formats = {"mxfp4": "I8", "fp8": "F8_E4M3", "plain": "BF16"}
        return formats[self._format(name.rpartition(".")[0])]

    def finish(self) -> None:
        """Nothing to close, and nothing can be left unread."""

    def _format(self, stem: str) -> str:
        return "mxfp4" if _MXFP4.search(stem) else "fp8" if _FP8.search(stem) else "plain"

    def _on(self, dtype: torch.dtype) -> dict[str, object]:
        return {"dtype": dtype, "device": self.device}

    def _generator(self, name: str) -> torch.Generator:
        seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest(), "little")
        return torch.Generator(self.device).manual_seed(seed)

    def _fp8(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Normal values about the middle of e4m3's range; in slices, since tables are large."""
        generator, out = self._generator(name), torch.empty(shape, **self._on(torch.float8_e4m3fn))
        for part in out.split(max(1, (1 << 26) // shape[-1])):
            part.copy_(torch.randn(part.shape, generator=generator, device=self.device) * 16)
        return out

    def _scales(self, name: str, stem: str, shape: tuple[int, ...]) -> Tensor:
        """Bytes of powers of two under which a product of normal inputs has normal outputs, or nearly."""
        width = self._widths.get(stem, shape[-1] * SCALE_BLOCK)
        std = _E2M1_STD if self._format(stem) == "mxfp4" else 16
        middle = 127 + round(math.log2(width**-0.5 / std))
        low, high = middle - _SCALE_SPREAD, middle + _SCALE_SPREAD
        return torch.randint(low, high, shape, generator=self._generator(name), **self._on(torch.uint8))

    def _plain(self, name: str, shape: tuple[int, ...]) -> Tensor:
        dtype = torch.float32 if _FLOAT32.search(name) else torch.bfloat16
        if _ROUTER.search(name):
            shape = (shape[0] * self._router_factor, *shape[1:])
        drawn = torch.randn(shape, generator=self._generator(name), **self._on(torch.float32))
        if name.endswith(("norm.weight", "_scale")):
            return torch.ones(shape, **self._on(dtype))
        if name == "embed.weight":
            return drawn.to(dtype)
        # Biases are small beside the scores they correct; a weight leaves its input's size as it is.
        return (drawn * (shape[-1] ** -0.5 if len(shape) > 1 else 0.1)).to(dtype)

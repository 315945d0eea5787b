"""Safetensors to parameters: every tensor is used, or left for a stated reason, or stops the load.

``WeightReader`` hands out tensors by name with the shape the model expects: the release's fp8 and mxfp4
layouts as stored, where kernels read them, else widened on the way. It knows nothing of what a tensor is for,
but that a rank may hold a part of a layer's experts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from engine.checkpoint import StoredTensor, is_ignored, read_checkpoint
from engine.errors import ConfigError
from engine.weight_stream import WeightStream
from kernels.linear import Fp8Weight
from kernels.moe import ExpertWeight, Mxfp4Weight
from kernels.number_formats import SCALE_BLOCK, dequantise_fp8_weight, dequantise_mxfp4_weight

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I8": torch.int8,
    "U8": torch.uint8,
}
_EXPERT = re.compile(r"\.experts\.(\d+)\.")


class WeightReader:
    """Tensors of a model folder, read once each, in parallel and straight to the device.

    ``keeps_quantised``: ``quantised`` and ``experts`` give what is stored in fp8 or mxfp4 as it is.
    ``local_experts``: which experts of each layer are this rank's; None is all. The others' tensors are
    another rank's: never read, and not missed. On the "meta" device nothing is read, and all is checked.
    """

    local_experts: range | None = None

    def __init__(
        self,
        folder: str | Path,
        *,
        dtype: torch.dtype,
        device: torch.device,
        keeps_quantised: bool = False,
        local_experts: range | None = None,
    ) -> None:
        self.dtype = dtype
        self.device = device
        self.keeps_quantised = keeps_quantised
        self.local_experts = local_experts
        self._tensors = read_checkpoint(folder)
        self._unread = {name for name in self._tensors if not is_ignored(name) and self._is_local(name)}
        total_bytes = sum(self._tensors[name].num_bytes for name in self._unread)
        self._stream = WeightStream(total_bytes=total_bytes)

    def has(self, name: str) -> bool:
        """Whether the checkpoint holds a tensor of this name."""
        return name in self._tensors

    def find(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        """A tensor that has to be there, and from now on is used."""
        stored = self._tensors.get(name)
        if stored is None:
            raise ConfigError(f"tensor {name} is missing (expected shape {list(shape)})")
        if stored.shape != shape:
            raise ConfigError(
                f"tensor {name} of {stored.path} has shape {list(stored.shape)}, expected {list(shape)}"
            )
        if name.endswith(".scale") and stored.dtype not in ("F8_E8M0", "U8"):
            raise ConfigError(
                f"tensor {name} of {stored.path} is stored as {stored.dtype}, expected float8_e8m0fnu"
            )
        self._unread.discard(name)
        return stored

    def raw(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor as stored, on the device. Raises ``ConfigError`` with both shapes."""
        place = torch.empty(shape, dtype=_torch_dtype(self.find(name, shape)), device=self.device)
        self.fill([(name, place)])
        return place

    def fill(self, wanted: Sequence[tuple[str, Tensor]]) -> None:
        """Read tensors as stored into places of their shapes, wherever these lie."""
        found = [(self.find(name, tuple(place.shape)), place) for name, place in wanted]
        if self.device.type == "meta":
            self._stream.pass_over(sum(stored.num_bytes for stored, _ in found))
        else:
            self._stream.read(found)

    def pass_over(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        """A tensor that is used and not read here: where it lies."""
        stored = self.find(name, shape)
        self._stream.pass_over(stored.num_bytes)
        return stored

    def dtype_of(self, name: str, shape: tuple[int, ...]) -> torch.dtype:
        """How a tensor is stored."""
        return _torch_dtype(self.find(name, shape))

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """An unquantised tensor in ``dtype`` (the engine's by default) on the device."""
        stored = self.raw(name, shape)
        if not stored.dtype.is_floating_point or stored.dtype.itemsize < 2:
            raise ConfigError(f"tensor {name} is stored as {stored.dtype}, expected a plain float")
        return stored.to(dtype or self.dtype)

    def finite(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """An unquantised tensor in fp32 that is cut into pieces, as only finite numbers can be."""
        found = self.tensor(name, shape, torch.float32)
        if not found.is_meta and not bool(found.isfinite().all()):
            raise ConfigError(f"tensor {name} has values that are not finite")
        return found

    def linear(
        self, name: str, out_features: int, in_features: int, dtype: torch.dtype | None = None
    ) -> Tensor:
        """``name.weight`` [out, in] in ``dtype``, from a plain, fp8 or mxfp4 layout."""
        scale_name = f"{name}.scale"
        if not self.has(scale_name):
            return self.tensor(f"{name}.weight", (out_features, in_features), dtype)
        if self._is_mxfp4(name):
            packed = self.raw(f"{name}.weight", (out_features, in_features // 2))
            scale = self.scales(scale_name, (out_features, in_features // SCALE_BLOCK))
            wide = dequantise_mxfp4_weight(packed, scale)
        else:
            stored = self.raw(f"{name}.weight", (out_features, in_features))
            if stored.dtype != torch.float8_e4m3fn:
                raise ConfigError(
                    f"tensor {name}.weight is stored as {stored.dtype}, expected float8_e4m3fn or int8"
                )
            wide = dequantise_fp8_weight(stored, self.scales(scale_name, _tiles(out_features, in_features)))
        return wide.to(dtype or self.dtype)

    def fp32_linear(self, names: Sequence[str], out_features: int, in_features: int) -> Tensor:
        """Weights of a product in fp32, one below the other: float32, or bfloat16 where kernels read that."""
        is_kept = self.keeps_quantised and all(self._stored_dtype(f"{n}.weight") == "BF16" for n in names)
        dtype = torch.bfloat16 if is_kept else torch.float32
        parts = [self.linear(name, out_features, in_features, dtype) for name in names]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def quantised(self, names: Sequence[str], out_features: int, in_features: int) -> Fp8Weight | Tensor:
        """Linear weights one below the other, [len(names) * out, in]: fp8 as stored, or widened."""
        is_kept = self.keeps_quantised and all(self._is_fp8(name) for name in names)
        if not is_kept or (len(names) > 1 and out_features % SCALE_BLOCK):
            return torch.cat([self.linear(name, out_features, in_features) for name in names])
        values = self._empty(len(names), out_features, in_features, dtype=torch.float8_e4m3fn)
        scales = self._empty(len(names), *_tiles(out_features, in_features))
        self.fill([(f"{name}.weight", values[i]) for i, name in enumerate(names)])
        self.fill([(f"{name}.scale", scales[i]) for i, name in enumerate(names)])
        return Fp8Weight(values.flatten(0, 1), scales.flatten(0, 1))

    def experts(
        self, names: Sequence[str], parts: Sequence[str], out_features: int, in_features: int
    ) -> ExpertWeight:
        """``name.part`` of the local experts, parts one below the other: [experts, len(parts) * out, in].

        ``names`` are those of all experts of a layer. mxfp4 as stored goes straight to its place.
        """
        local = range(len(names)) if self.local_experts is None else self.local_experts
        linears = [[f"{names[expert]}.{part}" for part in parts] for expert in local]
        if not (self.keeps_quantised and all(self._is_mxfp4(name) for row in linears for name in row)):
            stacked = [
                torch.cat([self.linear(name, out_features, in_features) for name in row]) for row in linears
            ]
            return torch.stack(stacked)
        values = self._empty(len(local), len(parts), out_features, in_features // 2)
        scales = self._empty(len(local), len(parts), out_features, in_features // SCALE_BLOCK)
        places = [(expert, part, name) for expert, row in enumerate(linears) for part, name in enumerate(row)]
        self.fill(
            [
                (f"{name}.{kind}", place[expert, part])
                for expert, part, name in places
                for kind, place in (("weight", values), ("scale", scales))
            ]
        )
        return Mxfp4Weight(values.flatten(1, 2), scales.flatten(1, 2))

    def scales(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """e8m0 scales as uint8 bytes, on the device."""
        return self.raw(name, shape).view(torch.uint8)

    def finish(self) -> None:
        """Close the files. Raises ``ConfigError`` naming a tensor that no part of the model asked for."""
        self._stream.close()
        if self._unread:
            names = sorted(self._unread)
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise ConfigError(f"tensor {names[0]}{more} in the checkpoint is not part of this model")

    def _is_local(self, name: str) -> bool:
        if self.local_experts is None or (found := _EXPERT.search(name)) is None:
            return True
        return int(found[1]) in self.local_experts

    def _empty(self, *shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def _is_fp8(self, name: str) -> bool:
        return self.has(f"{name}.scale") and self._stored_dtype(f"{name}.weight") == "F8_E4M3"

    def _is_mxfp4(self, name: str) -> bool:
        return self.has(f"{name}.scale") and self._stored_dtype(f"{name}.weight") == "I8"

    def _stored_dtype(self, name: str) -> str:
        """The name of a dtype; empty where there is no such tensor."""
        return self._tensors[name].dtype if name in self._tensors else ""


def _torch_dtype(stored: StoredTensor) -> torch.dtype:
    if stored.dtype not in _DTYPES:
        raise ConfigError(f"tensor {stored.name} of {stored.path} is stored as {stored.dtype}")
    return _DTYPES[stored.dtype]


def _tiles(out_features: int, in_features: int) -> tuple[int, int]:
    """How many scales an fp8 weight has, rows and columns."""
    return -(-out_features // SCALE_BLOCK), -(-in_features // SCALE_BLOCK)

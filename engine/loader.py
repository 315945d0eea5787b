"""Safetensors to parameters: every tensor is used, or ignored for a stated reason, or stops the load.

``WeightReader`` hands out tensors by name with the shape the model expects: the release's fp8 and mxfp4
layouts as stored, where kernels read them, else widened on the way. It knows nothing of what a tensor is for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.errors import ConfigError
from kernels.linear import Fp8Weight, align_scales
from kernels.moe import ExpertWeight, Mxfp4Weight
from kernels.number_formats import SCALE_BLOCK, dequantise_fp8_weight, dequantise_mxfp4_weight

IGNORED_PREFIXES = {
    "mtp.": "draft stages are not run",
    "vision.": "text only",
    "aligner.": "text only",
    "image_": "text only",
}


class WeightReader:
    """Tensors of a model folder, read once each.

    ``keeps_quantised``: ``quantised`` and ``experts`` give what is stored in fp8 or mxfp4 as it is.
    """

    def __init__(
        self, folder: str | Path, *, dtype: torch.dtype, device: torch.device, keeps_quantised: bool = False
    ) -> None:
        self.dtype = dtype
        self.device = device
        self.keeps_quantised = keeps_quantised
        self._stack = contextlib.ExitStack()
        self._files: dict[str, Any] = {}
        files = sorted(Path(folder).glob("*.safetensors"))
        if not files:
            raise ConfigError(f"model folder {folder} has no *.safetensors file")
        for path in files:
            try:
                handle = self._stack.enter_context(safe_open(path, framework="pt", device="cpu"))
            except (SafetensorError, OSError) as error:
                raise ConfigError(f"{path} is no readable safetensors file: {error}") from None
            for name in handle.keys():  # noqa: SIM118  (safe_open is no mapping)
                if name in self._files:
                    raise ConfigError(f"tensor {name} is in two files of {folder}")
                self._files[name] = handle
        self._unread = {n for n in self._files if not n.startswith(tuple(IGNORED_PREFIXES))}

    def has(self, name: str) -> bool:
        """Whether the checkpoint holds a tensor of this name."""
        return name in self._files

    def raw(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor as stored, on the CPU (memory-mapped). Raises ``ConfigError`` with both shapes."""
        if name not in self._files:
            raise ConfigError(f"tensor {name} is missing (expected shape {list(shape)})")
        stored = tuple(self._files[name].get_slice(name).get_shape())
        if stored != shape:
            raise ConfigError(f"tensor {name} has shape {list(stored)}, expected {list(shape)}")
        self._unread.discard(name)
        stored_tensor: Tensor = self._files[name].get_tensor(name)
        return stored_tensor

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """An unquantised tensor in ``dtype`` (the engine's by default) on the device."""
        stored = self.raw(name, shape)
        if not stored.dtype.is_floating_point or stored.dtype.itemsize < 2:
            raise ConfigError(f"tensor {name} is stored as {stored.dtype}, expected a plain float")
        return stored.to(device=self.device, dtype=dtype or self.dtype)

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
            wide = dequantise_mxfp4_weight(packed.to(self.device), scale.to(self.device))
        else:
            stored = self.raw(f"{name}.weight", (out_features, in_features))
            if stored.dtype != torch.float8_e4m3fn:
                raise ConfigError(
                    f"tensor {name}.weight is stored as {stored.dtype}, expected float8_e4m3fn or int8"
                )
            tiles = (-(-out_features // SCALE_BLOCK), -(-in_features // SCALE_BLOCK))
            scale = self.scales(scale_name, tiles)
            wide = dequantise_fp8_weight(stored.to(self.device), scale.to(self.device))
        return wide.to(dtype or self.dtype)

    def head(self, name: str, out_features: int, in_features: int) -> Tensor:
        """The output head: float32, or as stored where kernels widen it."""
        is_kept = self.keeps_quantised and self._stored_dtype(name) == "BF16"
        dtype = torch.bfloat16 if is_kept else torch.float32
        return self.tensor(name, (out_features, in_features), dtype)

    def quantised(self, names: Sequence[str], out_features: int, in_features: int) -> Fp8Weight | Tensor:
        """Linear weights one below the other, [len(names) * out, in]: fp8 as stored in value, or widened."""
        is_kept = self.keeps_quantised and all(self._is_fp8(name) for name in names)
        if not is_kept or (len(names) > 1 and out_features % SCALE_BLOCK):
            return torch.cat([self.linear(name, out_features, in_features) for name in names])
        tiles = (-(-out_features // SCALE_BLOCK), -(-in_features // SCALE_BLOCK))
        values = [self.raw(f"{name}.weight", (out_features, in_features)) for name in names]
        scales = [self.scales(f"{name}.scale", tiles) for name in names]
        return align_scales(Fp8Weight(*(torch.cat(parts).to(self.device) for parts in (values, scales))))

    def experts(
        self, names: Sequence[str], parts: Sequence[str], out_features: int, in_features: int
    ) -> ExpertWeight:
        """``name.part`` of all experts, parts one below the other: [len(names), len(parts) * out, in].

        mxfp4 as stored goes to the device expert by expert, so that the host holds one at a time.
        """
        linears = [[f"{name}.{part}" for part in parts] for name in names]
        if not (self.keeps_quantised and all(self._is_mxfp4(name) for row in linears for name in row)):
            stacked = [
                torch.cat([self.linear(name, out_features, in_features) for name in row]) for row in linears
            ]
            return torch.stack(stacked)

        def empty(width: int) -> Tensor:
            shape = (len(names), len(parts) * out_features, width)
            return torch.empty(shape, dtype=torch.uint8, device=self.device)

        values, scales = empty(in_features // 2), empty(in_features // SCALE_BLOCK)
        for expert, row in enumerate(linears):
            for part, name in enumerate(row):
                rows = slice(part * out_features, (part + 1) * out_features)
                packed = self.raw(f"{name}.weight", (out_features, in_features // 2))
                values[expert, rows].copy_(packed.view(torch.uint8))
                scales[expert, rows].copy_(
                    self.scales(f"{name}.scale", (out_features, in_features // SCALE_BLOCK))
                )
        return Mxfp4Weight(values, scales)

    def scales(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """e8m0 scales as uint8 bytes, on the CPU."""
        stored = self.raw(name, shape)
        if stored.dtype.itemsize != 1:
            raise ConfigError(f"tensor {name} is stored as {stored.dtype}, expected float8_e8m0fnu")
        return stored.view(torch.uint8)

    def _is_fp8(self, name: str) -> bool:
        return self.has(f"{name}.scale") and self._stored_dtype(f"{name}.weight") == "F8_E4M3"

    def _is_mxfp4(self, name: str) -> bool:
        return self.has(f"{name}.scale") and self._stored_dtype(f"{name}.weight") == "I8"

    def _stored_dtype(self, name: str) -> str:
        """The name of a dtype; empty where there is no such tensor."""
        return str(self._files[name].get_slice(name).get_dtype()) if name in self._files else ""

    def finish(self) -> None:
        """Close the files. Raises ``ConfigError`` naming a tensor that no part of the model asked for."""
        self._stack.close()
        if self._unread:
            names = sorted(self._unread)
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise ConfigError(f"tensor {names[0]}{more} in the checkpoint is not part of this model")

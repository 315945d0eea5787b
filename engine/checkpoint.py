"""What lies in a model folder's safetensors files, from their headers: names, formats, shapes, places.

Owns the headers and the reasons why a tensor is not loaded. It reads no tensor, must not know what one is
for, and imports neither torch nor triton.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import ConfigError

IGNORED_PREFIXES = {
    "mtp.": "draft stages are not run",
    "vision.": "text only",
    "aligner.": "text only",
    "image_": "text only",
}
INDEX_NAME = "model.safetensors.index.json"

ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64"), 8),
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a file: ``num_bytes`` from ``offset`` on. ``dtype`` is the name that the header gives."""

    name: str
    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


def read_checkpoint(folder: str | Path) -> dict[str, StoredTensor]:
    """Every tensor of ``folder/*.safetensors`` by name.

    Raises:
        ConfigError: no file, a damaged or truncated one, a tensor in two files, or an index
            (``model.safetensors.index.json``, where there is one) that says otherwise.
    """
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise ConfigError(f"model folder {folder} has no *.safetensors file")
    tensors: dict[str, StoredTensor] = {}
    for path in files:
        for tensor in _read_header(path):
            if tensor.name in tensors:
                raise ConfigError(f"tensor {tensor.name} is in two files of {folder}")
            tensors[tensor.name] = tensor
    _check_index(Path(folder) / INDEX_NAME, tensors)
    return tensors


def is_ignored(name: str) -> bool:
    """Whether text generation leaves a tensor alone."""
    return name.startswith(tuple(IGNORED_PREFIXES))


def _read_header(path: Path) -> list[StoredTensor]:
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            # The length comes first, and in a damaged file it is anything.
            length = int.from_bytes(file.read(8), "little")
            if not 0 < length <= size - 8:
                raise ConfigError(f"{path} is no readable safetensors file: its header is not whole")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        begin = 8 + length
        return [_stored_tensor(path, name, facts, begin, size) for name, facts in header.items()]
    except ConfigError:  # a ValueError too, and says what is wrong already
        raise
    except (OSError, ValueError, AttributeError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"{path} is no readable safetensors file: {error!r}") from error


def _stored_tensor(path: Path, name: str, facts: Mapping[str, Any], begin: int, size: int) -> StoredTensor:
    start, end = facts["data_offsets"]
    shape, dtype = tuple(facts["shape"]), str(facts["dtype"])
    if not 0 <= start <= end:
        raise ConfigError(f"{path} is no readable safetensors file: tensor {name} lies at {start}..{end}")
    if begin + end > size:
        raise ConfigError(f"{path} is truncated: tensor {name} ends at byte {begin + end} of {size}")
    if dtype in ITEM_BYTES and math.prod(shape) * ITEM_BYTES[dtype] != end - start:
        raise ConfigError(
            f"{path} is no readable safetensors file: tensor {name} has {end - start} bytes, "
            f"not those of {dtype} {list(shape)}"
        )
    return StoredTensor(name, path, dtype, shape, begin + start, end - start)


def _check_index(path: Path, tensors: Mapping[str, StoredTensor]) -> None:
    try:
        files: Mapping[str, str] = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        listed = dict(files)
    except FileNotFoundError:
        return
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} cannot be read: {error!r}") from error
    for name, file in listed.items():
        if name not in tensors:
            raise ConfigError(f"tensor {name} is missing: {path.name} says that it is in {file}")
        if tensors[name].path.name != file:
            raise ConfigError(f"tensor {name} is in {tensors[name].path.name}, {path.name} says {file}")
    unlisted = next((name for name in tensors if name not in listed), None)
    if unlisted is not None:
        raise ConfigError(f"tensor {unlisted} of {tensors[unlisted].path} is not in {path.name}")

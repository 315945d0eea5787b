"""Host memory that a GPU reads and writes where it is: its pages are locked."""

from __future__ import annotations

import contextlib
import math
import mmap
import weakref
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from engine.errors import ConfigError


def lock_pages(memory: np.ndarray, purpose: str) -> None:
    """Let the device reach ``memory`` as long as somebody holds it.

    Raises ``ConfigError`` where that cannot be, with what needs it: ``purpose``, a setting and its value.
    """
    address, runtime = memory.ctypes.data, torch.cuda.cudart()  # type: ignore[no-untyped-call]
    code = int(runtime.cudaHostRegister(address, memory.nbytes, 0))
    if code:
        raise ConfigError(
            f"{purpose}, but {memory.nbytes} bytes of host memory cannot be page-locked (CUDA error {code})"
        )
    ending = weakref.finalize(
        memory, _unlock, torch.cuda.current_device(), runtime.cudaHostUnregister, address
    )
    # With the process the driver lets go of it, and waits for no device that waits for another rank, perhaps.
    ending.atexit = False


def _unlock(device: int, unregister: Callable[[int], object], address: int) -> None:
    """Once the device has done what it was asked, copies among it. One that failed does nothing more."""
    with contextlib.suppress(RuntimeError):
        torch.cuda.synchronize(device)
    unregister(address)


def locked_zeros(shape: tuple[int, ...], dtype: torch.dtype, purpose: str) -> Tensor:
    """A CPU tensor in pages of its own, no larger than they are. Raises as ``lock_pages``."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if not num_bytes:
        return torch.zeros(shape, dtype=dtype)
    memory = np.frombuffer(mmap.mmap(-1, num_bytes), dtype=np.uint8)
    lock_pages(memory, purpose)
    return torch.from_numpy(memory).view(dtype).view(shape)

"""Bytes of files into tensors on a device: several at a time, through a fixed amount of host memory.

Owns threads, staging buffers and the progress bar of a load. It must not know what it reads.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from threading import Lock
from typing import BinaryIO, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from engine.checkpoint import StoredTensor
from engine.errors import ConfigError

NUM_THREADS = 8
"""Reads under way at once. Each has a staging buffer on a GPU, which bounds what a load takes of the host."""

PIECE_BYTES = 16 << 20
"""The size of a staging buffer; larger tensors are read in pieces by several threads."""


class _Piece(NamedTuple):
    tensor: StoredTensor
    start: int
    place: Tensor  # uint8, flat


class WeightStream:
    """Reads from files that are opened once each. ``total_bytes`` is what the progress bar goes up to."""

    def __init__(self, *, total_bytes: int) -> None:
        self._total_bytes = total_bytes
        self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="weights")
        self._files: dict[Path, BinaryIO] = {}
        self._lock = Lock()
        self._staging: SimpleQueue[Tensor] = SimpleQueue()
        self._has_staging = False
        self._bar = tqdm(
            total=total_bytes,
            desc="weights",
            unit="B",
            unit_scale=True,
            unit_divisor=1024,
            disable=not _can_show_bar(),
        )

    def read(self, reads: Sequence[tuple[StoredTensor, Tensor]]) -> None:
        """Fill dense tensors of the stored sizes; done when it returns. Raises ``ConfigError``."""
        places = [(tensor, place.reshape(-1).view(torch.uint8)) for tensor, place in reads]
        if any(tensor.num_bytes != place.numel() for tensor, place in places):
            raise ValueError("a place has another size than what is read into it")
        pieces = [piece for tensor, place in places for piece in _pieces(tensor, place)]
        if any(place.device.type == "cuda" for _, place in places) and not self._has_staging:
            self._has_staging = True
            for _ in range(NUM_THREADS):
                self._staging.put(torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True))
        if len(pieces) == 1:
            self._read_piece(pieces[0])
        else:
            for _ in self._pool.map(self._read_piece, pieces):
                pass

    def pass_over(self, num_bytes: int) -> None:
        """Count what is not read after all: bytes that stay in their file, or have no device to go to."""
        self._total_bytes -= num_bytes
        self._bar.total = self._total_bytes
        self._bar.refresh()

    def close(self) -> None:
        """Give back threads, buffers and files."""
        self._pool.shutdown()
        self._bar.close()
        self._staging = SimpleQueue()
        for file in self._files.values():
            file.close()

    def _read_piece(self, piece: _Piece) -> None:
        if piece.place.device.type == "cpu":
            self._read_bytes(piece, piece.place)
        else:
            buffer = self._staging.get()
            try:
                staged = buffer[: piece.place.numel()]
                self._read_bytes(piece, staged)
                piece.place.copy_(staged)  # waits for the copy: the buffer is free again
            finally:
                self._staging.put(buffer)
        with self._lock:
            self._bar.update(piece.place.numel())

    def _read_bytes(self, piece: _Piece, target: Tensor) -> None:
        tensor = piece.tensor
        view = target.numpy().data
        done = 0
        try:
            file = self._open(tensor.path)
            while done < len(view):
                count = os.preadv(file.fileno(), [view[done:]], tensor.offset + piece.start + done)
                if count == 0:
                    raise ConfigError(f"{tensor.path} is truncated: tensor {tensor.name} is not whole")
                done += count
        except OSError as error:
            raise ConfigError(f"{tensor.path} cannot be read at tensor {tensor.name}: {error}") from error

    def _open(self, path: Path) -> BinaryIO:
        with self._lock:
            if path not in self._files:
                self._files[path] = open(path, "rb", buffering=0)  # noqa: SIM115  (closed by close)
            return self._files[path]


def _can_show_bar() -> bool:
    """Whether stderr is a terminal that says how wide it is: on others no bar shows."""
    try:
        return sys.stderr.isatty() and os.get_terminal_size(sys.stderr.fileno()).columns > 0
    except OSError:
        return False


def _pieces(tensor: StoredTensor, place: Tensor) -> Iterator[_Piece]:
    for start in range(0, tensor.num_bytes, PIECE_BYTES):
        yield _Piece(tensor, start, place[start : start + PIECE_BYTES])

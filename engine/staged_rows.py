"""Rows of tables that lie in files: many threads read them into staging memory, and they go on to the device.

Owns the mapped files, threads, buffers and the events that say when a buffer may be written again. It knows
rows by number and must not know how numbers come about.
"""

from __future__ import annotations

import contextlib
import mmap
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.checkpoint import StoredTensor

NUM_THREADS = {"cuda": 64, "cpu": 1}
"""Pages that are waited for at once: a disk serves many reads as fast as one. A CPU rank has one thread for
everything, and computes nothing meanwhile: others would only take turns with it."""

LEAST_ROWS = 8
"""Fewer rows than this are one thread's."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """Row numbers, as they were asked for, and where the rows are: bytes, one tensor for each of the table's.

    ``is_copied``: the copy to the device, which a stream has to wait for.
    """

    ids: np.ndarray
    tensors: list[Tensor]
    is_copied: torch.cuda.Event | None


class RowReader:
    """The threads, and the device's stream for copies; one for all tables of a rank.

    ``is_threaded`` says whether there are any: if not, a fetch is done when it was asked for.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._num_threads = NUM_THREADS[device.type]
        self.is_threaded = self._num_threads > 1
        is_gpu = device.type == "cuda"
        self.stream = torch.cuda.Stream(device) if is_gpu else None  # type: ignore[no-untyped-call]
        self.waited_s = 0.0
        self._pool = ThreadPoolExecutor(self._num_threads, thread_name_prefix="rows")
        # Fetches one after the other, in the order in which they are asked for.
        self._fetches = ThreadPoolExecutor(1, thread_name_prefix="rows-of-step")
        self._aheads = ThreadPoolExecutor(1, thread_name_prefix="rows-ahead")
        self._ahead: Future[None] | None = None

    def submit(self, fetch: Callable[[], Fetched]) -> Future[Fetched]:
        """Run a fetch behind the earlier ones."""
        if self.is_threaded:
            return self._fetches.submit(fetch)
        done: Future[Fetched] = Future()
        done.set_result(fetch())
        return done

    def look_ahead(self, touch: Callable[[], None]) -> None:
        """Run something that only brings pages into memory, unless the last of its kind still runs."""
        if self._ahead is None or self._ahead.done():
            self._ahead = self._aheads.submit(touch)

    def read(self, sources: Sequence[np.ndarray], ids: np.ndarray, targets: Sequence[np.ndarray]) -> None:
        """``targets[i][j] = sources[i][ids[j]]``, in pieces; done when it returns."""

        def read_piece(start: int) -> None:
            for source, target in zip(sources, targets, strict=True):
                # "clip" writes straight into ``out``; no number is out of range.
                np.take(
                    source, ids[start : start + size], axis=0, out=target[start : start + size], mode="clip"
                )

        size = max(LEAST_ROWS, -(-len(ids) // self._num_threads))
        run = self._pool.map if self.is_threaded else map
        for _ in run(read_piece, range(0, len(ids), size)):
            pass


class StagedTable:
    """One table, and staging memory for ``max_num_rows`` of its rows, twice: one is filled, one is read.

    A device has a third: rows are copied to it once the last ones there were used.
    """

    def __init__(self, reader: RowReader, stored: Sequence[StoredTensor], *, max_num_rows: int) -> None:
        self._reader = reader
        self._sources = [_map_rows(tensor) for tensor in stored]
        is_gpu = reader.stream is not None
        shapes = [(max_num_rows, source.shape[1]) for source in self._sources]
        self._staging = [
            [torch.empty(shape, dtype=torch.uint8, pin_memory=is_gpu) for shape in shapes] for _ in range(2)
        ]
        self._on_device: list[Tensor] | None = None
        if is_gpu:
            self._on_device = [torch.empty(s, dtype=torch.uint8, device=reader.device) for s in shapes]
        self._is_copied: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0
        self._is_used: torch.cuda.Event | None = None

    def fetch(self, find_ids: Callable[[], np.ndarray]) -> Future[Fetched]:
        """Set out for the rows whose numbers ``find_ids`` returns, in any shape; it is called in a thread."""
        # What used the device's rows last was launched before this call, and what will, after it.
        turn, is_used = self._turn, self._is_used
        self._turn ^= 1
        return self._reader.submit(lambda: self._fetch(find_ids(), turn, is_used))

    @contextlib.contextmanager
    def taken(self, future: Future[Fetched]) -> Iterator[Fetched]:
        """The rows, for what is launched within; the next but one fetch may overwrite them afterwards."""
        started = time.perf_counter()
        fetched = future.result()
        self._reader.waited_s += time.perf_counter() - started
        if fetched.is_copied is not None:
            torch.cuda.current_stream().wait_event(fetched.is_copied)
        yield fetched
        if fetched.is_copied is not None:
            self._is_used = torch.cuda.current_stream().record_event()

    def touch(self, ids: np.ndarray) -> None:
        """Bring rows into the page cache."""
        scratch = [np.empty((ids.size, source.shape[1]), np.uint8) for source in self._sources]
        self._reader.read(self._sources, ids.reshape(-1), scratch)

    def _fetch(self, ids: np.ndarray, turn: int, is_used: torch.cuda.Event | None) -> Fetched:
        count, staging = ids.size, self._staging[turn]
        if (copied := self._is_copied[turn]) is not None:
            copied.synchronize()
        self._reader.read(self._sources, ids.reshape(-1), [tensor.numpy()[:count] for tensor in staging])
        if self._on_device is None:
            return Fetched(ids, [tensor[:count] for tensor in staging], None)
        with torch.cuda.stream(self._reader.stream):
            stream = torch.cuda.current_stream()
            if is_used is not None:
                stream.wait_event(is_used)
            for target, source in zip(self._on_device, staging, strict=True):
                target[:count].copy_(source[:count], non_blocking=True)
            self._is_copied[turn] = is_copied = stream.record_event()
        return Fetched(ids, [tensor[:count] for tensor in self._on_device], is_copied)


def _map_rows(stored: StoredTensor) -> np.ndarray:
    """[num_rows, bytes of a row] of a tensor in its file: a page is read when it is looked at, no other."""
    begin = stored.offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    with open(stored.path, "rb") as file:
        mapping = mmap.mmap(
            file.fileno(), stored.offset + stored.num_bytes - begin, access=mmap.ACCESS_READ, offset=begin
        )
    mapping.madvise(mmap.MADV_RANDOM)
    array = np.frombuffer(mapping, np.uint8, count=stored.num_bytes, offset=stored.offset - begin)
    return array.reshape(stored.shape[0], -1)

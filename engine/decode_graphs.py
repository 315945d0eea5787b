"""Steps in which every sequence runs one row, replayed as CUDA graphs.

A decode step is some two thousand small launches, which take the host several times as long as the device
takes to run them. Here such a step runs in a room: space for so many rows, in contexts of so many tokens, in
buffers that all rooms share. A room's first step is run as any other and compiles what it needs, its second
is captured, and all that follow are replayed. What depends on more than its rows stays outside of a graph:
what n-grams look up, which may lie on the host, comes before it, logits after it. Bits are those of any other
step: a row's do not depend on who is in it.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from engine.decode_inputs import DecodeBuffers, DecodeInputs, DecodeRows, is_decode
from engine.decode_rooms import (
    MAX_ROWS,
    GraphPlaces,
    StepKind,
    most_room_rows,
    room_rows,
    room_tokens,
)
from engine.engram_tables import TableRows
from engine.kv_cache import KVCache
from engine.layer_rows import ModelShape
from engine.layers.ngrams import NgramTables, packed_ngram_classes
from engine.models.deepseek_v41 import DeepseekV41Model
from engine.parallel import ExpertGroup
from engine.scheduled_batch import ScheduledBatch, ScheduledChunk


@contextmanager
def without_collector() -> Iterator[None]:
    """Collect garbage now, and none until the end.

    A finalizer frees or unlocks memory, perhaps, which ends a capture; torch does not always see to that.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        gc.collect()
        yield
    finally:
        if was_enabled:
            gc.enable()


Size = tuple[int, int, int]
"""Of steps that are alike: rows, tokens of a context, and rows of the fullest rank of the group."""


class DecodeGraphs:
    """Runs decode steps. On a CPU each is run as its room's first one is.

    ``max_num_rows``: of a step of any kind.
    """

    def __init__(
        self,
        model: DeepseekV41Model,
        cache: KVCache,
        shape: ModelShape,
        ngrams: NgramTables | None,
        device: torch.device,
        *,
        max_num_rows: int,
        group: ExpertGroup | None = None,
    ) -> None:
        self._model, self._cache, self._shape, self._ngrams = model, cache, shape, ngrams
        self._group = group
        self._most_rows = most_room_rows(cache.num_states, max_num_rows)
        # NCCL has its own mind about being captured; ranks that share memory only launch kernels.
        is_alone = group is None or group.peers is not None
        self._captures = is_alone and device.type == "cuda"
        self._buffers = DecodeBuffers(self._most_rows, device)
        # Of the largest room; all others use its first rows. What n-grams looked up, by engram layer; and the
        # last layer's streams and what collapses them, where a replay leaves them.
        self._lookups: dict[int, Tensor] = {}
        self._outputs: tuple[Tensor, Tensor] | None = None
        self._places = GraphPlaces()
        self._graphs: dict[Size, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle() if self._captures else None
        self.num_steps = 0
        self.num_replays = 0

    def can_run(self, batch: ScheduledBatch) -> bool:
        """Whether a step has decode rows only, and not too many."""
        return 0 < len(batch.chunks) <= MAX_ROWS and all(map(is_decode, batch.chunks))

    def run(self, batch: ScheduledBatch) -> Tensor:
        """fp32 logits [num_chunks, vocab]: as of ``DeepseekV41Model.forward``. The group steps together."""
        chunks = batch.chunks
        num_rows = room_rows(len(chunks), self._most_rows)
        num_tokens = room_tokens(max(chunk.end for chunk in chunks))
        most = [0]
        if self._group is not None:
            num_layers = self._shape.num_layers
            self._group.agree([num_rows] * num_layers, has_work=True)
            most = [self._group.most_rows(layer) for layer in range(num_layers)]
        rows = self._buffers.load(chunks, num_rows, num_tokens)
        self._look_up(chunks, num_rows)
        # Where another rank prefills, the step takes as long as that, and its like may not come again.
        is_kept = self._captures and min(most) == max(most) <= MAX_ROWS
        size = num_rows, num_tokens, most[0]
        streams, pre = self._replay(rows, size) if is_kept else self._launch(rows)
        self.num_steps += 1
        return self._model.logits(streams, pre)[: len(chunks)]

    def _look_up(self, chunks: Sequence[ScheduledChunk], num_rows: int) -> None:
        """Bring what a step's n-grams look up, and those of its padding, to where graphs read it."""
        if self._ngrams is None:
            return
        spans = [(chunk.seq.token_ids, chunk.start, chunk.end) for chunk in chunks]
        classes = packed_ngram_classes(self._ngrams, spans, num_rows)
        for layer, rows in self._model.prefetch(lambda _: classes).items():
            looked_up = rows.looked_up()
            if layer not in self._lookups:
                self._lookups[layer] = looked_up.new_empty(self._most_rows, looked_up.shape[1])
            self._lookups[layer][:num_rows].copy_(looked_up)

    def _replay(self, rows: DecodeRows, size: Size) -> tuple[Tensor, Tensor]:
        """A step by its graph, which is captured first when such a step comes for the second time."""
        kind = self._places.next_step(size)
        if kind is StepKind.LAUNCH:
            return self._launch(rows)
        if kind is StepKind.CAPTURE:
            # What gave way goes first, for its memory.
            self._graphs = {other: graph for other, graph in self._graphs.items() if other in self._places}
            self._graphs[size] = self._capture(rows)
        self._graphs[size].replay()
        self.num_replays += 1
        assert self._outputs is not None, "nothing is captured before a step like it was launched"
        streams, pre = self._outputs
        return streams[: rows.num_rows], pre[: rows.num_rows]

    def _capture(self, rows: DecodeRows) -> torch.cuda.CUDAGraph:
        """The graph of a step. It keeps no memory to itself: any other may write to all but the outputs."""
        assert self._outputs is not None
        graph = torch.cuda.CUDAGraph()
        # Other threads (tables read from files) go on meanwhile, on streams of their own.
        capture = torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local")
        with without_collector(), capture:
            for output, found in zip(self._outputs, self._run_layers(rows), strict=True):
                output[: rows.num_rows].copy_(found)
        return graph

    def _launch(self, rows: DecodeRows) -> tuple[Tensor, Tensor]:
        """A step as any other is run."""
        streams, pre = self._run_layers(rows)
        if self._captures and self._outputs is None:
            found = (output.new_empty(self._most_rows, *output.shape[1:]) for output in (streams, pre))
            self._outputs = next(found), next(found)
        return streams, pre

    def _run_layers(self, rows: DecodeRows) -> tuple[Tensor, Tensor]:
        inputs = DecodeInputs(rows, self._shape, num_states=self._cache.num_states)
        lookups = {layer: _looked_up(found[: rows.num_rows]) for layer, found in self._lookups.items()}
        residual = self._model.run_layers(inputs, self._cache, lookups)
        assert residual is not None, "every decode row passes through all layers"
        return residual.streams, residual.pre


def _looked_up(rows: Tensor) -> TableRows:
    def not_kept() -> Tensor:
        raise AssertionError("only traced steps ask for hash rows")

    return TableRows(not_kept, lambda: rows)

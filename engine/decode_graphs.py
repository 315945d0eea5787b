"""Steps in which every sequence runs one row, replayed as CUDA graphs.

A decode step is some two thousand small launches, which take the host several times as long as the device
takes to run them. Here such a step runs in a room: buffers for so many rows, in contexts of so many tokens. A
room's first step is run as any other and compiles what it needs, its second is captured, and all that follow
are replayed. What depends on more than its rows stays outside of a graph: what n-grams look up, which may lie
on the host, comes before it, logits after it. Bits are those of any other step: a row's do not depend on who
is in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.batch import padded
from engine.decode_inputs import DecodeInputs, DecodeRows, is_decode
from engine.decode_rooms import MAX_GRAPHS, MAX_ROWS, room_rows, room_tokens
from engine.engram_tables import TableRows
from engine.kv_cache import KVCache
from engine.layer_rows import ModelShape
from engine.layers.ngrams import NgramTables, packed_ngram_classes
from engine.models.deepseek_v41 import DeepseekV41Model
from engine.parallel import ExpertGroup
from engine.scheduled_batch import ScheduledBatch, ScheduledChunk


@dataclass(slots=True)
class _Captured:
    """A graph, and the last layer's streams and what collapses them, where each replay leaves them."""

    graph: torch.cuda.CUDAGraph
    streams: Tensor
    pre: Tensor


@dataclass(slots=True)
class _Room:
    """What steps of one size read, and their graphs: by how many rows the fullest rank of the group has."""

    rows: DecodeRows
    lookups: dict[int, Tensor] = field(default_factory=dict)  # by engram layer: [num_rows, width]
    graphs: dict[int, _Captured | None] = field(default_factory=dict)  # None: run once, not captured yet


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
        self._device, self._group = device, group
        self._most_rows = padded(max_num_rows)
        # NCCL has its own mind about being captured; ranks that share memory only launch kernels.
        is_alone = group is None or group.peers is not None
        self._captures = is_alone and device.type == "cuda"
        self._rooms: dict[tuple[int, int], _Room] = {}
        self._pool = torch.cuda.graph_pool_handle() if self._captures else None
        self.num_steps = 0
        self.num_replays = 0

    def can_run(self, batch: ScheduledBatch) -> bool:
        """Whether a step has decode rows only, and not too many."""
        return 0 < len(batch.chunks) <= MAX_ROWS and all(map(is_decode, batch.chunks))

    def run(self, batch: ScheduledBatch) -> Tensor:
        """fp32 logits [num_chunks, vocab]: as of ``DeepseekV41Model.forward``. The group steps together."""
        chunks = batch.chunks
        size = room_rows(len(chunks), self._most_rows), room_tokens(max(chunk.end for chunk in chunks))
        room = self._rooms.get(size)
        if room is None:
            room = self._rooms[size] = _Room(DecodeRows(*size, self._device))
        most = [0]
        if self._group is not None:
            num_layers = self._shape.num_layers
            self._group.agree([size[0]] * num_layers, has_work=True)
            most = [self._group.most_rows(layer) for layer in range(num_layers)]
        self._load(room, chunks)
        # Where another rank prefills, the step takes as long as that, and its like may not come again.
        is_kept = self._captures and min(most) == max(most) <= MAX_ROWS
        streams, pre = self._replay(room, most[0]) if is_kept else self._run_eagerly(room)
        self.num_steps += 1
        return self._model.logits(streams, pre)[: len(chunks)]

    def _load(self, room: _Room, chunks: Sequence[ScheduledChunk]) -> None:
        """Bring a step's rows, and what their n-grams look up, to where the room's graphs read them."""
        room.rows.load(chunks)
        if self._ngrams is None:
            return
        spans = [(chunk.seq.token_ids, chunk.start, chunk.end) for chunk in chunks]
        classes = packed_ngram_classes(self._ngrams, spans, room.rows.num_rows)
        for layer, rows in self._model.prefetch(lambda _: classes).items():
            looked_up = rows.looked_up()
            if layer in room.lookups:
                room.lookups[layer].copy_(looked_up)
            else:
                room.lookups[layer] = looked_up.clone()

    def _replay(self, room: _Room, most: int) -> tuple[Tensor, Tensor]:
        """A step by its graph, which is captured first if the last such step was the first one."""
        if most not in room.graphs:
            if sum(len(other.graphs) for other in self._rooms.values()) < MAX_GRAPHS:
                room.graphs[most] = None
            return self._run_eagerly(room)
        captured = room.graphs[most]
        if captured is None:
            graph = torch.cuda.CUDAGraph()
            # Other threads (tables read from files) go on meanwhile, on streams of their own.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                streams, pre = self._run_eagerly(room)
            captured = room.graphs[most] = _Captured(graph, streams, pre)
        captured.graph.replay()
        self.num_replays += 1
        return captured.streams, captured.pre

    def _run_eagerly(self, room: _Room) -> tuple[Tensor, Tensor]:
        inputs = DecodeInputs(room.rows, self._shape, num_states=self._cache.num_states)
        lookups = {layer: _looked_up(rows) for layer, rows in room.lookups.items()}
        residual = self._model.run_layers(inputs, self._cache, lookups)
        assert residual is not None, "every decode row passes through all layers"
        return residual.streams, residual.pre


def _looked_up(rows: Tensor) -> TableRows:
    def not_kept() -> Tensor:
        raise AssertionError("only traced steps ask for hash rows")

    return TableRows(not_kept, lambda: rows)

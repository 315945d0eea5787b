"""ScheduledBatch: one step as the scheduler decided it, for the device to carry out.

Plain data. It names sequences, positions and copies; it knows neither queues nor tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.block_manager import Move
from engine.layer_rows import DecoderPrefill, LayerRows, ModelShape, layer_rows
from engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """Rows [start, start + num_tokens) of ``seq``.

    ``tail_end``, ``cached_until`` and ``mode`` are the arguments of ``layer_rows``. Rows below
    ``cached_until`` are replayed: their global KV exists, may be shared and must not be written.
    ``samples``: the chunk reaches the end of the known tokens, its last row's logits are wanted.
    """

    seq: Sequence
    start: int
    num_tokens: int
    tail_end: int
    cached_until: int
    mode: DecoderPrefill
    samples: bool

    @property
    def end(self) -> int:
        """One past the last row."""
        return self.start + self.num_tokens

    def layer_rows(self, shape: ModelShape) -> LayerRows:
        """Which of these rows each layer runs."""
        return layer_rows(shape, self.mode, tail_end=self.tail_end, cached_until=self.cached_until)


@dataclass(slots=True)
class ScheduledBatch:
    """One step. Moves are carried out in list order: before the forward pass, and after it.

    Consecutive moves of one kind and direction have different targets, so they may travel together.
    """

    moves_before: list[Move] = field(default_factory=list)
    chunks: list[ScheduledChunk] = field(default_factory=list)
    moves_after: list[Move] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Rows in the step."""
        return sum(chunk.num_tokens for chunk in self.chunks)


@dataclass(slots=True)
class SchedulerStats:
    """Counters since the scheduler was built.

    Recomputed rows count as prefill too; replayed rows count as neither. ``num_cached_tokens`` out of
    ``num_prompt_tokens`` is the hit rate of first admissions.
    """

    num_steps: int = 0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_replayed_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_preemptions: int = 0
    num_offloads: int = 0
    num_snapshots: int = 0

"""Scheduler: which rows run in the next step, and which blocks and states move before and after it.

It owns the waiting and running queues and the policy (budget, admission, preemption, prefix reuse).
It sees counts and positions only: no tensors, no text, no sampling. The device carries out its plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Literal

from engine.block_manager import Move
from engine.layer_rows import DecoderPrefill, LayerRows, ModelShape, layer_rows
from engine.sequence import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits and switches in plain counts. Device state slots are numbered 0 .. max_num_seqs-1."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_kv_blocks: int
    num_host_blocks: int = 0
    num_host_states: int = 0
    enable_prefix_caching: bool = True
    decoder_prefill: DecoderPrefill = "exact"
    preemption: Literal["offload", "recompute"] = "offload"
    max_num_preemptions: int = 3
    max_num_bypasses: int = 8
    snapshot_cost_tokens: int = 1


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """Rows [start, start + num_tokens) of ``seq``.

    ``tail_end``, ``cached_until`` and ``mode`` are the arguments of ``layer_rows``. Rows below
    ``cached_until`` are replayed: their global KV exists, is shared and must not be written.
    ``samples``: the last row's logits are wanted, the chunk reaches the end of the known tokens.
    A chunk with ``start`` 0, or at a replay's first row, starts from empty rings and groups
    (``is_fresh``): the slot holds another sequence's leavings.
    """

    seq: Sequence
    start: int
    num_tokens: int
    tail_end: int
    cached_until: int
    mode: DecoderPrefill
    samples: bool
    is_fresh: bool

    @property
    def end(self) -> int:
        """One past the last row."""
        return self.start + self.num_tokens

    def layer_rows(self, shape: ModelShape) -> LayerRows:
        """Which of these rows each layer runs."""
        return layer_rows(shape, self.mode, tail_end=self.tail_end, cached_until=self.cached_until)


@dataclass(slots=True)
class ScheduledBatch:
    """One step. Moves are carried out strictly in list order: before the forward pass, and after it."""

    moves_before: list[Move] = field(default_factory=list)
    chunks: list[ScheduledChunk] = field(default_factory=list)
    moves_after: list[Move] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Rows in the step."""
        return sum(chunk.num_tokens for chunk in self.chunks)


@dataclass(slots=True)
class SchedulerStats:
    """Counters since the scheduler was built."""

    num_steps: int = 0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_cached_tokens: int = 0
    num_replayed_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_preemptions: int = 0
    num_offloads: int = 0
    num_snapshots: int = 0


class Scheduler:
    """The calls of one step: ``schedule``, (device), ``finish_step``, then ``finish`` for what ended."""

    stats: SchedulerStats

    def __init__(
        self,
        config: SchedulerConfig,
        shape: ModelShape,
        *,
        hash_function: Callable[[int, tuple[int, ...]], int] | None = None,
    ) -> None: ...

    def add(self, seq: Sequence, prefix_ends: Iterable[int] = ()) -> None:
        """Queue a sequence. Raises ``RequestRejected`` for what can never be served.

        ``prefix_ends``: positions where prompts are known to part; a snapshot is kept there.
        """

    def abort(self, seq: Sequence) -> None:
        """Forget a sequence between two steps, waiting or running."""

    def schedule(self) -> ScheduledBatch | None:
        """The next step, with at least one chunk; None when nothing waits or runs."""

    def finish_step(self, batch: ScheduledBatch) -> None:
        """After the device ran ``batch``: advance progress, publish full blocks, register snapshots."""

    def finish(self, seq: Sequence) -> None:
        """The sequence is complete: free what it holds."""

    def has_unfinished(self) -> bool: ...

    @property
    def num_waiting(self) -> int: ...

    @property
    def num_running(self) -> int: ...

    def check_integrity(self) -> None: ...

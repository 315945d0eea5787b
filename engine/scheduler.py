"""Scheduler: which rows run in the next step, and which blocks and states move before and after it.

It owns the waiting and running queues and the policy (budget, admission, preemption, prefix reuse).
It sees counts and positions only: no tensors, no text, no sampling. The device carries out its plan.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Container, Iterable
from enum import Enum

from engine.block_manager import BlockManager, Move, num_blocks_for
from engine.config import KV_BLOCK_SIZE
from engine.layer_rows import ModelShape
from engine.limits import SchedulerConfig, check_servable
from engine.prefix_cache import HashFunction, PrefixNode, hash_block
from engine.prefix_reuse import ReusePlan, ReusePolicy
from engine.scheduled_batch import ScheduledBatch, ScheduledChunk, SchedulerStats
from engine.sequence import Sequence, SequenceStatus

__all__ = ["Scheduler", "SchedulerConfig"]

ADMISSION_LOOKAHEAD = 64
"""How far down the waiting queue one step looks."""


class _Admission(Enum):
    """``BLOCKED``: no room. ``DEFERRED``: another computes its prefix in this step."""

    ADMITTED = "admitted"
    BLOCKED = "blocked"
    DEFERRED = "deferred"


def _age(seq: Sequence) -> int:
    return seq.seq_id


class Scheduler:
    """One step is ``schedule``, the device, ``finish_step``, then ``finish`` for each sequence that ended.

    Every step with work holds at least one chunk: a sequence that gets no block may preempt the younger
    ones that are not in the step yet, the oldest thus all of them, and ``add`` has made sure that each
    fits the pool alone. A preempted sequence keeps its age. After ``max_num_preemptions`` it comes back
    with its worst case allocated and is never preempted again, so preemptions are bounded.
    """

    def __init__(
        self, config: SchedulerConfig, shape: ModelShape, *, hash_function: HashFunction = hash_block
    ) -> None:
        self.config = config
        self.stats = SchedulerStats()
        self.blocks = BlockManager(
            config.num_kv_blocks,
            config.max_num_seqs,
            num_host_blocks=config.num_host_blocks,
            num_host_states=config.num_host_states,
            enable_prefix_caching=config.enable_prefix_caching,
            hash_function=hash_function,
        )
        self._reuse = ReusePolicy(
            shape=shape,
            mode=config.decoder_prefill,
            # A bounded state depends on where its prompt ended: it must not serve another's prompt.
            takes_snapshots=config.enable_prefix_caching
            and config.num_host_states > 0
            and config.decoder_prefill != "bounded",
            snapshot_cost_tokens=config.snapshot_cost_tokens,
        )
        self._watermark = max(1, config.num_kv_blocks // 100)
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self._step: ScheduledBatch | None = None
        self._budget = 0
        self._is_short = False
        self._pending_snapshots: list[tuple[Sequence, int, int]] = []

    # The queue's face

    @property
    def num_waiting(self) -> int:
        """Sequences without device memory: new ones and preempted ones."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Sequences that own a state slot."""
        return len(self._running)

    @property
    def num_unfinished_tokens(self) -> int:
        """Rows computed for sequences that wait or run, each counted once; cached ones are not."""
        return sum(
            max(0, seq.num_tokens_ever_computed - seq.num_cached_tokens)
            for queue in (self._waiting, self._running)
            for seq in queue
        )

    def has_unfinished(self) -> bool:
        """Whether ``schedule`` would return a step."""
        return bool(self._waiting or self._running)

    def add(self, seq: Sequence, prefix_ends: Iterable[int] = ()) -> None:
        """Queue a sequence. Raises ``RequestRejected`` for what can never be served.

        ``prefix_ends``: lengths at which its prompt is known to part from others; a snapshot is kept there.
        """
        check_servable(seq, self.config)
        seq.prefix_ends = tuple(prefix_ends)
        insort(self._waiting, seq, key=_age)

    def abort(self, seq: Sequence) -> None:
        """Forget a sequence, waiting or running, between two steps."""
        self._leave(seq)

    def finish(self, seq: Sequence) -> None:
        """A running sequence is complete: free what it holds."""
        assert seq.status is SequenceStatus.RUNNING, "only a running sequence can finish"
        self._leave(seq)

    def _leave(self, seq: Sequence) -> None:
        assert self._step is None, "a sequence may leave only between two steps"
        (self._running if seq.status is SequenceStatus.RUNNING else self._waiting).remove(seq)
        self.blocks.release(seq)
        seq.status = SequenceStatus.FINISHED

    # A step

    def schedule(self, only: Container[int] | None = None) -> ScheduledBatch | None:
        """The next step, with at least one chunk; None when nothing waits or runs.

        ``only``: ids of the sequences that may be in it; then None also says that none of them has room now.
        """
        assert self._step is None, "the last step has not been finished"
        if not self.has_unfinished():
            return None
        self._step = step = ScheduledBatch()
        self._budget = self.config.max_num_batched_tokens
        self._is_short = False
        running = [seq for seq in self._running if only is None or seq.seq_id in only]
        decoding = [seq for seq in running if seq.is_decoding]
        prefilling = [seq for seq in running if not seq.is_decoding]
        # The longest first: short ones then fill the step's end. Nothing is admitted before all had a share.
        prefilling.sort(key=lambda seq: -seq.num_uncomputed_tokens)
        for seq in (*decoding, *prefilling):
            if self._budget > 0 and seq.status is SequenceStatus.RUNNING:
                self._schedule_running(seq)
        # Who joins while others lack blocks would take what they are waiting for.
        if not self._is_short:
            self._admit_waiting(only)
        if not step.chunks:
            assert only is not None, "a step without rows while there is work"
            self._step = None
            return None
        step.moves_before = self.blocks.take_moves()
        return step

    def upcoming(self) -> list[tuple[Sequence, int, int]]:
        """Prompt rows [start, end) that the step after the one under way will likely run: a hint, no promise.

        In the order of ``schedule``: prompts that were begun, the longest first, then those that wait.
        """
        reached = {} if self._step is None else {chunk.seq.seq_id: chunk.end for chunk in self._step.chunks}
        queue = sorted(self._running, key=lambda seq: -seq.num_uncomputed_tokens)
        if len(self._running) < self.config.max_num_seqs and not self._is_short:
            queue += self._waiting[:ADMISSION_LOOKAHEAD]
        found, left = [], self.config.max_num_batched_tokens
        for seq in queue:
            start = reached.get(seq.seq_id, seq.num_computed_tokens)
            end = min(start + left, seq.num_prompt_tokens)
            if start < end:
                found.append((seq, start, end))
                left -= end - start
        return found

    def finish_step(self, batch: ScheduledBatch) -> None:
        """After the device ran ``batch``: advance progress, publish full blocks, register snapshots."""
        assert batch is self._step, "steps are finished once each, in order"
        self._step = None
        self.stats.num_steps += 1
        for chunk in batch.chunks:
            self._count(chunk)
            seq = chunk.seq
            seq.num_computed_tokens = chunk.end
            seq.num_tokens_ever_computed = max(seq.num_tokens_ever_computed, chunk.end)
            self.blocks.publish(seq)
        for seq, end, slot in self._pending_snapshots:
            self.blocks.states.keep_snapshot(seq.nodes[end // KV_BLOCK_SIZE - 1], slot)
        self._pending_snapshots = []

    def _count(self, chunk: ScheduledChunk) -> None:
        seq, stats = chunk.seq, self.stats
        num_replayed = max(0, min(chunk.end, chunk.cached_until) - chunk.start)
        first_new = max(chunk.start + num_replayed, min(seq.num_tokens_ever_computed, chunk.end))
        num_recomputed = first_new - chunk.start - num_replayed
        seq.num_replayed_tokens += num_replayed
        seq.num_recomputed_tokens += num_recomputed
        stats.num_replayed_tokens += num_replayed
        stats.num_recomputed_tokens += num_recomputed
        if seq.is_decoding:
            stats.num_decode_tokens += chunk.num_tokens
        else:
            stats.num_prefill_tokens += chunk.num_tokens - num_replayed

    def _schedule_running(self, seq: Sequence) -> None:
        """Put the next rows of a running sequence into the step, as far as blocks can be had for them."""
        end = self._next_end(seq, self._budget)
        while (capacity := self._capacity(seq)) <= seq.num_computed_tokens and self._try_preempt_for(seq):
            pass
        if capacity < end:
            self._is_short = True
            end = capacity
        if end > seq.num_computed_tokens:
            self.blocks.grow(seq, end)
            self._append_chunk(seq, end)

    def _capacity(self, seq: Sequence) -> int:
        return (len(seq.block_table) + self.blocks.num_available_blocks) * KV_BLOCK_SIZE

    def _next_end(self, seq: Sequence, budget: int) -> int:
        return min(seq.num_computed_tokens + budget, self._tail_end(seq))

    def _tail_end(self, seq: Sequence) -> int:
        """The first wanted end behind the computed rows."""
        return min((end for end in seq.wanted_ends if end > seq.num_computed_tokens), default=seq.num_tokens)

    def _append_chunk(self, seq: Sequence, end: int) -> None:
        assert self._step is not None
        tail_end = self._tail_end(seq)
        # Behind the prompt every row runs in every layer, as it would have when it was decoded.
        is_behind_prompt = self.config.decoder_prefill == "bounded" and tail_end > seq.num_prompt_tokens
        chunk = ScheduledChunk(
            seq=seq,
            start=seq.num_computed_tokens,
            num_tokens=end - seq.num_computed_tokens,
            tail_end=tail_end,
            cached_until=seq.cached_until,
            mode="full" if is_behind_prompt else self.config.decoder_prefill,
            samples=end == seq.num_tokens,
        )
        self._step.chunks.append(chunk)
        self._budget -= chunk.num_tokens
        if end in seq.wanted_ends and end % KV_BLOCK_SIZE == 0 and self._reuse.takes_snapshots:
            self._plan_snapshot(seq, end)

    def _plan_snapshot(self, seq: Sequence, end: int) -> None:
        slot = self.blocks.states.try_take_host()
        if slot is None:
            return
        assert self._step is not None
        assert seq.state_slot is not None
        self._step.moves_after.append(Move("state", "device", "host", seq.state_slot, slot))
        self._pending_snapshots.append((seq, end, slot))
        self.stats.num_snapshots += 1

    # Preemption

    def _try_preempt_for(self, seq: Sequence) -> bool:
        """Send the youngest sequence that is younger than ``seq`` back to waiting.

        It is not in the step yet: decodes are considered oldest first, prefills take others' blocks only
        while the step is empty.
        """
        assert self._step is not None
        self._is_short = True
        # A prefill can wait for decodes to end, as long as anything runs at all.
        if self._step.chunks and not seq.is_decoding:
            return False
        for victim in reversed(self._running):
            if victim is seq:
                return False
            if not victim.is_reserved:
                self._preempt(victim)
                return True
        return False

    def _preempt(self, seq: Sequence) -> None:
        self._running.remove(seq)
        seq.status = SequenceStatus.WAITING
        seq.num_preemptions += 1
        self.stats.num_preemptions += 1
        if self.config.preemption == "offload" and self.blocks.try_offload(seq):
            self.stats.num_offloads += 1
        else:
            self.blocks.release(seq)
            seq.num_computed_tokens = 0
        insort(self._waiting, seq, key=_age)

    # Admission

    def _admit_waiting(self, only: Container[int] | None) -> None:
        """Fill the step with waiting sequences, oldest first.

        One that does not fit is passed by later ones, but only ``max_num_bypasses`` times in all: then
        the room that comes free is kept for it. One that may not be in the step is not passed by.
        """
        index, blocked = 0, None
        while index < min(len(self._waiting), ADMISSION_LOOKAHEAD):
            if self._budget == 0 or len(self._running) == self.config.max_num_seqs:
                return
            if blocked is not None and blocked.num_bypasses >= self.config.max_num_bypasses:
                return
            seq = self._waiting[index]
            if only is not None and seq.seq_id not in only:
                return
            outcome = self._try_admit(seq)
            if outcome is _Admission.ADMITTED:
                del self._waiting[index]
                if blocked is not None:
                    blocked.num_bypasses += 1
                continue
            index += 1
            if outcome is _Admission.BLOCKED and blocked is None:
                blocked = seq

    def _try_admit(self, seq: Sequence) -> _Admission:
        num_available = self.blocks.num_available_blocks
        # Looking the prefix up again is worth it only when there is more room than the last time.
        if self._running and num_available <= seq.num_available_when_blocked:
            return _Admission.BLOCKED
        if seq.is_offloaded:
            nodes = tuple(seq.nodes)
            plan = ReusePlan(seq.num_computed_tokens, seq.cached_until, nodes, None, seq.wanted_ends)
        else:
            chain = self._match(seq)
            if self._is_prefix_in_step(seq, chain):
                return _Admission.DEFERRED
            plan = self._reuse.decide(
                chain, seq.prefix_ends, num_tokens=seq.num_tokens, num_prompt_tokens=seq.num_prompt_tokens
            )
        tail_end = min((end for end in plan.wanted_ends if end > plan.start), default=seq.num_tokens)
        end = min(plan.start + self._budget, tail_end)
        is_reserved = seq.num_preemptions >= self.config.max_num_preemptions
        num_tokens = max(end, plan.cached_until, seq.max_total_tokens - 1 if is_reserved else 0)
        spare = self._watermark if self._running else 0
        if not self.blocks.can_hold(plan.nodes, num_blocks_for(num_tokens), spare):
            seq.num_available_when_blocked = num_available
            return _Admission.BLOCKED
        self._admit(seq, plan, num_tokens)
        seq.is_reserved = is_reserved
        self._append_chunk(seq, end)
        return _Admission.ADMITTED

    def _match(self, seq: Sequence) -> list[PrefixNode]:
        max_hit = self._reuse.max_hit(seq.num_tokens, seq.num_prompt_tokens)
        return self.blocks.match_prefix(seq.token_ids, max_hit)

    def _is_prefix_in_step(self, seq: Sequence, nodes: list[PrefixNode]) -> bool:
        """Whether this very step computes the block after ``nodes``: one step later it is a hit."""
        if not self.config.enable_prefix_caching:
            return False
        start = len(nodes) * KV_BLOCK_SIZE
        end = start + KV_BLOCK_SIZE
        if end > self._reuse.max_hit(seq.num_tokens, seq.num_prompt_tokens):
            return False
        assert self._step is not None
        return any(
            chunk.end >= end
            and chunk.seq.nodes[-1:] == nodes[-1:]
            and chunk.seq.token_ids[start:end] == seq.token_ids[start:end]
            for chunk in self._step.chunks
        )

    def _admit(self, seq: Sequence, plan: ReusePlan, num_tokens: int) -> None:
        if seq.is_offloaded:
            self.blocks.resume(seq)
        else:
            self.blocks.start(seq, plan.nodes, plan.snapshot)
            seq.num_computed_tokens = plan.start
            seq.cached_until = plan.cached_until
            seq.wanted_ends = plan.wanted_ends
            if plan.nodes:
                plan.nodes[-1].note_hit_end(seq.seq_id)
            if seq.num_preemptions == 0:
                seq.num_cached_tokens = plan.start
                self.stats.num_cached_tokens += plan.start
                self.stats.num_prompt_tokens += seq.num_prompt_tokens
        self.blocks.grow(seq, num_tokens)
        seq.num_available_when_blocked = -1
        seq.status = SequenceStatus.RUNNING
        insort(self._running, seq, key=_age)

    # Self-check

    def check_integrity(self) -> None:
        """Queues, sequences, blocks and slots agree. May be called at any moment between two calls."""
        assert all(seq.status is SequenceStatus.RUNNING for seq in self._running)
        assert all(seq.status is SequenceStatus.WAITING for seq in self._waiting)
        for queue in (self._running, self._waiting):
            ages = [seq.seq_id for seq in queue]
            assert ages == sorted(set(ages)), "a queue is out of order or holds a sequence twice"
        for seq in self._running:
            assert seq.state_slot is not None
            assert not seq.is_offloaded
            assert num_blocks_for(seq.num_computed_tokens) <= len(seq.block_table)
            assert seq.num_preemptions <= self.config.max_num_preemptions
        for seq in self._waiting:
            assert seq.state_slot is None
            assert not seq.block_table
            assert seq.is_offloaded or not (seq.nodes or seq.num_computed_tokens)
        pending = [slot for _, _, slot in self._pending_snapshots]
        self.blocks.check_integrity((*self._running, *self._waiting), pending)

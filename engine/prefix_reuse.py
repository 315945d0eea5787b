"""What an admission makes of a prefix hit: restore a snapshot, replay a bounded tail, or recompute.

A pure decision from positions and costs. The chain's blocks and snapshots are the block manager's;
carrying the decision out is the scheduler's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from engine.config import KV_BLOCK_SIZE
from engine.layer_rows import DecoderPrefill, ModelShape, num_row_layers, replay_start
from engine.prefix_cache import PrefixNode

NUM_HITS_FOR_SNAPSHOT = 2
"""Sequences that have to part from the cached content at the same end before it earns a snapshot."""


@dataclass(frozen=True, slots=True)
class ReusePlan:
    """Run rows from ``start``, with ``nodes`` as the table's head; rows below ``cached_until`` are replayed.

    ``snapshot``: the node whose state is restored first, at ``start``. ``wanted_ends``: where chunks
    must end with complete rings, ascending, the last one the end of the known tokens.
    """

    start: int
    cached_until: int
    nodes: tuple[PrefixNode, ...]
    snapshot: PrefixNode | None
    wanted_ends: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReusePolicy:
    """The facts a decision needs beside the chain. ``takes_snapshots``: there are slots to keep them in."""

    shape: ModelShape
    mode: DecoderPrefill
    takes_snapshots: bool
    snapshot_cost_tokens: int

    def max_hit(self, num_tokens: int, num_prompt_tokens: int) -> int:
        """Tokens that may come from the cache: at least one row has to run.

        In ``bounded`` mode the rings behind the prompt's end depend on where it ended, so that a replay
        has to start before it.
        """
        return (num_prompt_tokens if self.mode == "bounded" else num_tokens) - 1

    def snapshot_points(self, prefix_ends: Iterable[int], num_tokens: int) -> tuple[int, ...]:
        """Block-aligned ends worth a snapshot among the ``prefix_ends`` known beforehand."""
        if not self.takes_snapshots:
            return ()
        aligned = {end // KV_BLOCK_SIZE * KV_BLOCK_SIZE for end in prefix_ends}
        return tuple(sorted(end for end in aligned if 0 < end <= num_tokens))

    def decide(
        self, nodes: list[PrefixNode], prefix_ends: Iterable[int], *, num_tokens: int, num_prompt_tokens: int
    ) -> ReusePlan:
        """The cheapest way, in row-layers, to the end of the known tokens.

        Rows behind a preempted prompt's end cost the same either way, so one mode serves for comparing.
        """
        points = set(self.snapshot_points(prefix_ends, num_tokens)) | {num_tokens}
        if self.mode == "bounded":
            points.add(num_prompt_tokens)
        recompute = ReusePlan(0, 0, (), None, tuple(sorted(points)))
        if not nodes:
            return recompute
        cached_until = nodes[-1].num_tokens
        ends = tuple(sorted(end for end in points if end > cached_until))
        replay = ReusePlan(self._replay_start(ends[0], cached_until), cached_until, tuple(nodes), None, ends)
        plans = [replay, recompute]
        kept = next((node for node in reversed(nodes) if node.snapshot is not None), None)
        if kept is not None:
            plans.insert(0, ReusePlan(kept.num_tokens, cached_until, tuple(nodes), kept, ends))
        # On a tie the earlier wins: sharing blocks saves memory even where it saves no rows.
        best = min(plans, key=self._cost)
        return self._with_snapshot_at_hit(best, points)

    def _with_snapshot_at_hit(self, plan: ReusePlan, points: set[int]) -> ReusePlan:
        """Make rings complete at the hit's end as well, where later sequences will want them."""
        end = plan.cached_until
        if end == 0 or plan.start == end or not self.takes_snapshots:
            return plan
        is_popular = plan.nodes[-1].num_end_hits + 1 >= NUM_HITS_FOR_SNAPSHOT
        if plan.nodes[-1].snapshot is not None or not (is_popular or end in points):
            return plan
        start = plan.start if plan.snapshot is not None else self._replay_start(end, end)
        return ReusePlan(start, end, plan.nodes, plan.snapshot, (end, *plan.wanted_ends))

    def _replay_start(self, tail_end: int, cached_until: int) -> int:
        return replay_start(self.shape, self.mode, tail_end=tail_end, cached_until=cached_until)

    def _cost(self, plan: ReusePlan) -> int:
        rows = num_row_layers(
            self.shape,
            self.mode,
            start=plan.start,
            wanted_ends=plan.wanted_ends,
            cached_until=plan.cached_until,
        )
        restored = self.snapshot_cost_tokens * self.shape.num_layers if plan.snapshot is not None else 0
        return rows + restored

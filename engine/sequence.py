"""Sequence: one sample of one request while the engine works on it.

It holds what the host tracks (tokens, progress, which blocks and state slot it owns); the scheduler
and the block manager write it. It knows nothing of tensors, sampling or text.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from engine.api import Request

if TYPE_CHECKING:
    from engine.prefix_cache import PrefixNode


class SequenceStatus(Enum):
    """WAITING holds no device memory; RUNNING owns a state slot and blocks; FINISHED owns nothing."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """Rows [0, ``num_computed_tokens``) of ``token_ids`` are in the cache; the rest is to be run.

    ``num_tokens`` (all known tokens) exceeds ``num_computed_tokens`` by one between two decode steps.
    ``cached_until``: rows below it live in shared blocks and are never written; rows from
    ``num_computed_tokens`` up to it are replayed for their rings alone.
    ``max_total_tokens`` bounds prompt plus generation; ``seq_id`` grows with arrival and decides age.
    """

    request: Request
    sample_index: int
    seq_id: int
    token_ids: list[int]
    num_prompt_tokens: int
    max_total_tokens: int
    status: SequenceStatus = SequenceStatus.WAITING

    num_computed_tokens: int = 0
    cached_until: int = 0
    wanted_ends: tuple[int, ...] = ()
    """Ends at which a snapshot is taken, fixed at admission: rows cut before cannot be had later."""
    prefix_ends: tuple[int, ...] = ()
    block_table: array[int] = field(default_factory=lambda: array("q"))
    """Numbers as a device reads them: those of a long context are sent as they are, every step."""
    state_slot: int | None = None
    nodes: list[PrefixNode] = field(default_factory=list)
    """The prefix-cache nodes of the first ``len(nodes)`` blocks of ``block_table``."""
    host_blocks: list[int] = field(default_factory=list)
    """Where an offloaded sequence's blocks wait; empty otherwise."""
    host_state: int | None = None
    is_reserved: bool = False
    """Admitted with its worst case allocated, hence never preempted again."""

    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0
    num_replayed_tokens: int = 0
    num_bypasses: int = 0
    num_available_when_blocked: int = -1
    num_tokens_ever_computed: int = 0

    @classmethod
    def build(cls, request: Request, *, sample_index: int, seq_id: int, max_model_len: int) -> Sequence:
        """A waiting sequence; ``max_tokens`` None means "up to the model's length"."""
        num_prompt_tokens = len(request.prompt_token_ids)
        max_tokens = request.sampling.max_tokens
        wanted = max_model_len if max_tokens is None else num_prompt_tokens + max_tokens
        return cls(
            request=request,
            sample_index=sample_index,
            seq_id=seq_id,
            token_ids=list(request.prompt_token_ids),
            num_prompt_tokens=num_prompt_tokens,
            max_total_tokens=min(wanted, max_model_len),
        )

    @property
    def num_tokens(self) -> int:
        """All known tokens: the prompt and what was generated."""
        return len(self.token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        """Rows still to run, replayed ones included."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def is_decoding(self) -> bool:
        """Whether the next row is the last sampled token alone."""
        return self.num_uncomputed_tokens == 1 and self.num_tokens > self.num_prompt_tokens

    @property
    def is_offloaded(self) -> bool:
        """Whether its state waits in host memory."""
        return self.host_state is not None

    def append_token(self, token_id: int) -> None:
        """Add a sampled token. All earlier tokens have to be computed."""
        assert self.num_computed_tokens == len(self.token_ids), "a token was sampled before its row ran"
        assert len(self.token_ids) < self.max_total_tokens, "a token was sampled beyond the sequence's limit"
        self.token_ids.append(token_id)

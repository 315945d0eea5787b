"""The scheduler's limits, and the refusal of what can never be served within them.

Plain counts: it knows the sizes of pools and steps, not what is in them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.block_manager import num_blocks_for
from engine.config import KV_BLOCK_SIZE
from engine.errors import RequestRejected
from engine.layer_rows import DecoderPrefill
from engine.sequence import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits and switches in plain counts. Device state slots are numbered 0 .. max_num_seqs-1.

    ``max_num_bypasses``: how often a later sequence may be admitted past the same head of the queue.
    ``snapshot_cost_tokens``: what restoring a snapshot costs, in tokens run through every layer. Copying
    a few megabytes from host memory takes less time than one token's share of a prefill.
    """

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

    def __post_init__(self) -> None:
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "num_kv_blocks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        for name in ("num_host_blocks", "num_host_states", "max_num_preemptions", "max_num_bypasses"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be >= 0, got {getattr(self, name)}")


def check_servable(seq: Sequence, config: SchedulerConfig) -> None:
    """Raise ``RequestRejected`` for a sequence that no amount of waiting would let run."""
    if seq.num_prompt_tokens == 0:
        raise RequestRejected("empty_prompt", "the prompt has no tokens")
    if seq.num_prompt_tokens + 1 > config.max_model_len:
        raise RequestRejected(
            "prompt_too_long",
            f"the prompt has {seq.num_prompt_tokens} tokens; the limit is {config.max_model_len - 1}, "
            "one less than max_model_len",
        )
    # The last token is sampled and never run, so it needs no room.
    num_tokens = seq.max_total_tokens - 1
    if num_blocks_for(num_tokens) > config.num_kv_blocks:
        raise RequestRejected(
            "kv_too_small",
            f"{seq.num_prompt_tokens} prompt tokens and up to {seq.max_total_tokens - seq.num_prompt_tokens} "
            f"generated need room for {num_tokens} tokens; the KV pool holds "
            f"{config.num_kv_blocks * KV_BLOCK_SIZE}",
        )

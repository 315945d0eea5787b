"""EngineConfig is what was asked; ResolvedConfig is what holds after every "auto" was answered.

Both are frozen. Resolving needs the model's config and the device's kind, which the caller passes
in: nothing here imports torch or triton.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

KV_BLOCK_SIZE = 64
"""Tokens in one KV block: 32 compressed entries at ratio 2, 64 at ratio 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """One rank's engine, as the job asks for it.

    ``num_kv_blocks`` 0 and ``max_model_len`` 0 mean "as many as fit" and "the model's own".
    ``cache_quantisation`` "none" keeps windows, entries and index vectors in ``dtype``; it exists to
    compare with references, not to serve. ``decoder_prefill`` "bounded" is an approximation.

    ``host_memory_bytes`` is the budget for KV blocks and states kept in host memory: preempted
    sequences, evicted prefixes, snapshots. 0 keeps nothing there. ``num_host_kv_blocks`` and
    ``num_host_states`` 0 mean "as many as that budget holds".
    """

    model: str
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    activation_quantisation: Literal["auto", "release", "row", "none"] = "auto"
    cache_quantisation: Literal["release", "none"] = "release"
    max_model_len: int = 0
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    num_kv_blocks: int = 0
    host_memory_bytes: int = 1 << 30
    num_host_kv_blocks: int = 0
    num_host_states: int = 0
    enable_prefix_caching: bool = True
    decoder_prefill: Literal["exact", "bounded", "full"] = "exact"
    preemption: Literal["offload", "recompute"] = "offload"
    max_num_preemptions: int = 3
    gpu_memory_utilization: float = 0.9
    seed: int = 0

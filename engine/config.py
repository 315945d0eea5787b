"""EngineConfig is what was asked; ResolvedConfig is what holds after every "auto" was answered.

Both are frozen. Resolving needs the model's config and the device's kind, which the caller passes
in: nothing here imports torch or triton.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.errors import ConfigError

TablePlace = Literal["gpu", "host", "mmap"]
"""Where n-gram tables lie: on the rank's device, in host memory (once a node), or in their files."""

ExchangePath = Literal["none", "all_to_all", "peer_memory"]
"""How rows travel between ranks that share the experts; "none": this rank has them all."""

KV_BLOCK_SIZE = 64
"""Tokens in one KV block: 32 compressed entries at ratio 2, 64 at ratio 1."""

ROW_PADDING = 32
"""Packed rows are padded to a multiple of this, so that vector kernels never meet a ragged tail."""

_MOST, _MOST_BYTES = 2**31 - 1, 2**48  # what indices of 32 bits number, and what an address space holds


def padded(num_rows: int) -> int:
    """Packed rows that so many take, padding included."""
    return -(-num_rows // ROW_PADDING) * ROW_PADDING


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """One rank's engine, as the job asks for it.

    ``num_kv_blocks`` 0 and ``max_model_len`` 0 mean "as many as fit" and "the model's own".
    ``cache_quantisation`` "none" keeps windows, entries and index vectors in ``dtype``; it exists to
    compare with references, not to serve. ``decoder_prefill`` "bounded" is an approximation.
    ``kernel_impl`` "torch" runs every op as its plain-torch reference, "triton" the kernels there are;
    "auto" is "triton" on a GPU whose kernels serve the model's shape.
    ``cuda_graphs``: steps in which every sequence decodes are captured and replayed, on a GPU with kernels.
    ``engram`` is where n-gram tables lie: "gpu" is the rank's device, "host" memory that the ranks of a node
    share and kernels read, "mmap" the checkpoint's own files; bits are the same. "auto" is the first of the
    three that has room, and "mmap" on a CPU.

    ``host_memory_bytes`` is the budget for KV blocks and states kept in host memory: preempted
    sequences, evicted prefixes, snapshots. 0 keeps nothing there. ``num_host_kv_blocks`` and
    ``num_host_states`` 0 mean "as many as that budget holds"; other numbers are taken whatever the budget,
    unless that is 0: the two contradict each other, and are refused.
    """

    model: str
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    kernel_impl: Literal["auto", "torch", "triton"] = "auto"
    activation_quantisation: Literal["auto", "release", "row", "none"] = "auto"
    cache_quantisation: Literal["release", "none"] = "release"
    engram: Literal["auto", "gpu", "host", "mmap"] = "auto"
    cuda_graphs: bool = True
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

    def __post_init__(self) -> None:
        positive = ("max_num_seqs", "max_num_batched_tokens")
        for name in positive:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        names = (
            "max_model_len",
            "num_kv_blocks",
            "host_memory_bytes",
            "num_host_kv_blocks",
            "num_host_states",
        )
        for name in (*names, "max_num_preemptions"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        for name in (*positive, *names):
            most = _MOST_BYTES if name == "host_memory_bytes" else _MOST
            if getattr(self, name) > most:
                raise ValueError(f"{name} must be at most {most}, got {getattr(self, name)}")
        for name in ("num_host_kv_blocks", "num_host_states"):
            if getattr(self, name) and not self.host_memory_bytes:
                raise ValueError(
                    f"{name} is {getattr(self, name)}, but host_memory_bytes is 0, which keeps nothing there"
                )
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(f"gpu_memory_utilization must be in (0, 1], got {self.gpu_memory_utilization}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaPlace:
    """Where a rank stands among those that share the experts with it, and where they find each other.

    ``host`` and ``port`` are those of a rendezvous that the caller keeps, one for each group that is formed.
    A rank waits ``start_timeout_s`` for another to have loaded, and ``timeout_s`` at any later time.
    """

    rank: int
    num_ranks: int
    host: str
    port: int
    start_timeout_s: float = 1800.0
    timeout_s: float = 60.0

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.num_ranks:
            raise ValueError(f"rank must lie in 0..{self.num_ranks - 1}, got {self.rank}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig:
    """What one rank really runs with; nothing is "auto" any more. Recorded beside the output.

    ``device_name`` is what the device calls itself: bits are compared within one kind of it.
    """

    model: str
    dtype: Literal["float32", "bfloat16"]
    device: Literal["cpu", "cuda"]
    device_name: str = ""
    kernel_impl: Literal["triton", "torch"]
    activation_quantisation: Literal["release", "row", "none"]
    cache_quantisation: Literal["release", "none"]
    exchange: ExchangePath = "none"
    engram: TablePlace = "gpu"
    cuda_graphs: bool = False
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_kv_blocks: int
    num_host_kv_blocks: int
    num_host_states: int
    enable_prefix_caching: bool
    decoder_prefill: Literal["exact", "bounded", "full"]
    preemption: Literal["offload", "recompute"]
    max_num_preemptions: int
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFacts:
    """What the numbers of blocks follow from. ``cache_bytes`` is what blocks may take on the device."""

    num_bytes_per_block: int
    num_bytes_per_state: int
    cache_bytes: int


def resolve_max_model_len(config: EngineConfig, *, model_max_len: int) -> int:
    """The asked length, or the model's own. Raises ``ConfigError`` beyond it."""
    if config.max_model_len > model_max_len:
        raise ConfigError(f"engine.max_model_len {config.max_model_len} exceeds the model's {model_max_len}")
    return config.max_model_len or model_max_len


def most_total_tokens(
    num_prompt_tokens: int, max_tokens: int | None, *, max_model_len: int, num_kv_blocks: int
) -> int:
    """How long a sequence may become, its prompt included.

    ``max_tokens`` None asks for all that can be served: the model's length, and what the KV pool holds; a
    number is meant, and refused where the pool is too small for it. The last token is sampled and never
    run, so it needs no room.
    """
    if max_tokens is not None:
        return min(num_prompt_tokens + max_tokens, max_model_len)
    return max(num_prompt_tokens + 1, min(max_model_len, num_kv_blocks * KV_BLOCK_SIZE + 1))


def resolve_block_counts(
    config: EngineConfig, facts: MemoryFacts, *, max_model_len: int
) -> tuple[int, int, int]:
    """(device blocks, host blocks, host states) from the asked numbers or the memory there is.

    More blocks than ``max_num_seqs`` sequences of full length are never taken. Raises
    ``ConfigError`` when memory does not hold one sequence of full length.
    """
    blocks_per_seq = -(-max_model_len // KV_BLOCK_SIZE)
    num_blocks = config.num_kv_blocks
    if num_blocks == 0:
        num_blocks = min(
            blocks_per_seq * config.max_num_seqs, facts.cache_bytes // max(facts.num_bytes_per_block, 1)
        )
        if num_blocks < blocks_per_seq:
            raise ConfigError(
                f"{facts.cache_bytes} bytes for the KV cache hold {num_blocks} blocks; one sequence of "
                f"{max_model_len} tokens needs {blocks_per_seq}: lower engine.max_model_len"
            )
    # A quarter of the host's budget keeps states (one serves a whole prefix), the rest keeps blocks.
    fitting_states = config.host_memory_bytes // 4 // max(facts.num_bytes_per_state, 1)
    num_states = config.num_host_states or min(4 * config.max_num_seqs, fitting_states)
    fitting_blocks = config.host_memory_bytes * 3 // 4 // max(facts.num_bytes_per_block, 1)
    num_host_blocks = config.num_host_kv_blocks or min(4 * num_blocks, fitting_blocks)
    return num_blocks, num_host_blocks, num_states

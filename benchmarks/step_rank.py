"""One rank of an expert-parallel group on one device, without files: random weights, a full cache, one chunk.

It stands for a rank in the middle of a job. Alone, its share of the experts gets the rows that the group
would send it, because the router chooses among all experts and their ids are folded onto the rank's own. With
a place in a real group it exchanges rows with the others. It builds and runs; what is measured is the
caller's.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.digests import digest
from benchmarks.model_dims import DIMS, num_buckets, rank_config
from benchmarks.random_weights import RandomWeights
from engine.api import Request
from engine.batch import BatchInputs
from engine.config import KV_BLOCK_SIZE, ReplicaPlace
from engine.engram_tables import EngramTables
from engine.kv_cache import CacheLayout, KVCache
from engine.layer_rows import ModelShape
from engine.layers.linear import ActivationFormat
from engine.layers.ngrams import NgramTables
from engine.layers.ops import Ops, build_ops
from engine.models.deepseek_v41 import DeepseekV41Model, Trace
from engine.models.deepseek_v41_config import DeepseekV41Config
from engine.parallel import ExpertGroup
from engine.peer_memory import ExchangeSize
from engine.scheduled_batch import ScheduledBatch, ScheduledChunk
from engine.sequence import Sequence
from kernels.moe import Routes
from kernels.number_formats import pack_fp4_entry, pack_fp4_index, pack_fp8

PACKERS = {"entries": pack_fp4_entry, "index_keys": pack_fp4_index, "windows": pack_fp8}


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is run; results are comparable where it is equal.

    ``decoder`` "full": the chunk ends its prompt, every layer runs on every row. "mid": the chunk lies far
    from the prompt's end, so that layers behind the last KV source have no rows and that one only its keys.
    ``is_real``: all ``num_ranks`` are there, each with a chunk of its own; else one stands for them.
    """

    dims: str = "flash"
    num_layers: int = 40
    num_ranks: int = 4
    is_real: bool = False
    decoder: str = "full"
    activations: str = "row"
    dtype: str = "bfloat16"
    kernel_impl: str = "triton"
    seed: int = 0


class SimulatedRank:
    """The model, its cache, and ``step``."""

    def __init__(
        self,
        workload: Workload,
        device: torch.device,
        change_ops: Callable[[Ops], Ops] = lambda ops: ops,
        place: ReplicaPlace | None = None,
    ) -> None:
        dims = DIMS[workload.dims]
        self.workload = workload
        self.device = device
        num_simulated = workload.num_ranks if place is None else 1
        self.config = rank_config(dims, num_layers=workload.num_layers, num_ranks=num_simulated)
        self._seed = workload.seed + (0 if place is None else place.rank)
        self._group: ExpertGroup | None = None
        if place is not None:
            num_experts = self.config.n_routed_experts
            self._group = ExpertGroup(place, num_experts=num_experts, num_layers=workload.num_layers)
        self.num_new, self.context = dims.num_new, dims.num_cached + dims.num_new
        dtype = getattr(torch, workload.dtype)
        self._shape = ModelShape(
            num_layers=self.config.num_hidden_layers,
            window=self.config.sliding_window,
            decoder_start=self.config.decoder_start,
        )
        self._tables = _ngram_tables(self.config, dims.bucket_rows, workload.seed)
        ops = change_ops(build_ops(workload.kernel_impl))
        if place is None:
            ops = replace(ops, route_tokens=fold_routes(ops.route_tokens, self.config.n_routed_experts))
        weights = RandomWeights(
            dtype=dtype,
            device=device,
            keeps_quantised=ops.reads_quantised,
            router_factor=num_simulated,
            local_experts=None if self._group is None else self._group.own_experts,
        )
        self._model = DeepseekV41Model(
            weights,
            self.config,
            EngramTables(weights, self.config, self._tables, ops),
            activations=ActivationFormat(workload.activations, ops),
            ops=ops,
            group=self._group,
        )
        if self._group is not None:
            size = ExchangeSize.of(self.config, dims.num_new, dtype=dtype, mode=workload.activations)
            self._group.connect(device, repr(workload), size if workload.kernel_impl == "triton" else None)
        num_blocks = self.context // KV_BLOCK_SIZE
        self.cache = KVCache(
            CacheLayout(self.config, True, dtype),
            num_blocks=num_blocks,
            num_states=1,
            num_host_blocks=0,
            num_host_states=0,
            device=device,
        )
        self._batch = ScheduledBatch(chunks=[self._chunk(num_blocks)])
        self.reset()

    @property
    def num_run_layers(self) -> int:
        """Layers whose attention and experts run."""
        return self.config.decoder_start if self.workload.decoder == "mid" else self.config.num_hidden_layers

    @property
    def num_exchange_bytes(self) -> int:
        """Of the device's memory, what other ranks write to: torch's allocator does not count it."""
        peers = None if self._group is None else self._group.peers
        return 0 if peers is None else peers.num_bytes

    def reset(self) -> None:
        """The cache as the first step finds it: everything in it is drawn from the seed."""
        generator = torch.Generator(self.device).manual_seed(self._seed)
        head, index = self.config.head_dim, self.config.index_head_dim
        pools = [(pool, "entries", head) for pool in self.cache.entries.values()]
        pools += [(pool, "index_keys", index) for pool in self.cache.index_keys.values()]
        pools += [(pool, "windows", head) for pool in self.cache.windows]
        for pool, kind, width in pools:
            for part in pool.split(8192):
                drawn = torch.randn(len(part), width, generator=generator, device=self.device)
                part.copy_(PACKERS[kind](drawn))
        for groups in self.cache.open_groups.values():
            groups.normal_(generator=generator)

    @torch.inference_mode()
    def step(self, trace: Trace | None = None) -> Tensor:
        """One step as the engine runs it, index tensors included; fp32 logits of the sampled rows."""
        batch = BatchInputs(self._batch, self._shape, self._tables, self.device, num_states=1)
        if self._group is not None:
            self._group.agree([layer.output_rows.num_padded for layer in batch.layers], has_work=True)
        return self._model.forward(batch, self.cache, trace)

    def leave(self) -> None:
        """No step will follow."""
        if self._group is not None:
            self._group.disconnect()

    def output_hashes(self) -> dict[str, str]:
        """Of each layer's attention output, routes and streams, in a step from a fresh cache."""
        hashes: dict[str, str] = {}

        def trace(name: str, value: Tensor) -> None:
            kind, _, layer = name.rpartition(".layer")
            if kind in ("attn_out", "route_ids", "streams", "topk"):
                hashes[f"layer {int(layer):2} {kind}"] = digest(value)

        self.reset()
        self.step(trace)
        return hashes

    def cache_hashes(self) -> dict[str, str]:
        """Of everything that the last step left in the cache."""
        cache = self.cache
        hashes = {f"cache {layer:2} window": digest(ring) for layer, ring in enumerate(cache.windows)}
        for kind, pools in (("entries", cache.entries), ("index keys", cache.index_keys)):
            hashes |= {f"cache {source:2} {kind}": digest(pool) for source, pool in pools.items()}
        return hashes

    def _chunk(self, num_blocks: int) -> ScheduledChunk:
        """The last rows of the context, its blocks scattered over the pool."""
        rng = np.random.default_rng(self._seed)
        ids = rng.integers(10, self.config.vocab_size, self.context).tolist()
        seq = Sequence.build(
            Request(request_id="chunk", prompt_token_ids=ids), sample_index=0, seq_id=0, max_model_len=1 << 20
        )
        seq.state_slot, seq.block_table = 0, array("q", rng.permutation(num_blocks).tolist())
        is_full = self.workload.decoder == "full"
        return ScheduledChunk(
            seq=seq,
            start=self.context - self.num_new,
            num_tokens=self.num_new,
            tail_end=self.context if is_full else 2 * self.context,
            cached_until=0,
            mode="full" if is_full else "exact",
            samples=is_full,
        )


def fold_routes(route_tokens: Callable[..., Routes], num_local: int) -> Callable[..., Routes]:
    """Routing among all experts, then onto the local ones: these get the rows of the whole group."""

    def route_folded(*args: Any, **options: Any) -> Routes:
        routes = route_tokens(*args, **options)
        return routes._replace(expert_ids=routes.expert_ids % num_local)

    return route_folded


def _ngram_tables(config: DeepseekV41Config, bucket_rows: int, seed: int) -> NgramTables:
    """Tables of the real form over buckets of one size: hashing needs no tokenizer and few rows."""
    rng = np.random.default_rng([seed, 1])
    layers, size = len(config.engram_layer_ids), config.engram_max_ngram_size
    shape = (layers, size - 1, config.engram_n_heads)
    text = {"engram_max_ngram_size": size, "engram_n_heads": config.engram_n_heads}
    offsets = np.arange(num_buckets(text), dtype=np.int64) * bucket_rows
    return NgramTables(
        token_classes=rng.integers(0, config.engram_compressed_vocab_size, config.vocab_size),
        pad_class=0,
        multipliers=rng.integers(1, 2**40, (layers, size), dtype=np.int64) * 2 + 1,
        primes=np.full(shape, bucket_rows, dtype=np.int64),
        offsets=np.broadcast_to(offsets.reshape(shape[1:]), shape).copy(),
    )

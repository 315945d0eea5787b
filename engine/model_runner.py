"""One step on the device: moves, the forward pass, logits; of one rank, in step with its group.

It loads the model, sizes its memory and runs what the scheduler planned; it decides nothing.
"""

from __future__ import annotations

import logging
import platform
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from tokenizers import Tokenizer
from torch import Tensor

from engine.auto_settings import resolve_dtype, resolve_kernel_impl
from engine.batch import BatchInputs
from engine.config import (
    EngineConfig,
    MemoryFacts,
    ReplicaPlace,
    ResolvedConfig,
    resolve_block_counts,
    resolve_max_model_len,
)
from engine.decode_graphs import DecodeGraphs
from engine.engram_tables import EngramTables
from engine.errors import ConfigError
from engine.kv_cache import CacheLayout, KVCache
from engine.layer_rows import ModelShape
from engine.layers.linear import ActivationFormat
from engine.layers.ngrams import build_ngram_tables
from engine.layers.ops import Ops, build_ops
from engine.loader import WeightReader
from engine.memory import MemoryEstimate, estimate_memory
from engine.models.deepseek_v41 import DeepseekV41Model, Trace
from engine.models.deepseek_v41_config import DeepseekV41Config
from engine.node_memory import available_bytes
from engine.parallel import ExpertGroup
from engine.peer_memory import ExchangeSize
from engine.scheduled_batch import ScheduledBatch
from kernels.number_formats import ActivationMode

logger = logging.getLogger(__name__)

CPU_CACHE_BYTES = 2 << 30
"""What KV blocks may take on a CPU rank, which is for tests and demonstrations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choices:
    """What "auto" is on this device and for this model, settled before anything is loaded."""

    device: Literal["cpu", "cuda"]
    device_name: str
    dtype: Literal["float32", "bfloat16"]
    activations: ActivationMode
    kernel_impl: Literal["torch", "triton"]

    @property
    def torch_dtype(self) -> torch.dtype:
        """``dtype`` as torch has it."""
        found: torch.dtype = getattr(torch, self.dtype)
        return found


class ModelRunner:
    """The model, its cache, and ``run``."""

    def __init__(
        self,
        config: EngineConfig,
        model_config: DeepseekV41Config,
        tokenizer: Tokenizer,
        place: ReplicaPlace | None = None,
    ) -> None:
        device = _resolve_device(config)
        # By its number: a thread that did not choose a device means another one by "cuda".
        self.device = torch.device(f"cuda:{torch.cuda.current_device()}" if device == "cuda" else device)
        if device == "cpu":
            # One thread: a second one changes the order in which a product is summed.
            torch.set_num_threads(1)
        chosen = _choose(config, model_config, self.device)
        self.model_config = model_config
        self.shape = ModelShape(
            num_layers=model_config.num_hidden_layers,
            window=model_config.sliding_window,
            decoder_start=model_config.decoder_start,
        )
        self._tables = build_ngram_tables(model_config, tokenizer) if model_config.engram_layer_ids else None
        self.group = _build_group(place, model_config)
        self._plan = self._plan_memory(config)
        self.engram_tables: EngramTables | None = None
        ops = build_ops(chosen.kernel_impl)
        self.model = self._load_model(config, chosen, ops)
        if self.group is not None:
            self._connect(self.group, config, chosen)
        self.layout = CacheLayout(model_config, config.cache_quantisation == "release", chosen.torch_dtype)
        self.resolved = self._resolve(config, chosen)
        logger.info("%s", self._plan.describe(self.resolved.num_kv_blocks))
        self.cache = KVCache(
            self.layout,
            num_blocks=self.resolved.num_kv_blocks,
            num_states=config.max_num_seqs,
            num_host_blocks=self.resolved.num_host_kv_blocks,
            num_host_states=self.resolved.num_host_states,
            device=self.device,
            copy_rows=ops.copy_rows,
        )
        self.decode_graphs: DecodeGraphs | None = None
        if self.resolved.cuda_graphs:
            self.decode_graphs = DecodeGraphs(
                self.model,
                self.cache,
                self.shape,
                self._tables,
                self.device,
                max_num_rows=config.max_num_batched_tokens,
                group=self.group,
            )

    def _plan_memory(self, config: EngineConfig) -> MemoryEstimate:
        """What will be held where, before anything is loaded."""
        is_gpu = self.device.type == "cuda"
        ranks = 1 if self.group is None else self.group.size
        allowed = _allowed_bytes(self.device, config) if is_gpu else None
        return estimate_memory(config, is_gpu=is_gpu, num_expert_ranks=ranks, allowed_bytes=allowed)

    def _load_model(self, config: EngineConfig, chosen: _Choices, ops: Ops) -> DeepseekV41Model:
        """The model on the device, with this rank's share of the experts; n-gram tables where they fit."""
        reader = WeightReader(
            config.model,
            dtype=chosen.torch_dtype,
            device=self.device,
            keeps_quantised=ops.reads_quantised,
            local_experts=None if self.group is None else self.group.own_experts,
        )
        plan = self._plan
        if self._tables is not None:
            self.engram_tables = EngramTables(
                reader,
                self.model_config,
                self._tables,
                ops,
                place=plan.engram,
                max_num_rows=config.max_num_batched_tokens,
                may_share=lambda: config.engram == "host" or _host_has_room(plan, config),
            )
            if self.engram_tables.place != plan.engram:
                reason = f"{plan.engram_reason}, and the host has no room"
                self._plan = replace(plan, engram=self.engram_tables.place, engram_reason=reason)
        return DeepseekV41Model(
            reader,
            self.model_config,
            self.engram_tables,
            activations=ActivationFormat(chosen.activations, ops),
            ops=ops,
            group=self.group,
        )

    def _connect(self, group: ExpertGroup, config: EngineConfig, chosen: _Choices) -> None:
        """Meet the other ranks, which must have the same model and settings."""
        mode = chosen.activations
        settings: list[object] = [
            self.model_config,
            chosen.dtype,
            chosen.device_name,
            chosen.kernel_impl,
            mode,
        ]
        settings += [config.cache_quantisation, config.max_num_batched_tokens]
        size = ExchangeSize.of(
            self.model_config, config.max_num_batched_tokens, dtype=chosen.torch_dtype, mode=mode
        )
        group.connect(self.device, repr(settings), size if chosen.kernel_impl == "triton" else None)

    def _resolve(self, config: EngineConfig, chosen: _Choices) -> ResolvedConfig:
        """The settings as they are, now that it is known what the cache may take."""
        facts = MemoryFacts(
            num_bytes_per_block=self.layout.num_bytes_per_block,
            num_bytes_per_state=self.layout.num_bytes_per_state,
            cache_bytes=self._cache_bytes(config),
        )
        max_model_len = resolve_max_model_len(config, model_max_len=self.model_config.max_position_embeddings)
        num_blocks, num_host_blocks, num_host_states = resolve_block_counts(
            config, facts, max_model_len=max_model_len
        )
        return ResolvedConfig(
            model=config.model,
            dtype=chosen.dtype,
            device=chosen.device,
            device_name=chosen.device_name,
            kernel_impl=chosen.kernel_impl,
            activation_quantisation=chosen.activations,
            cache_quantisation=config.cache_quantisation,
            exchange="none" if self.group is None else self.group.path,
            engram=self._plan.engram,
            cuda_graphs=config.cuda_graphs and chosen.device == "cuda" and chosen.kernel_impl == "triton",
            max_model_len=max_model_len,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            num_kv_blocks=num_blocks,
            num_host_kv_blocks=num_host_blocks,
            num_host_states=num_host_states,
            enable_prefix_caching=config.enable_prefix_caching,
            decoder_prefill=config.decoder_prefill,
            preemption=config.preemption,
            max_num_preemptions=config.max_num_preemptions,
            seed=config.seed,
        )

    @property
    def is_read_ahead(self) -> bool:
        """Whether ``look_ahead`` does anything."""
        return self.engram_tables is not None and self.engram_tables.is_read_ahead

    def look_ahead(self, spans: Sequence[tuple[list[int], int, int]]) -> None:
        """Tokens, and which of them [start, end) the next step will likely run, while this one runs."""
        if self.engram_tables is not None:
            self.engram_tables.look_ahead(spans)

    @torch.inference_mode()
    def run(self, batch: ScheduledBatch, trace: Trace | None = None) -> Tensor:
        """Carry out the step; fp32 logits [num_samples, vocab] of the chunks that sample, in order."""
        self.cache.apply(batch.moves_before)
        graphs = self.decode_graphs
        if graphs is not None and trace is None and graphs.can_run(batch):
            logits = graphs.run(batch)
        else:
            logits = self._run_packed(batch, trace)
        self.cache.apply(batch.moves_after)
        return logits

    def _run_packed(self, batch: ScheduledBatch, trace: Trace | None) -> Tensor:
        """A step of any rows."""
        inputs = BatchInputs(batch, self.shape, self._tables, self.device, num_states=self.cache.num_states)
        if self.group is not None:
            self.group.agree([layer.output_rows.num_padded for layer in inputs.layers], has_work=True)
        return self.model.forward(inputs, self.cache, trace)

    def await_device(self) -> None:
        """Until all that was asked of the device is done; raises ``RuntimeError`` for what failed."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @torch.inference_mode()
    def join(self) -> None:
        """A step of the group in which this rank has nothing of its own to run."""
        assert self.group is not None, "only a rank among others joins a step"
        self.group.agree([0] * self.shape.num_layers, has_work=False)
        self.model.join()

    def _cache_bytes(self, config: EngineConfig) -> int:
        """Bytes for KV blocks: on a GPU what weights, rings and a step's scratch leave of the allowance."""
        if self.device.type == "cpu":
            return CPU_CACHE_BYTES
        scratch = self._plan.num_scratch_bytes + self._plan.num_graph_bytes
        if self._plan.engram == "host":
            scratch += self._plan.num_staging_bytes  # rows from files have their place already
        if self.group is not None and self.group.peers is not None:
            scratch -= self.group.peers.num_bytes  # taken when the ranks met
        rings = config.max_num_seqs * self.layout.num_bytes_per_state
        return _allowed_bytes(self.device, config) - scratch - rings


def _allowed_bytes(device: torch.device, config: EngineConfig) -> int:
    """What this process may still take of its GPU."""
    free, total = torch.cuda.mem_get_info(device)
    return int(free - (1 - config.gpu_memory_utilization) * total)


def _host_has_room(plan: MemoryEstimate, config: EngineConfig) -> bool:
    """For tables, the KV cache's own host memory, and a quarter more, since this is not the only process."""
    return 1.25 * (plan.num_table_bytes + config.host_memory_bytes) <= available_bytes()


def _resolve_device(config: EngineConfig) -> Literal["cpu", "cuda"]:
    if config.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("engine.device is cuda, but this machine has no usable GPU")
    return config.device


def _choose(config: EngineConfig, model_config: DeepseekV41Config, device: torch.device) -> _Choices:
    activations = config.activation_quantisation
    if activations == "auto":
        activations = "release" if model_config.is_quantised else "none"
    is_gpu = device.type == "cuda"
    return _Choices(
        kernel_impl=resolve_kernel_impl(config, model_config, is_gpu=is_gpu),
        device="cuda" if is_gpu else "cpu",
        device_name=_device_name(device),
        dtype=resolve_dtype(config, model_config),
        activations=activations,
    )


def _build_group(place: ReplicaPlace | None, model_config: DeepseekV41Config) -> ExpertGroup | None:
    """The ranks that this one shares the experts with, if there are any."""
    if place is None or place.num_ranks <= 1:
        return None
    return ExpertGroup(
        place, num_experts=model_config.n_routed_experts, num_layers=model_config.num_hidden_layers
    )


def _device_name(device: torch.device) -> str:
    """The GPU's name; of a CPU the model and the instruction set that torch picks its kernels by."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return f"{next(models, platform.machine())}, {torch.backends.cpu.get_cpu_capability()}"

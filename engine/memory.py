"""What an engine will take of a device's memory, from files' headers alone.

Owns the estimate that a job's plan shows before any device is there; the loader and the cache have the
last word. Imports neither torch nor triton.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from engine.auto_settings import needs_gpu, resolve_dtype, resolve_kernel_impl
from engine.checkpoint import StoredTensor, is_ignored, read_checkpoint
from engine.config import (
    KV_BLOCK_SIZE,
    EngineConfig,
    MemoryFacts,
    TablePlace,
    resolve_block_counts,
    resolve_max_model_len,
)
from engine.decode_rooms import GRAPH_BYTES_A_LAYER, MAX_GRAPHS, most_room_rows, room_bytes
from engine.errors import ConfigError
from engine.models.deepseek_v41_config import DeepseekV41Config, load_model_config

_TABLES = (".engram.embed.weight", ".engram.embed.scale")  # looked up as stored, never multiplied
_KEPT_IN_FLOAT32 = ("head.weight", ".gate.weight", "_fn", ".engram.q_weight", ".engram.k_weight")
_NOT_KEPT = (".gate.bias_vl",)  # of image tokens
_EXPERT = re.compile(r"\.experts\.\d+\.")
_QUANTISED = {"F8_E4M3", "F8_E8M0", "I8"}
_LEAST_SELECTION_BYTES = 16 << 20
_ITEM_BYTES = {"float32": 4, "bfloat16": 2}
_ENTRY_BLOCK, _SCALE_BLOCK = 16, 32  # values that share a scale: of a cached entry, of all else


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Bytes on one rank's device. ``num_checkpoint_bytes`` are the text model's on disk.

    ``num_weight_bytes`` are those as loaded but for the n-gram tables, ``num_scratch_bytes`` a step's
    activations, about, ``num_graph_bytes`` what captured decode steps keep. ``engram`` is where the tables
    lie, ``engram_reason`` why: if on the "gpu", they take ``num_table_bytes`` of it, else
    ``num_staging_bytes``, for a step's rows.
    ``num_bytes_per_block`` holds 64 tokens, ``num_state_bytes`` the states of ``max_num_seqs`` rows.
    """

    dtype: str
    max_model_len: int
    num_checkpoint_bytes: int
    num_weight_bytes: int
    num_scratch_bytes: int
    num_graph_bytes: int
    num_state_bytes: int
    num_bytes_per_block: int
    engram: TablePlace
    engram_reason: str
    num_table_bytes: int
    num_staging_bytes: int

    @property
    def num_blocks_per_longest(self) -> int:
        """KV blocks of one sequence of full length: with fewer, an engine does not start."""
        return -(-self.max_model_len // KV_BLOCK_SIZE)

    @property
    def num_fixed_bytes(self) -> int:
        """All but the KV blocks."""
        tables = self.num_table_bytes if self.engram == "gpu" else self.num_staging_bytes
        steps = self.num_scratch_bytes + self.num_graph_bytes
        return self.num_weight_bytes + tables + steps + self.num_state_bytes

    @property
    def num_least_bytes(self) -> int:
        """What has to be there for one sequence of full length."""
        return self.num_fixed_bytes + self.num_blocks_per_longest * self.num_bytes_per_block

    def describe(self, num_kv_blocks: int | None) -> str:
        """All of it in one line, for a log or a plan."""
        blocks = "" if num_kv_blocks is None else f" {_gib(num_kv_blocks * self.num_bytes_per_block)},"
        places = {"gpu": "on the device", "host": "in host memory, once a node", "mmap": "in their files"}
        tables = f" n-gram tables {_gib(self.num_table_bytes)} {places[self.engram]} ({self.engram_reason}),"
        return (
            f"memory of a rank: weights {_gib(self.num_weight_bytes)} in {self.dtype} "
            f"({_gib(self.num_checkpoint_bytes)} on disk with tables),"
            f"{tables if self.num_table_bytes else ''} states {_gib(self.num_state_bytes)}, "
            f"a step {_gib(self.num_scratch_bytes)}, graphs {_gib(self.num_graph_bytes)}, "
            f"KV{blocks} {self.num_bytes_per_block} bytes for {KV_BLOCK_SIZE} tokens; "
            f"at least {_gib(self.num_least_bytes)}"
        )

    def num_kv_blocks(self, config: EngineConfig, device_bytes: int) -> int:
        """How many blocks an engine takes on a device of that size. Raises ``ConfigError`` if too few fit."""
        facts = MemoryFacts(
            num_bytes_per_block=self.num_bytes_per_block,
            num_bytes_per_state=self.num_state_bytes // config.max_num_seqs,
            cache_bytes=int(config.gpu_memory_utilization * device_bytes) - self.num_fixed_bytes,
        )
        return resolve_block_counts(config, facts, max_model_len=self.max_model_len)[0]


def estimate_memory(
    config: EngineConfig,
    *,
    is_gpu: bool | None = None,
    num_expert_ranks: int = 1,
    allowed_bytes: int | None = None,
) -> MemoryEstimate:
    """Read the model folder's config and its safetensors headers.

    Raises ``ConfigError``, also for settings that an engine could not have with this model and device.
    ``is_gpu`` says whether "auto" settings are answered for a GPU; None: where a setting asks for one.
    Each of ``num_expert_ranks`` holds its share of every layer's routed experts, and all of the rest.
    ``allowed_bytes`` is what a rank may take of its device, None where that is not known. Of host memory
    nothing is known here: n-gram tables that the device does not hold are thought to fit there.
    """
    model = load_model_config(config.model)
    dtype = resolve_dtype(config, model)
    on_gpu = needs_gpu(config) is not None if is_gpu is None else is_gpu
    has_kernels = resolve_kernel_impl(config, model, is_gpu=on_gpu) == "triton"
    checkpoint = read_checkpoint(config.model)
    tensors = [tensor for tensor in checkpoint.values() if not is_ignored(tensor.name)]
    pooled = {name.replace(".wgate.", ".wkv.") for name in checkpoint if name.endswith(".wgate.weight")}

    def loaded_bytes(tensor: StoredTensor) -> int:
        found = _num_loaded_bytes(
            tensor,
            _ITEM_BYTES[dtype],
            has_kernels,
            is_pooled=tensor.name.replace(".wgate.", ".wkv.") in pooled,
        )
        return found // num_expert_ranks if _EXPERT.search(tensor.name) else found

    def scratch(num_rows: int) -> int:
        return _step_scratch_bytes(
            model, config, num_rows, num_expert_ranks=num_expert_ranks, item_bytes=_ITEM_BYTES[dtype]
        )

    if model.n_routed_experts % num_expert_ranks:
        raise ConfigError(
            f"{model.n_routed_experts} experts cannot be split evenly among {num_expert_ranks} ranks"
        )
    max_model_len = resolve_max_model_len(config, model_max_len=model.max_position_embeddings)
    block_bytes, state_bytes = _cache_bytes(model, config, _ITEM_BYTES[dtype])
    tables = [tensor for tensor in tensors if tensor.name.endswith(_TABLES)]
    found = MemoryEstimate(
        dtype=dtype,
        max_model_len=max_model_len,
        num_checkpoint_bytes=sum(tensor.num_bytes for tensor in tensors),
        num_weight_bytes=sum(map(loaded_bytes, tensors)),
        num_scratch_bytes=scratch(config.max_num_batched_tokens),
        num_graph_bytes=0,
        num_state_bytes=config.max_num_seqs * state_bytes,
        num_bytes_per_block=block_bytes,
        engram="gpu",
        engram_reason="as asked",
        num_table_bytes=sum(tensor.num_bytes for tensor in tables),
        num_staging_bytes=0,
    )
    if config.cuda_graphs and on_gpu and has_kernels:
        most_rows = most_room_rows(config.max_num_seqs, config.max_num_batched_tokens)
        launches = MAX_GRAPHS * model.num_hidden_layers * GRAPH_BYTES_A_LAYER
        rooms = room_bytes(most_rows, max_model_len) + most_rows * _room_row_bytes(model, _ITEM_BYTES[dtype])
        found = replace(found, num_graph_bytes=launches + scratch(most_rows) + rooms)
    place, reason = _place_of_tables(config, found, allowed_bytes, on_gpu=on_gpu, has_kernels=has_kernels)
    staging = staging_bytes(model, config, place, _ITEM_BYTES[dtype], tables) if on_gpu else 0
    return replace(found, engram=place, engram_reason=reason, num_staging_bytes=staging)


def _place_of_tables(
    config: EngineConfig,
    on_device: MemoryEstimate,
    allowed_bytes: int | None,
    *,
    on_gpu: bool,
    has_kernels: bool,
) -> tuple[TablePlace, str]:
    """Where n-gram tables go, and why; ``on_device`` is the estimate with them there.

    Raises ``ConfigError`` where they could not be read.
    """
    if config.engram == "host" and on_gpu and not has_kernels and on_device.num_table_bytes:
        raise ConfigError("engine.engram is host, which on a GPU needs engine.kernel_impl triton")
    if config.engram != "auto":
        return config.engram, on_device.engram_reason
    if not on_gpu:
        return "mmap", "a CPU reads them there"
    if allowed_bytes is None or on_device.num_least_bytes <= allowed_bytes:
        return "gpu", "it has room"
    if has_kernels:
        return "host", f"with them a rank needs {_gib(on_device.num_least_bytes)} of its device"
    return "mmap", "no room on the device, and only kernels read host memory"


def staging_bytes(
    model: DeepseekV41Config,
    config: EngineConfig,
    place: TablePlace,
    item_bytes: int,
    tables: Sequence[StoredTensor],
) -> int:
    """What rows of n-gram tables that are on their way take of a device: as stored, or looked up already."""
    num_lookups = (model.engram_max_ngram_size - 1) * model.engram_n_heads * config.max_num_batched_tokens
    if place == "gpu":
        return 0
    if place == "host":
        return len(model.engram_layer_ids) * num_lookups * model.engram_head_dim * item_bytes
    return sum(num_lookups * (tensor.num_bytes // tensor.shape[0]) for tensor in tables)


def _room_row_bytes(model: DeepseekV41Config, item_bytes: int) -> int:
    """Of a row of the largest room: what its n-grams look up, and its streams with what collapses them."""
    num_lookups = (model.engram_max_ngram_size - 1) * model.engram_n_heads * len(model.engram_layer_ids)
    streams = model.hc_mult * (model.hidden_size * item_bytes + 4)
    return num_lookups * model.engram_head_dim * item_bytes + streams


def check_settings(config: EngineConfig) -> None:
    """Raises ``ConfigError`` for a length, dtype or kernels that the model cannot have on that device."""
    model = load_model_config(config.model)
    resolve_max_model_len(config, model_max_len=model.max_position_embeddings)
    resolve_dtype(config, model)
    if config.device != "auto":
        resolve_kernel_impl(config, model, is_gpu=config.device == "cuda")


def count_experts(model_folder: str) -> int:
    """How many routed experts each layer of a model has. Raises ``ConfigError``."""
    return load_model_config(model_folder).n_routed_experts


def _step_scratch_bytes(
    model: DeepseekV41Config, config: EngineConfig, num_rows: int, *, num_expert_ranks: int, item_bytes: int
) -> int:
    """What a step of so many rows takes beside weights and caches; the context's length does not matter.

    The most of what the three large sublayers hold at once beside the residual streams, as kernels run them.
    """
    k, hidden = model.hc_mult, model.hidden_size
    heads = model.num_attention_heads * model.head_dim
    selected = 12 * model.index_topk + 8 * model.candidate_topk_blocks
    # Queries, rotated ones, what they attend to, and which entries.
    attention = (2 * hidden + 3 * heads + model.q_lora_rank) * item_bytes + selected
    # Every slot's sorted rows in and out, and what is between the products, in order and sorted.
    slots = model.num_experts_per_tok * (2 * hidden + 2 * model.moe_intermediate_size)
    experts = (2 * hidden + slots) * item_bytes
    most = max(num_rows * attention, num_rows * experts)
    if model.engram_layer_ids:
        width = (model.engram_max_ngram_size - 1) * model.engram_n_heads * model.engram_head_dim
        keys_and_value = (k + 1) * hidden
        engram = num_rows * ((width + keys_and_value) * item_bytes + width)
        if config.activation_quantisation != "row":
            engram += keys_and_value * width * item_bytes  # the model's largest weight, widened
        most = max(most, engram)
    # Scores are computed tile by tile, in the room of three fp32 copies of the queries.
    selection = max(12 * num_rows * model.index_n_heads * model.index_head_dim, _LEAST_SELECTION_BYTES)
    exchange = _exchange_bytes(model, num_rows, num_expert_ranks, item_bytes)
    return num_rows * k * hidden * item_bytes + max(most, selection) + exchange


def _exchange_bytes(model: DeepseekV41Config, num_rows: int, num_ranks: int, item_bytes: int) -> int:
    """Of a layer's exchange: all ranks' rows sorted, outputs sent and received, own ones.

    Ranks that write into each other's memory take less: they receive outputs of own rows alone.
    """
    if num_ranks == 1:
        return 0
    return (3 * num_ranks + 1) * num_rows * model.num_experts_per_tok * model.hidden_size * item_bytes


def _num_loaded_bytes(tensor: StoredTensor, item_bytes: int, has_kernels: bool, *, is_pooled: bool) -> int:
    """As the loader keeps it: what kernels read is as stored, else products' weights are in its dtype.

    ``is_pooled``: a compressor's weight that is multiplied in float32.
    """
    name = tensor.name
    if name.endswith((*_NOT_KEPT, *_TABLES)):
        return 0
    if has_kernels and tensor.dtype in _QUANTISED:
        return tensor.num_bytes
    if tensor.dtype == "F8_E8M0":
        return 0
    num_elements = math.prod(tensor.shape) * (2 if tensor.dtype == "I8" else 1)
    if has_kernels and (is_pooled or name == "head.weight") and tensor.dtype == "BF16":
        return tensor.num_bytes
    if has_kernels and item_bytes == 2 and name.endswith((".gate.weight", "_fn")):
        # As bfloat16 pieces, three of a float32 number.
        return num_elements * (2 if tensor.dtype == "BF16" else 6)
    is_float32 = is_pooled or len(tensor.shape) < 2 or name.endswith(_KEPT_IN_FLOAT32)
    return num_elements * (4 if is_float32 else item_bytes)


def _cache_bytes(model: DeepseekV41Config, config: EngineConfig, item_bytes: int) -> tuple[int, int]:
    """(bytes of a KV block, of a sequence's state); the widths of the model page's section 14."""
    head, index = model.head_dim, model.index_head_dim
    if config.cache_quantisation == "release":
        entry = head // 2 + head // _ENTRY_BLOCK + index // 2 + index // _SCALE_BLOCK
        window = head + head // _SCALE_BLOCK
    else:
        entry, window = (head + index) * item_bytes, head * item_bytes
    num_entries = sum(KV_BLOCK_SIZE // model.compress_ratios[s] for s in model.kv_source_layer_ids)
    num_open = sum(model.compress_ratios[s] - 1 for s in model.kv_source_layer_ids)
    state = model.num_hidden_layers * model.sliding_window * window + num_open * 2 * head * 4
    return num_entries * entry, state


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"

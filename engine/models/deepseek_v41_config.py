"""The release's ``config.json`` as a checked, frozen object; the model page's section 1.

Every field the engine relies on is read here and nowhere else. A value the engine does not
implement is refused by name, never ignored. Imports neither torch nor triton.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.config import KV_BLOCK_SIZE
from engine.errors import ConfigError

ARCHITECTURE = "DeepseekV41ForCausalLM"

_REQUIRED_VALUES: dict[str, Any] = {
    "num_key_value_heads": 1,
    "hidden_act": "silu",
    "n_shared_experts": 1,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}
_REQUIRED_QUANTISATION: dict[str, Any] = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [32, 32],
    "scale_fmt": "ue8m0",
    "expert_dtype": "fp4",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekV41Config:
    """Field names are the release's, but for ``ngram`` and ``yarn_*`` groups spelt out."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    rope_theta: float
    compress_rope_theta: float
    yarn_factor: float
    yarn_beta_fast: float
    yarn_beta_slow: float
    yarn_original_max_position_embeddings: int
    max_position_embeddings: int
    sliding_window: int
    compress_ratios: tuple[int, ...]
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    candidate_source_layer_id: int | None
    candidate_topk_blocks: int
    candidate_block_size: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    n_routed_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    routed_scaling_factor: float
    swiglu_limit: float
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    rms_norm_eps: float
    engram_layer_ids: tuple[int, ...]
    engram_num_embeddings: tuple[int, ...]
    engram_vocab_size: int
    engram_max_ngram_size: int
    engram_n_heads: int
    engram_head_dim: int
    engram_pad_token_id: int
    engram_compressed_vocab_size: int
    bos_token_id: int
    eos_token_id: int
    dtype: str
    is_quantised: bool

    def kv_source_of(self, layer: int) -> int | None:
        """The KV source whose entries ``layer`` attends to; None for a window-only layer."""
        if self.compress_ratios[layer] == 0:
            return None
        return max(source for source in self.kv_source_layer_ids if source <= layer)

    def is_reindex(self, layer: int) -> bool:
        """Whether an index source scores only the candidate source's kept blocks."""
        source = self.candidate_source_layer_id
        return (
            source is not None
            and layer > source
            and layer in self.index_source_layer_ids
            and self.kv_source_of(layer) == source
        )

    @property
    def decoder_start(self) -> int:
        """The last KV source: no later layer owns state that grows with the context."""
        return max(self.kv_source_layer_ids, default=0)


def load_model_config(folder: str | Path) -> DeepseekV41Config:
    """Read and check ``folder/config.json``. Raises ``ConfigError``."""
    path = Path(folder) / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"model folder {folder} has no config.json") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    return parse_model_config(raw)


def parse_model_config(raw: Mapping[str, Any]) -> DeepseekV41Config:
    """Check a decoded ``config.json``. Raises ``ConfigError`` naming the field."""
    architectures = raw.get("architectures") or []
    if ARCHITECTURE not in architectures:
        raise ConfigError(f"architectures is {architectures}, supported is [{ARCHITECTURE!r}]")
    text = raw.get("text_config")
    if not isinstance(text, Mapping):
        raise ConfigError("config.json has no text_config")
    _check_values(text, _REQUIRED_VALUES, "text_config")
    quantisation = raw.get("quantization_config")
    if quantisation is not None:
        _check_values(quantisation, _REQUIRED_QUANTISATION, "quantization_config")
    config = DeepseekV41Config(
        **_plain_fields(text),
        **_yarn_fields(text),
        bos_token_id=raw.get("bos_token_id", 0),
        eos_token_id=raw.get("eos_token_id", 1),
        dtype=raw.get("dtype", "bfloat16"),
        is_quantised=quantisation is not None,
    )
    _check_layers(config)
    _check_sizes(config)
    return config


def _check_values(actual: Mapping[str, Any], required: Mapping[str, Any], where: str) -> None:
    for name, value in required.items():
        if name in actual and actual[name] != value:
            raise ConfigError(f"{where}.{name} is {actual[name]!r}, supported is {value!r}")


_DERIVED = {"bos_token_id", "eos_token_id", "dtype", "is_quantised"}


def _plain_fields(text: Mapping[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name in DeepseekV41Config.__dataclass_fields__:
        if name in _DERIVED or name.startswith("yarn_"):
            continue
        if name == "candidate_source_layer_id":
            values[name] = text.get(name)
        elif name not in text:
            raise ConfigError(f"text_config.{name} is missing")
        else:
            values[name] = tuple(text[name]) if isinstance(text[name], list) else text[name]
    layers = values["num_hidden_layers"]
    # The list goes on for the draft layers, which text generation does not run.
    values["compress_ratios"] = values["compress_ratios"][:layers]
    return values


def _yarn_fields(text: Mapping[str, Any]) -> dict[str, Any]:
    scaling = text.get("rope_scaling")
    if not isinstance(scaling, Mapping) or scaling.get("rope_type", scaling.get("type")) != "yarn":
        raise ConfigError(f"text_config.rope_scaling is {scaling!r}, supported is rope_type 'yarn'")
    names = ("factor", "beta_fast", "beta_slow", "original_max_position_embeddings")
    missing = [name for name in names if name not in scaling]
    if missing:
        raise ConfigError(f"text_config.rope_scaling.{missing[0]} is missing")
    return {f"yarn_{name}": scaling[name] for name in names}


def _check_layers(config: DeepseekV41Config) -> None:
    ratios, layers = config.compress_ratios, config.num_hidden_layers
    if len(ratios) != layers:
        raise ConfigError(f"compress_ratios has {len(ratios)} values for {layers} layers")
    for layer, ratio in enumerate(ratios):
        if ratio < 0 or (ratio and KV_BLOCK_SIZE % ratio):
            raise ConfigError(f"compress_ratios[{layer}] is {ratio}: must be 0 or divide {KV_BLOCK_SIZE}")
        if ratio == 0:
            continue
        if not any(source <= layer for source in config.kv_source_layer_ids):
            raise ConfigError(f"layer {layer} has ratio {ratio} but no KV source at or before it")
        if ratios[config.kv_source_of(layer) or 0] != ratio:
            raise ConfigError(f"layer {layer} has ratio {ratio}, unlike its KV source")
    for source in config.kv_source_layer_ids:
        if not 0 <= source < layers or ratios[source] == 0:
            raise ConfigError(f"kv_source_layer_ids names layer {source}, which compresses nothing")
        if source not in config.index_source_layer_ids:
            raise ConfigError(f"KV source {source} is not in index_source_layer_ids")
    if any(not 0 <= source < layers or ratios[source] == 0 for source in config.index_source_layer_ids):
        raise ConfigError("index_source_layer_ids names a layer that compresses nothing")
    candidate = config.candidate_source_layer_id
    if candidate is not None and candidate not in config.kv_source_layer_ids:
        raise ConfigError(f"candidate_source_layer_id {candidate} is no KV source")
    if len(config.engram_layer_ids) != len(config.engram_num_embeddings):
        raise ConfigError("engram_num_embeddings must have one number per engram layer")
    if any(not 0 <= layer < layers for layer in config.engram_layer_ids):
        raise ConfigError(f"engram_layer_ids {config.engram_layer_ids}: outside 0..{layers - 1}")


def _check_sizes(config: DeepseekV41Config) -> None:
    if config.num_attention_heads % config.o_groups:
        raise ConfigError(f"o_groups {config.o_groups} does not divide {config.num_attention_heads} heads")
    if config.qk_rope_head_dim % 2 or config.qk_rope_head_dim > min(config.head_dim, config.index_head_dim):
        raise ConfigError(f"qk_rope_head_dim {config.qk_rope_head_dim} does not fit the heads")
    for name in ("head_dim", "index_head_dim"):
        if getattr(config, name) % 32:
            raise ConfigError(f"{name} {getattr(config, name)} is no multiple of 32, the cache's block")
    if config.is_quantised:
        # Scales cover 32 columns of a weight and 32 channels of what enters it.
        widths = {
            name: getattr(config, name) for name in ("hidden_size", "q_lora_rank", "moe_intermediate_size")
        }
        widths["o_groups * o_lora_rank"] = config.o_groups * config.o_lora_rank
        if config.engram_layer_ids:
            widths["engram_head_dim"] = config.engram_head_dim
        for name, width in widths.items():
            if width % 32:
                raise ConfigError(f"{name} {width} is no multiple of 32, the quantised layout's block")
    if config.num_experts_per_tok > config.n_routed_experts:
        raise ConfigError(f"num_experts_per_tok {config.num_experts_per_tok} exceeds the experts")
    if config.sliding_window < 1 or config.index_topk < 1:
        raise ConfigError("sliding_window and index_topk must be at least 1")
    if config.engram_layer_ids and config.engram_max_ngram_size < 2:
        raise ConfigError(f"engram_max_ngram_size {config.engram_max_ngram_size} must be at least 2")

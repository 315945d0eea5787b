"""Model configs for benchmarks that have no checkpoint: the release's dimensions, and small ones for a CPU.

It knows numbers only. Layers are cut from the end, experts to one rank's share, n-gram tables to what a card
holds; everything else is the model page's section 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.models.deepseek_v41_config import DeepseekV41Config, parse_model_config

_BOTH: dict[str, Any] = {
    "num_key_value_heads": 1,
    "hidden_act": "silu",
    "swiglu_limit": 10.0,
    "rms_norm_eps": 1e-20,
    "tie_word_embeddings": False,
    "max_position_embeddings": 1 << 20,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "n_shared_experts": 1,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "candidate_block_size": 8,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "engram_pad_token_id": 2,
}

FLASH: dict[str, Any] = _BOTH | {
    "vocab_size": 129280,
    "hidden_size": 5120,
    "moe_intermediate_size": 2304,
    "num_hidden_layers": 40,
    "num_attention_heads": 64,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1280,
    "o_lora_rank": 1024,
    "o_groups": 8,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 65536,
    },
    "n_routed_experts": 384,
    "num_experts_per_tok": 6,
    "sliding_window": 128,
    "compress_ratios": [0, 0] + [2] * 18 + [1] * 20,
    "kv_source_layer_ids": [2, 8, 14, 20],
    "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36],
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 512,
    "candidate_source_layer_id": 20,
    "candidate_topk_blocks": 2048,
    "engram_layer_ids": [1, 14],
    "engram_vocab_size": 16_000_000,
    "engram_max_ngram_size": 4,
    "engram_n_heads": 8,
    "engram_head_dim": 256,
    "engram_compressed_vocab_size": 99092,
}

SMALL: dict[str, Any] = _BOTH | {
    "vocab_size": 512,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 10,
    "num_attention_heads": 4,
    "head_dim": 64,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 32,
    "o_lora_rank": 32,
    "o_groups": 2,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 256,
    },
    "n_routed_experts": 16,
    "num_experts_per_tok": 2,
    "sliding_window": 16,
    "compress_ratios": [0, 0] + [2] * 4 + [1] * 4,
    "kv_source_layer_ids": [2, 4, 6],
    "index_source_layer_ids": [2, 4, 6, 8],
    "index_n_heads": 16,
    "index_head_dim": 32,
    "index_topk": 8,
    "candidate_source_layer_id": 6,
    "candidate_topk_blocks": 6,
    "engram_layer_ids": [1, 4],
    "engram_vocab_size": 1000,
    "engram_max_ngram_size": 3,
    "engram_n_heads": 2,
    "engram_head_dim": 32,
    "engram_compressed_vocab_size": 400,
}


@dataclass(frozen=True, slots=True)
class Dims:
    """A model's text config, and the step that is run. ``bucket_rows``: of each bucket of n-gram tables."""

    text: dict[str, Any]
    num_new: int
    num_cached: int
    bucket_rows: int


DIMS = {
    # 24 buckets of 160,000 rows of 264 bytes are 1 GB, far beyond the card's L2: rows come from HBM.
    "flash": Dims(FLASH, num_new=4096, num_cached=126_976, bucket_rows=160_000),
    "small": Dims(SMALL, num_new=64, num_cached=192, bucket_rows=300),
}


def num_buckets(text: dict[str, Any]) -> int:
    """Rows that one token looks up in one layer."""
    return int((text["engram_max_ngram_size"] - 1) * text["engram_n_heads"])


def rank_config(dims: Dims, *, num_layers: int, num_ranks: int) -> DeepseekV41Config:
    """The first ``num_layers`` layers as one of ``num_ranks`` ranks holds them. Raises ``ValueError``."""
    text = dims.text
    if not 1 <= num_layers <= text["num_hidden_layers"]:
        raise ValueError(f"layers must be 1..{text['num_hidden_layers']}, got {num_layers}")
    num_local, rest = divmod(text["n_routed_experts"], num_ranks)
    if rest or num_local < text["num_experts_per_tok"]:
        raise ValueError(f"{text['n_routed_experts']} experts cannot be held by {num_ranks} ranks")

    def cut(name: str) -> list[int]:
        return [layer for layer in text[name] if layer < num_layers]

    candidate = text["candidate_source_layer_id"]
    engram_layers = cut("engram_layer_ids")
    changed = {
        "num_hidden_layers": num_layers,
        "compress_ratios": text["compress_ratios"][:num_layers],
        "kv_source_layer_ids": cut("kv_source_layer_ids"),
        "index_source_layer_ids": cut("index_source_layer_ids"),
        "candidate_source_layer_id": candidate if candidate < num_layers else None,
        "n_routed_experts": num_local,
        "engram_layer_ids": engram_layers,
        "engram_num_embeddings": [dims.bucket_rows * num_buckets(text)] * len(engram_layers),
    }
    return parse_model_config(
        {
            "architectures": ["DeepseekV41ForCausalLM"],
            "dtype": "bfloat16",
            "text_config": text | changed,
            "quantization_config": {"quant_method": "fp8", "expert_dtype": "fp4"},
        }
    )

"""The least time that the shared step can take on one H200, stage by stage, with the formula of each.

Pure arithmetic on a config and a number of rows: no tensors. The rates are what large products and copies
reach there when the card has been busy for a while; nothing overlaps, and norms, rotation, quantisation,
routing, selection and traffic between ranks count as nothing.
"""

from __future__ import annotations

from engine.models.deepseek_v41_config import DeepseekV41Config

FP8_FLOPS = 1313e12  # an 8192^3 product with row-wise scales, sustained
BF16_FLOPS = 682e12  # an 8192^3 product, sustained
COPY_BYTES = 4.27e12  # bytes read plus written a second by a large copy

FORMULAS = {
    "indexer scoring": "2 x heads x dim x entries scored / FP8; reindex layers score kept blocks only",
    "attention core": "4 x heads x head_dim x (window + selected) x rows / BF16",
    "other attention": "2 x (wq_a, wq_b, wkv, wo_a, wo_b, index wq_b) x rows / FP8",
    "MoE": "2 x 3 x hidden x intermediate x (routed per token + 1 shared) x rows / FP8",
    "hyper-connections and norms": "a sublayer reads and writes its streams and one row, bf16 / copy",
    "engram": "2 x row width x (streams + 1) x hidden x rows / FP8, per engram layer",
}


def stage_floors_ms(
    config: DeepseekV41Config, *, num_layers: int, num_new: int, context: int
) -> dict[str, float]:
    """Milliseconds by stage: ``num_new`` rows that end at ``context``, through the first ``num_layers``."""
    layers = range(num_layers)
    indexers = [layer for layer in layers if layer in config.index_source_layer_ids]
    scored = sum(_num_scored(config, layer, num_new, context) for layer in indexers)
    keys = sum(_num_keys(config, layer, num_new, context) for layer in layers)
    engrams = sum(layer in config.engram_layer_ids for layer in layers)
    hidden, index_width = config.hidden_size, config.index_n_heads * config.index_head_dim
    projections = num_layers * _attention_weights(config) + len(indexers) * config.q_lora_rank * index_width
    experts = (config.num_experts_per_tok + 1) * 3 * hidden * config.moe_intermediate_size
    looked_up = (config.engram_max_ngram_size - 1) * config.engram_n_heads * config.engram_head_dim
    stream_bytes = num_layers * 2 * 2 * (config.hc_mult + 1) * hidden * 2
    seconds = {
        "indexer scoring": 2 * index_width * scored / FP8_FLOPS,
        "attention core": 4 * config.num_attention_heads * config.head_dim * keys / BF16_FLOPS,
        "other attention": 2 * projections * num_new / FP8_FLOPS,
        "MoE": 2 * num_layers * experts * num_new / FP8_FLOPS,
        "hyper-connections and norms": stream_bytes * num_new / COPY_BYTES,
        "engram": 2 * engrams * looked_up * (config.hc_mult + 1) * hidden * num_new / FP8_FLOPS,
    }
    return {stage: 1e3 * value for stage, value in seconds.items()}


def _attention_weights(config: DeepseekV41Config) -> int:
    hidden, heads_width = config.hidden_size, config.num_attention_heads * config.head_dim
    low = config.o_groups * config.o_lora_rank
    queries = config.q_lora_rank * (hidden + heads_width)
    return queries + config.head_dim * hidden + heads_width * config.o_lora_rank + low * hidden


def _num_visible(config: DeepseekV41Config, layer: int, num_new: int, context: int) -> list[int]:
    ratio = config.compress_ratios[layer]
    return [(position + 1) // ratio for position in range(context - num_new, context)]


def _num_scored(config: DeepseekV41Config, layer: int, num_new: int, context: int) -> int:
    visible = _num_visible(config, layer, num_new, context)
    kept = config.candidate_topk_blocks * config.candidate_block_size
    return sum(min(n, kept) for n in visible) if config.is_reindex(layer) else sum(visible)


def _num_keys(config: DeepseekV41Config, layer: int, num_new: int, context: int) -> int:
    keys = num_new * config.sliding_window
    if config.compress_ratios[layer]:
        keys += sum(min(n, config.index_topk) for n in _num_visible(config, layer, num_new, context))
    return keys

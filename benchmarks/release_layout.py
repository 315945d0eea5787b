"""The release's checkpoint as names, formats, shapes and shards; the model page's section 11.

It knows what a checkpoint holds of a text config, and nothing of the engine that loads it or of the numbers.
Vision tensors are not described there by name, and are not here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

BLOCK = 32
ITEM_BYTES = {"F32": 4, "BF16": 2, "F8_E4M3": 1, "F8_E8M0": 1, "I8": 1}


class Entry(NamedTuple):
    """One tensor, in the words of a safetensors header."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """What it takes in a file."""
        size = ITEM_BYTES[self.dtype]
        for length in self.shape:
            size *= length
        return size


def release_entries(text: Mapping[str, Any], *, num_draft_stages: int) -> list[Entry]:
    """Every tensor of a text config's checkpoint, in the order of the forward pass."""
    vocab, hidden = text["vocab_size"], text["hidden_size"]
    found = [Entry("embed.weight", "BF16", (vocab, hidden))]
    for layer in range(text["num_hidden_layers"]):
        found += _layer(text, f"layers.{layer}", layer, num_experts=text["n_routed_experts"])
    for stage in range(num_draft_stages):
        found += _layer(text, f"mtp.{stage}", None, num_experts=text["dspark_n_routed_experts"])
    if num_draft_stages:
        found += _draft_ends(text, last=num_draft_stages - 1)
    return [*found, *_bf16("norm.weight", hidden), *_bf16("head.weight", vocab, hidden)]


def release_shards(entries: Sequence[Entry]) -> dict[str, list[Entry]]:
    """File name -> its tensors: one shard a layer or stage, the ends, and the n-gram tables last."""
    groups: dict[tuple[int, str], list[Entry]] = {}
    for entry in entries:
        place = re.match(r"layers\.\d+|mtp\.\d+|vision", entry.name)
        is_table = ".engram.embed." in entry.name
        key = entry.name.rpartition(".")[0] if is_table else place[0] if place else entry.name.split(".")[0]
        groups.setdefault((is_table, "head" if key == "norm" else key), []).append(entry)
    ordered = sorted(groups.items(), key=lambda group: group[0][0])
    return {
        f"model-{number:05}-of-{len(ordered):05}.safetensors": members
        for number, (_, members) in enumerate(ordered, 1)
    }


def _layer(text: Mapping[str, Any], prefix: str, layer: int | None, *, num_experts: int) -> Iterator[Entry]:
    """A layer of the text model; ``layer`` None is a draft stage, which has a window only."""
    hidden, k = text["hidden_size"], text["hc_mult"]
    yield from _attention(text, f"{prefix}.attn", layer)
    yield from _experts(text, f"{prefix}.ffn", num_experts)
    for site in ("attn", "ffn"):
        yield from _bf16(f"{prefix}.{site}_norm.weight", hidden)
        size = 2 * k + k * k
        yield Entry(f"{prefix}.hc_{site}_fn", "F32", (size, k * hidden))
        yield Entry(f"{prefix}.hc_{site}_base", "F32", (size,))
        yield Entry(f"{prefix}.hc_{site}_scale", "F32", (3,))
    if layer in text["engram_layer_ids"]:
        yield from _engram(text, f"{prefix}.engram", text["engram_layer_ids"].index(layer))


def _attention(text: Mapping[str, Any], prefix: str, layer: int | None) -> Iterator[Entry]:
    hidden, heads, dim = text["hidden_size"], text["num_attention_heads"], text["head_dim"]
    rank, low = text["q_lora_rank"], text["o_groups"] * text["o_lora_rank"]
    index_heads, index_dim = text["index_n_heads"], text["index_head_dim"]
    yield from _fp8(f"{prefix}.wq_a", rank, hidden)
    yield from _fp8(f"{prefix}.wq_b", heads * dim, rank)
    yield from _fp8(f"{prefix}.wkv", dim, hidden)
    yield from _fp8(f"{prefix}.wo_a", low, heads * dim // text["o_groups"])
    yield from _fp8(f"{prefix}.wo_b", hidden, low)
    yield from _bf16(f"{prefix}.q_norm.weight", rank)
    yield from _bf16(f"{prefix}.kv_norm.weight", dim)
    yield Entry(f"{prefix}.attn_sink", "F32", (heads,))
    if layer in text["kv_source_layer_ids"]:
        yield from _bf16(f"{prefix}.compressor.wkv.weight", dim, hidden)
        yield from _bf16(f"{prefix}.compressor.norm.weight", dim)
        if text["compress_ratios"][layer] > 1:
            yield from _bf16(f"{prefix}.compressor.wgate.weight", dim, hidden)
        yield from _bf16(f"{prefix}.indexer.wk.weight", index_dim, dim)
        yield from _bf16(f"{prefix}.indexer.k_norm.weight", index_dim)
    if layer in text["index_source_layer_ids"]:
        yield from _fp8(f"{prefix}.indexer.wq_b", index_heads * index_dim, rank)
        yield from _bf16(f"{prefix}.indexer.weights_proj.weight", index_heads, hidden)


def _experts(text: Mapping[str, Any], prefix: str, num_experts: int) -> Iterator[Entry]:
    hidden, width = text["hidden_size"], text["moe_intermediate_size"]
    yield from _bf16(f"{prefix}.gate.weight", num_experts, hidden)
    for bias in ("bias", "bias_vl"):
        yield Entry(f"{prefix}.gate.{bias}", "F32", (num_experts,))
    for part, out, inner in (("w1", width, hidden), ("w3", width, hidden), ("w2", hidden, width)):
        for expert in range(num_experts):
            name = f"{prefix}.experts.{expert}.{part}"
            yield Entry(f"{name}.weight", "I8", (out, inner // 2))
            yield Entry(f"{name}.scale", "F8_E8M0", (out, inner // BLOCK))
        yield from _fp8(f"{prefix}.shared_experts.{part}", out, inner)


def _engram(text: Mapping[str, Any], prefix: str, index: int) -> Iterator[Entry]:
    k, hidden, dim = text["hc_mult"], text["hidden_size"], text["engram_head_dim"]
    num_rows = text["engram_num_embeddings"][index]
    yield Entry(f"{prefix}.embed.weight", "F8_E4M3", (num_rows, dim))
    yield Entry(f"{prefix}.embed.scale", "F8_E8M0", (num_rows, dim // BLOCK))
    num_lookups = (text["engram_max_ngram_size"] - 1) * text["engram_n_heads"]
    yield from _fp8(f"{prefix}.wkv", (k + 1) * hidden, num_lookups * dim)
    yield from _bf16(f"{prefix}.q_weight", k, hidden)
    yield from _bf16(f"{prefix}.k_weight", k, hidden)


def _draft_ends(text: Mapping[str, Any], *, last: int) -> Iterator[Entry]:
    """What the first and the last draft stage have besides a layer's tensors."""
    vocab, hidden, rank = text["vocab_size"], text["hidden_size"], text["dspark_markov_rank"]
    yield from _fp8("mtp.0.main_proj", hidden, 3 * hidden)
    yield from _bf16("mtp.0.main_norm.weight", hidden)
    yield from _bf16(f"mtp.{last}.norm.weight", hidden)
    yield from _bf16(f"mtp.{last}.markov_head.embed.weight", vocab, rank)
    yield from _bf16(f"mtp.{last}.markov_head.head.weight", vocab, rank)
    yield from _bf16(f"mtp.{last}.confidence_head.proj.weight", 1, hidden + rank)


def _bf16(name: str, *shape: int) -> Iterator[Entry]:
    yield Entry(name, "BF16", shape)


def _fp8(name: str, out: int, inner: int) -> Iterator[Entry]:
    yield Entry(f"{name}.weight", "F8_E4M3", (out, inner))
    yield Entry(f"{name}.scale", "F8_E8M0", (-(-out // BLOCK), -(-inner // BLOCK)))

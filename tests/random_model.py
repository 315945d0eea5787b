"""Small random checkpoints of any config of the architecture, in the bf16 and in the release's quantised layout.

It writes model folders as files for tests to load. It shares no code with the engine: names, shapes and
packing are written down here a second time.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

GRID = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True, slots=True)
class RandomModel:
    """A config in the release's form, and the seed of its weights. ``text`` overrides ``text_config``."""

    seed: int = 0
    text: dict[str, Any] = field(default_factory=dict)

    def config(self, *, is_quantised: bool) -> dict[str, Any]:
        """The whole ``config.json``."""
        text = {**DEFAULT_TEXT, **self.text}
        text["engram_num_embeddings"] = engram_row_counts(text)
        config: dict[str, Any] = {
            "architectures": ["DeepseekV41ForCausalLM"],
            "model_type": "deepseek_v41",
            "dtype": "float32",
            "bos_token_id": 0,
            "eos_token_id": 1,
            "pad_token_id": 2,
            "text_config": text,
        }
        if is_quantised:
            config["quantization_config"] = {
                "quant_method": "fp8",
                "activation_scheme": "dynamic",
                "weight_block_size": [32, 32],
                "scale_fmt": "ue8m0",
                "expert_dtype": "fp4",
            }
        return config


DEFAULT_TEXT: dict[str, Any] = {
    "model_type": "deepseek_v41_text",
    "vocab_size": 96,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 32,
    "o_lora_rank": 32,
    "o_groups": 2,
    "hidden_act": "silu",
    "swiglu_limit": 1.5,
    "rms_norm_eps": 1e-20,
    "tie_word_embeddings": False,
    "max_position_embeddings": 1024,
    "rope_theta": 10000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 256,
    },
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "sliding_window": 16,
    "compress_ratios": [0, 2, 2, 1, 1, 1],
    "compress_rope_theta": 160000,
    "kv_source_layer_ids": [1, 3],
    "index_source_layer_ids": [1, 3, 5],
    "index_n_heads": 4,
    "index_head_dim": 32,
    "index_topk": 8,
    "candidate_source_layer_id": 3,
    "candidate_topk_blocks": 6,
    "candidate_block_size": 4,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "engram_layer_ids": [1],
    "engram_max_ngram_size": 3,
    "engram_vocab_size": 100,
    "engram_n_heads": 2,
    "engram_head_dim": 32,
    "engram_pad_token_id": 2,
    "engram_compressed_vocab_size": 96,
    "num_nextn_predict_layers": 0,
}


def engram_row_counts(text: dict[str, Any]) -> list[int]:
    """Rows of each engram table: the sum of its primes, none of which is used twice."""
    used: set[int] = set()
    counts = []
    for _ in text["engram_layer_ids"]:
        total = 0
        for _ in range(text["engram_max_ngram_size"] - 1):
            prime = text["engram_vocab_size"] - 1
            for _ in range(text["engram_n_heads"]):
                prime += 1
                while prime in used or any(prime % d == 0 for d in range(2, prime)):
                    prime += 1
                used.add(prime)
                total += prime
        counts.append(total)
    return counts


def write_model(folder: Path, model: RandomModel, *, is_quantised: bool = False) -> Path:
    """Write config, tokenizer and weights; the same seed gives the same weights in both layouts.

    With ``is_quantised`` the folder ``folder / "dequantised"`` holds the same numbers in the bf16 layout
    (fp8 and mxfp4 values are exact in bf16).
    """
    text = model.config(is_quantised=False)["text_config"]
    plain, packed = {}, {}
    generator = torch.Generator().manual_seed(model.seed)
    for name, (shape, kind) in tensor_shapes(text).items():
        value = _random_tensor(name, shape, generator)
        if kind == "bf16":
            plain[name] = packed[name] = value.to(torch.bfloat16)
        elif kind == "f32":
            plain[name] = packed[name] = value
        else:
            stored, scale, exact = PACKERS[kind](value)
            packed[name], packed[name.removesuffix(".weight") + ".scale"] = stored, scale
            plain[name] = exact.to(torch.bfloat16) if is_quantised else value.to(torch.bfloat16)
    if is_quantised:
        _write_folder(folder, model.config(is_quantised=True), packed)
        _write_folder(folder / "dequantised", model.config(is_quantised=False), plain)
    else:
        _write_folder(folder, model.config(is_quantised=False), plain)
    return folder


def _write_folder(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    write_tokenizer(folder / "tokenizer.json", config["text_config"]["vocab_size"])


def write_tokenizer(path: Path, vocab_size: int) -> None:
    """A byte-level tokenizer whose token i has a text, and hence a class, of its own."""
    vocab = {token_text(i): i for i in range(vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=token_text(0)))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path))


def token_text(token_id: int) -> str:
    """The text of a token of a random model."""
    return f"w{token_id}"


def tensor_shapes(text: dict[str, Any]) -> dict[str, tuple[tuple[int, ...], str]]:
    """Every tensor of the checkpoint: its shape, and how the quantised layout stores it."""
    hidden, vocab = text["hidden_size"], text["vocab_size"]
    shapes: dict[str, tuple[tuple[int, ...], str]] = {
        "embed.weight": ((vocab, hidden), "bf16"),
        "head.weight": ((vocab, hidden), "bf16"),
        "norm.weight": ((hidden,), "bf16"),
    }
    for layer in range(text["num_hidden_layers"]):
        prefix = f"layers.{layer}"
        parts = {**_attention_shapes(text, layer), **_expert_shapes(text), **_stream_shapes(text)}
        if layer in text["engram_layer_ids"]:
            parts |= _engram_shapes(text, text["engram_layer_ids"].index(layer))
        shapes |= {f"{prefix}.{name}": part for name, part in parts.items()}
    return shapes


def _attention_shapes(text: dict[str, Any], layer: int) -> dict[str, tuple[tuple[int, ...], str]]:
    hidden, heads, dim = text["hidden_size"], text["num_attention_heads"], text["head_dim"]
    q_rank, o_rank, groups = text["q_lora_rank"], text["o_lora_rank"], text["o_groups"]
    index_heads, index_dim = text["index_n_heads"], text["index_head_dim"]
    shapes = {
        "attn_norm.weight": ((hidden,), "bf16"),
        "attn.wq_a.weight": ((q_rank, hidden), "fp8"),
        "attn.q_norm.weight": ((q_rank,), "bf16"),
        "attn.wq_b.weight": ((heads * dim, q_rank), "fp8"),
        "attn.wkv.weight": ((dim, hidden), "fp8"),
        "attn.kv_norm.weight": ((dim,), "bf16"),
        "attn.attn_sink": ((heads,), "f32"),
        "attn.wo_a.weight": ((groups * o_rank, heads * dim // groups), "fp8"),
        "attn.wo_b.weight": ((hidden, groups * o_rank), "fp8"),
    }
    if layer in text["kv_source_layer_ids"]:
        shapes["attn.compressor.wkv.weight"] = ((dim, hidden), "bf16")
        shapes["attn.compressor.norm.weight"] = ((dim,), "bf16")
        if text["compress_ratios"][layer] > 1:
            shapes["attn.compressor.wgate.weight"] = ((dim, hidden), "bf16")
        shapes["attn.indexer.wk.weight"] = ((index_dim, dim), "bf16")
        shapes["attn.indexer.k_norm.weight"] = ((index_dim,), "bf16")
    if layer in text["index_source_layer_ids"]:
        shapes["attn.indexer.wq_b.weight"] = ((index_heads * index_dim, q_rank), "fp8")
        shapes["attn.indexer.weights_proj.weight"] = ((index_heads, hidden), "bf16")
    return shapes


def _expert_shapes(text: dict[str, Any]) -> dict[str, tuple[tuple[int, ...], str]]:
    hidden, inter, experts = text["hidden_size"], text["moe_intermediate_size"], text["n_routed_experts"]
    shapes = {
        "ffn_norm.weight": ((hidden,), "bf16"),
        "ffn.gate.weight": ((experts, hidden), "bf16"),
        "ffn.gate.bias": ((experts,), "f32"),
        "ffn.gate.bias_vl": ((experts,), "f32"),
    }
    for name, kind in [("shared_experts", "fp8")] + [(f"experts.{e}", "mxfp4") for e in range(experts)]:
        shapes[f"ffn.{name}.w1.weight"] = ((inter, hidden), kind)
        shapes[f"ffn.{name}.w3.weight"] = ((inter, hidden), kind)
        shapes[f"ffn.{name}.w2.weight"] = ((hidden, inter), kind)
    return shapes


def _stream_shapes(text: dict[str, Any]) -> dict[str, tuple[tuple[int, ...], str]]:
    k, hidden = text["hc_mult"], text["hidden_size"]
    shapes = {}
    for site in ("hc_attn", "hc_ffn"):
        shapes[f"{site}_fn"] = ((2 * k + k * k, k * hidden), "f32")
        shapes[f"{site}_base"] = ((2 * k + k * k,), "f32")
        shapes[f"{site}_scale"] = ((3,), "f32")
    return shapes


def _engram_shapes(text: dict[str, Any], index: int) -> dict[str, tuple[tuple[int, ...], str]]:
    k, hidden, dim = text["hc_mult"], text["hidden_size"], text["engram_head_dim"]
    width = (text["engram_max_ngram_size"] - 1) * text["engram_n_heads"] * dim
    return {
        "engram.embed.weight": ((engram_row_counts(text)[index], dim), "fp8_rows"),
        "engram.wkv.weight": (((k + 1) * hidden, width), "fp8"),
        "engram.q_weight": ((k, hidden), "bf16"),
        "engram.k_weight": ((k, hidden), "bf16"),
    }


def _random_tensor(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Weights at a scale that keeps activations near one, so that every part of the model matters."""
    noise = torch.randn(shape, generator=generator)
    last = name.split(".")[-1] if not name.endswith(".weight") else name.split(".")[-2]
    if last.endswith("norm"):
        return 1 + 0.2 * noise
    if last.endswith("_scale"):
        return 1 + 0.1 * noise
    if last.endswith("_base") or last in ("attn_sink", "bias", "bias_vl"):
        return 0.5 * noise
    if last in ("embed", "q_weight", "k_weight"):
        return noise
    if last == "head":
        return 3 * noise * shape[-1] ** -0.5
    return 1.5 * noise * shape[-1] ** -0.5


def _exponents(amax: Tensor, largest: float) -> Tensor:
    """Smallest power of two at which ``amax`` fits, as an int exponent."""
    return torch.ceil(torch.log2(amax.clamp_min(1e-6) / largest)).to(torch.int32)


def _to_e8m0(exponents: Tensor) -> Tensor:
    return (exponents + 127).to(torch.uint8).view(torch.float8_e8m0fnu)


def pack_fp8_tiles(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[O, I] -> e4m3, one e8m0 scale a 32 x 32 tile (ragged at the ends), and the exact fp32 value."""
    rows, columns = weight.shape
    exponents = torch.empty(-(-rows // 32), -(-columns // 32), dtype=torch.int32)
    scaled = torch.empty_like(weight)
    for i in range(exponents.shape[0]):
        for j in range(exponents.shape[1]):
            tile = (slice(32 * i, 32 * i + 32), slice(32 * j, 32 * j + 32))
            exponents[i, j] = _exponents(weight[tile].abs().max(), 448.0)
            scaled[tile] = weight[tile] / 2.0 ** float(exponents[i, j])
    stored = scaled.to(torch.float8_e4m3fn)
    wide = torch.exp2(exponents.float()).repeat_interleave(32, 0)[:rows].repeat_interleave(32, 1)[:, :columns]
    return stored, _to_e8m0(exponents), stored.float() * wide


def pack_fp8_rows(table: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[rows, n] -> e4m3 and one e8m0 scale per 32 columns of each row."""
    blocks = table.unflatten(1, (-1, 32))
    exponents = _exponents(blocks.abs().amax(-1), 448.0)
    wide = torch.exp2(exponents.float())[..., None]
    stored = (blocks / wide).to(torch.float8_e4m3fn)
    return stored.flatten(1), _to_e8m0(exponents), (stored.float() * wide).flatten(1)


def pack_mxfp4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[O, I] -> two e2m1 codes a byte, low nibble first (int8), and one e8m0 scale per 32 columns."""
    blocks = weight.unflatten(1, (-1, 32))
    exponents = _exponents(blocks.abs().amax(-1), 6.0)
    wide = torch.exp2(exponents.float())[..., None]
    grid = torch.tensor(GRID)
    codes = ((blocks / wide).abs()[..., None] - grid).abs().argmin(-1)
    exact = grid[codes] * torch.where(blocks < 0, -1.0, 1.0) * wide
    nibbles = (codes + 8 * (blocks < 0)).flatten(1)
    stored = (nibbles[:, 0::2] + 16 * nibbles[:, 1::2]).to(torch.uint8).view(torch.int8)
    return stored, _to_e8m0(exponents), exact.flatten(1)


PACKERS = {"fp8": pack_fp8_tiles, "fp8_rows": pack_fp8_rows, "mxfp4": pack_mxfp4}

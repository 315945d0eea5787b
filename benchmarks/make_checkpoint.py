"""``python -m benchmarks.make_checkpoint --layers 0,1,2,20,24 DIR``: random weights in the release's layout.

Writes a model folder that an engine loads: config, tokenizer, index, shards. Layers keep their kind and are
numbered anew; numbers are drawn while they are written, so that nothing is held. A tensor follows from its
name, format and shape alone. It measures nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from benchmarks.model_dims import DIMS
from benchmarks.release_layout import BLOCK, ITEM_BYTES, Entry, release_entries, release_shards
from engine.layers.ngrams import bucket_primes
from engine.models.deepseek_v41_config import parse_model_config

_PIECE = 16 << 20  # items that are drawn at once
_STD = {"F8_E4M3": 16.0, "I8": 2.93}  # of a stored value before its scale
_SCALE_SPREAD = 2  # scales lie in a range of four powers of two
_DRAFT = {"dspark_n_routed_experts": 128, "dspark_markov_rank": 256}


def main(argv: Sequence[str] | None = None) -> None:
    """Parse flags and write the folder."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.make_checkpoint", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dims", choices=sorted(DIMS), default="flash")
    parser.add_argument("--layers", required=True, help="of the whole model, ascending: 0,1,2,20,24")
    parser.add_argument("--experts", type=int, help="routed experts of each layer")
    parser.add_argument(
        "--engram-vocab-size", type=int, help="an n-gram table has about 24 times as many rows"
    )
    parser.add_argument(
        "--repeat", action="store_true", help="of large tensors draw the first 16 M numbers, again and again"
    )
    parser.add_argument("--draft-stages", type=int, default=0, help="which text generation ignores")
    options = parser.parse_args(argv)
    layers = [int(layer) for layer in options.layers.split(",")]
    changes = {
        "n_routed_experts": options.experts,
        "engram_vocab_size": options.engram_vocab_size,
        "num_nextn_predict_layers": options.draft_stages,
    }
    config = cut_config(DIMS[options.dims].text, layers, **changes)
    entries = release_entries(config["text_config"], num_draft_stages=options.draft_stages)
    options.folder.mkdir(parents=True, exist_ok=True)
    num_bytes = check_room(options.folder, entries)
    write_checkpoint(options.folder, config, entries, is_repeated=options.repeat)
    print(f"{options.folder}: {len(entries):,} tensors, {num_bytes:,} bytes")


def check_room(folder: Path, entries: Sequence[Entry]) -> int:
    """Leave if there is no room for a checkpoint; its bytes."""
    num_bytes = sum(entry.num_bytes for entry in entries)
    free = shutil.disk_usage(folder).free
    if num_bytes > free:
        sys.exit(f"{folder} has room for {free:,} bytes, the checkpoint has {num_bytes:,}")
    return num_bytes


def cut_config(text: dict[str, Any], layers: Sequence[int], **changes: int | None) -> dict[str, Any]:
    """``config.json`` of these layers. Raises ``ConfigError`` where one needs another's entries."""

    def renumber(name: str) -> list[int]:
        return [layers.index(layer) for layer in text[name] if layer in layers]

    candidate = text["candidate_source_layer_id"]
    engram_layers = renumber("engram_layer_ids")
    cut = {
        **text,
        **_DRAFT,
        **{name: value for name, value in changes.items() if value is not None},
        "num_hidden_layers": len(layers),
        "compress_ratios": [text["compress_ratios"][layer] for layer in layers],
        "kv_source_layer_ids": renumber("kv_source_layer_ids"),
        "index_source_layer_ids": renumber("index_source_layer_ids"),
        "candidate_source_layer_id": layers.index(candidate) if candidate in layers else None,
        "engram_layer_ids": engram_layers,
        "engram_num_embeddings": [0] * len(engram_layers),
    }
    config = {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "text_config": cut,
        "quantization_config": {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
            "scale_fmt": "ue8m0",
            "expert_dtype": "fp4",
        },
    }
    if engram_layers:
        cut["engram_num_embeddings"] = list(bucket_primes(parse_model_config(config))[2])
    parse_model_config(config)
    return config


def write_checkpoint(
    folder: Path, config: dict[str, Any], entries: Sequence[Entry], *, is_repeated: bool = False
) -> None:
    """All files of a model folder, the index last: where it is, all are."""
    index_path = folder / "model.safetensors.index.json"
    index_path.unlink(missing_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    text = config["text_config"]
    write_tokenizer(folder / "tokenizer.json", text["vocab_size"], text["engram_compressed_vocab_size"])
    shards = release_shards(entries)
    weight_map = {entry.name: file for file, members in shards.items() for entry in members}
    index = {
        "metadata": {"total_size": sum(entry.num_bytes for entry in entries)},
        "weight_map": weight_map,
    }
    for file, members in shards.items():
        with open(folder / file, "wb") as shard:
            shard.write(shard_header(members))
            for entry in members:
                for piece in random_pieces(entry, is_repeated=is_repeated):
                    shard.write(piece.data)
    index_path.write_text(json.dumps(index), encoding="utf-8")


def shard_header(entries: Sequence[Entry]) -> bytes:
    """What a safetensors file begins with."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for entry in entries:
        begin, end = end, end + entry.num_bytes
        header[entry.name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": [begin, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    return len(encoded).to_bytes(8, "little") + encoded


def write_tokenizer(path: Path, vocab_size: int, num_classes: int) -> None:
    """Tokens w0, w1, ... with a class of their own each; behind them W0, W1, ..., of the same classes."""
    names = [f"w{i}" if i < num_classes else f"W{i - num_classes}" for i in range(vocab_size)]
    vocab = {name: i for i, name in enumerate(names)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path))


def random_pieces(entry: Entry, *, is_repeated: bool = False) -> Iterator[np.ndarray]:
    """A tensor's bytes, piece by piece: a product of normal inputs has normal outputs, or nearly.

    ``is_repeated``: one piece's numbers over and over, for files that are to be there soon.
    """
    seed = hashlib.blake2b(entry.name.encode(), digest_size=8).digest()
    rng = np.random.default_rng(int.from_bytes(seed, "little"))
    num_items = entry.num_bytes // ITEM_BYTES[entry.dtype]
    piece = _draw(entry, rng, min(_PIECE, num_items))
    for start in range(0, num_items, _PIECE):
        count = min(_PIECE, num_items - start)
        if start and not is_repeated:
            piece = _draw(entry, rng, count)
        yield piece[:count]


def _draw(entry: Entry, rng: np.random.Generator, count: int) -> np.ndarray:
    width = entry.shape[-1]
    if entry.dtype in ("I8", "F8_E4M3"):
        drawn = np.frombuffer(rng.bytes(count), np.uint8)
        return drawn if entry.dtype == "I8" else _NORMAL_E4M3[drawn]
    if entry.dtype == "F8_E8M0":
        std = _STD["I8" if ".ffn.experts." in entry.name else "F8_E4M3"]
        middle = 127 + round(math.log2((width * BLOCK) ** -0.5 / std))
        return rng.integers(middle - _SCALE_SPREAD, middle + _SCALE_SPREAD, count, dtype=np.uint8)
    if entry.name.endswith(("norm.weight", "_scale")):
        values = np.ones(count, np.float32)
    else:
        # Biases are small beside the scores they correct; a weight leaves its input's size as it is.
        size = 1.0 if entry.name == "embed.weight" else width**-0.5 if len(entry.shape) > 1 else 0.1
        values = rng.standard_normal(count, np.float32) * np.float32(size)
    return values if entry.dtype == "F32" else (values.view(np.uint32) >> 16).astype(np.uint16)


def _normal_e4m3() -> np.ndarray:
    """256 quantiles of a normal distribution about the middle of e4m3's range, as bytes."""
    quantiles = (torch.arange(256, dtype=torch.float64) + 0.5) / 256
    normal = torch.special.ndtri(quantiles) * _STD["F8_E4M3"]
    return normal.float().to(torch.float8_e4m3fn).view(torch.uint8).numpy()


_NORMAL_E4M3 = _normal_e4m3()

if __name__ == "__main__":
    main()

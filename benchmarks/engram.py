"""What does it cost to keep the n-gram tables out of GPU memory? Prefill and decode with them in each place.

Writes a checkpoint of the first layers at real dimensions, with tables of the size asked for, and runs the
same prompts of random tokens on an engine with ``engram`` gpu, host and mmap: at first from files of which
nothing is in memory, then again. Random tokens repeat no n-gram, so each row is a new one: the worst case.

The checkpoint has 41 GB at real dimensions: the tables (--table-gib) and 9 GB of layers. Without --folder it
lies in a temporary folder (TMPDIR says where), which is deleted at the end and after SIGTERM. Needs a GPU,
except with --dims small or --write-only.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import mmap
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.command_line import need_gpus, positive, scratch_folder
from benchmarks.environment import describe
from benchmarks.make_checkpoint import check_room, cut_config, write_checkpoint
from benchmarks.model_dims import DIMS, num_buckets
from benchmarks.release_layout import BLOCK, release_entries
from engine import EngineConfig, Request, SamplingParams
from engine.llm_engine import LLMEngine

PAGE = mmap.PAGESIZE
NUM_DECODING = 16
PLACES = ("gpu", "host", "mmap")
_TABLE_GIB = {"flash": 30.0, "small": 0.01}  # unless asked for


@dataclass(frozen=True, slots=True)
class Prefill:
    """One prompt: seconds, seconds that launches stood still for rows, the digest of its one token."""

    seconds: float
    waited_s: float
    digest: str


def write_model(folder: Path, args: argparse.Namespace) -> None:
    """The checkpoint, and how fast it was written."""
    text = DIMS[args.dims].text
    layers = range(max(text["engram_layer_ids"]) + 1)
    row_bytes = text["engram_head_dim"] + text["engram_head_dim"] // BLOCK
    num_rows = args.table_gib * 2**30 / row_bytes / len(text["engram_layer_ids"])
    config = cut_config(
        text, layers, n_routed_experts=args.experts, engram_vocab_size=int(num_rows / num_buckets(text)) + 1
    )
    entries = release_entries(config["text_config"], num_draft_stages=0)
    folder.mkdir(parents=True, exist_ok=True)
    check_room(folder, entries)
    started = time.perf_counter()
    write_checkpoint(folder, config, entries, is_repeated=True)
    for path in folder.glob("*.safetensors"):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    seconds, num_bytes = time.perf_counter() - started, sum(entry.num_bytes for entry in entries)
    print(
        f"wrote {num_bytes / 1e9:.1f} GB in {seconds:.1f} s, {num_bytes / 1e9 / seconds:.2f} GB/s", flush=True
    )


def table_files(folder: Path) -> list[Path]:
    """The shards that hold tables and nothing else."""
    weights = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    return sorted({folder / file for name, file in weights.items() if ".engram.embed." in name})


def drop_cache(paths: Sequence[Path]) -> None:
    """Forget what is in the page cache of files."""
    for path in paths:
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def resident_share(paths: Sequence[Path]) -> float:
    """Which part of files is in the page cache."""
    libc = ctypes.CDLL(None, use_errno=True)
    num_resident = num_pages = 0
    for path in paths:
        mapped = np.memmap(path, np.uint8, mode="r")
        flags = np.empty(-(-mapped.nbytes // PAGE), np.uint8)
        address, size = ctypes.c_void_p(mapped.ctypes.data), ctypes.c_size_t(mapped.nbytes)
        if libc.mincore(address, size, ctypes.c_void_p(flags.ctypes.data)):
            raise OSError(ctypes.get_errno(), f"mincore of {path}")
        num_resident += int((flags & 1).sum())
        num_pages += len(flags)
    return num_resident / num_pages


def build(folder: Path, place: str, args: argparse.Namespace) -> LLMEngine:
    """An engine with its tables in one place, warmed up on a prompt of its own."""
    started = time.perf_counter()
    longest = max(args.tokens, args.cold_tokens, 2 * args.chunk) + 128
    engine = LLMEngine.build(
        EngineConfig(
            model=str(folder),
            engram=place,
            activation_quantisation="row",
            max_model_len=longest,
            max_num_batched_tokens=args.chunk,
            max_num_seqs=NUM_DECODING,
            num_kv_blocks=-(-longest // 64) + 8 * NUM_DECODING,
            host_memory_bytes=0,
            enable_prefix_caching=False,
        )
    )
    built = time.perf_counter()
    # One token over and over: it looks the same few rows up, and leaves the others where they are.
    prefill(engine, [11] * (2 * args.chunk + 64))
    run(engine, [[11] * 8] * NUM_DECODING, 4)
    print(
        f"{place}: built in {built - started:.1f} s, warm-up {time.perf_counter() - built:.1f} s", flush=True
    )
    return engine


def random_prompt(rng: np.random.Generator, engine: LLMEngine, length: int) -> list[int]:
    found: list[int] = rng.integers(10, engine.runner.model_config.vocab_size, length).tolist()
    return found


def prefill(engine: LLMEngine, prompt: Sequence[int]) -> Prefill:
    """A prompt to its first token."""
    before = waited_s(engine)
    started = time.perf_counter()
    (digest,) = run(engine, [prompt], 1)
    return Prefill(time.perf_counter() - started, waited_s(engine) - before, digest)


def decode_ms(engine: LLMEngine, rng: np.random.Generator) -> list[float]:
    """Each step of short rows that all decode."""
    times: list[float] = []
    prompts = [random_prompt(rng, engine, 8) for _ in range(NUM_DECODING)]
    run(engine, prompts, 24, times)
    return times[2:]


def run(
    engine: LLMEngine, prompts: Sequence[Sequence[int]], num_new: int, times: list[float] | None = None
) -> list[str]:
    sampling = SamplingParams(temperature=0.0, max_tokens=num_new, ignore_eos=True)
    for index, prompt in enumerate(prompts):
        engine.add_request(Request(request_id=str(index), prompt_token_ids=prompt, sampling=sampling))
    outputs = []
    while engine.has_unfinished():
        started = time.perf_counter()
        outputs += engine.step()
        if times is not None:
            times.append(1e3 * (time.perf_counter() - started))
    return [output.completions[0].output_digest for output in sorted(outputs, key=lambda o: o.request_id)]


def waited_s(engine: LLMEngine) -> float:
    tables = engine.runner.engram_tables
    return 0.0 if tables is None else tables.waited_s


def measure(folder: Path, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A line for each place and state of the page cache; digests have to be the same in all of them."""
    files = table_files(folder)
    digests: dict[str, set[str]] = {"long": set(), "cold": set()}
    for place in args.places.split(","):
        if place == "mmap":
            drop_cache(files)
        engine = build(folder, place, args)
        rng = np.random.default_rng(1)
        prompts = {"cold": random_prompt(rng, engine, args.cold_tokens), "long": []}
        prompts["long"] = random_prompt(rng, engine, args.tokens)
        for prompt, repeats in (("cold", 2), ("long", 2)):
            for repeat in range(repeats):
                share = resident_share(files)
                found = prefill(engine, prompts[prompt])
                digests[prompt].add(found.digest)
                yield line(place, engine, len(prompts[prompt]), found, repeat, share, args)
        steps = decode_ms(engine, rng)
        print(
            f"{place}: a step of {NUM_DECODING} decoding rows, ms: "
            f"median {np.median(steps):.2f}, most {max(steps):.2f}",
            flush=True,
        )
        del engine
        gc.collect()
        torch.cuda.empty_cache()
    assert all(len(found) == 1 for found in digests.values()), "where tables lie changes no bit"


def line(
    place: str,
    engine: LLMEngine,
    num_tokens: int,
    found: Prefill,
    repeat: int,
    share: float,
    args: argparse.Namespace,
) -> dict[str, Any]:
    """The figures of one prompt, printed as they come."""
    config = engine.runner.model_config
    num_lookups = (config.engram_max_ngram_size - 1) * config.engram_n_heads * len(config.engram_layer_ids)
    row_bytes = config.engram_head_dim + config.engram_head_dim // BLOCK
    num_steps = -(-num_tokens // args.chunk)
    facts = {
        "place": place,
        "pass": repeat + 1,
        "tokens": num_tokens,
        "tokens_per_s": round(num_tokens / found.seconds),
        "step_ms": round(1e3 * found.seconds / num_steps, 2),
        "waited_ms_a_step": round(1e3 * found.waited_s / num_steps, 2),
        "mb_fetched": round(num_tokens * num_lookups * row_bytes / 1e6, 1),
        "resident_before": round(share, 4),
    }
    print(" ".join(f"{name} {value}" for name, value in facts.items()), flush=True)
    return facts


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engram",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument(
        "--folder", type=Path, help="where the checkpoint is, or is written and left (a temporary one)"
    )
    parser.add_argument(
        "--dims", choices=sorted(DIMS), default="flash", help="small: for a CPU, says nothing"
    )
    parser.add_argument("--table-gib", type=float, help="both tables (30; with --dims small 0.01)")
    parser.add_argument("--experts", type=positive, default=12, help="of each layer (12)")
    parser.add_argument("--chunk", type=positive, default=4096, help="tokens of a step (4096)")
    parser.add_argument("--tokens", type=positive, default=32768, help="of the long prompt (32768)")
    parser.add_argument(
        "--cold-tokens", type=positive, default=8192, help="of the one that comes first (8192)"
    )
    parser.add_argument("--places", default=",".join(PLACES), help="some of gpu, host and mmap (all)")
    parser.add_argument("--write-only", action="store_true", help="write the checkpoint into --folder")
    args = parser.parse_args(arguments)
    if args.table_gib is None:
        args.table_gib = _TABLE_GIB[args.dims]
    if args.table_gib <= 0:
        parser.error(f"--table-gib is {args.table_gib:g}, expected more than 0")
    unknown = sorted(set(args.places.split(",")) - set(PLACES))
    if unknown:
        parser.error(f"--places has {', '.join(map(repr, unknown))}, expected some of {', '.join(PLACES)}")
    if args.write_only and args.folder is None:
        parser.error("--write-only needs --folder, where the checkpoint is left")
    if args.dims != "small" and not args.write_only:
        need_gpus(parser, 1, "this, without --dims small or --write-only,")
    print(describe(), flush=True)
    with scratch_folder() as scratch:
        folder = args.folder or scratch
        if not (folder / "model.safetensors.index.json").is_file() or args.write_only:
            write_model(folder, args)
        if not args.write_only:
            print(json.dumps(list(measure(folder, args))))


if __name__ == "__main__":
    main()

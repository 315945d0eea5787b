"""What do CUDA graphs save? Decode steps of one engine, replayed and launched one by one, in turns.

Rows have prompts and answers of one length. Steps in which all rows decode count; both ways have to give the
same digests. What the graphs take of the device is told beside them.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Sequence

import torch

from benchmarks.command_line import need_gpus, positive, positives
from benchmarks.environment import describe
from engine import EngineConfig, Request, SamplingParams
from engine.llm_engine import LLMEngine


def num_tokens(num_rows: int, args: argparse.Namespace) -> int:
    """Of each row's answer: rows begin to decode while others are still prefilled."""
    return int(args.steps) + 2 + num_rows * args.prompt_tokens // max(args.chunk - num_rows, 1)


def build_engine(args: argparse.Namespace) -> LLMEngine:
    """With room for the most rows."""
    return LLMEngine.build(
        EngineConfig(
            model=args.model,
            dtype="bfloat16",
            device="cuda",
            kernel_impl="triton",
            activation_quantisation=args.activations,
            max_model_len=args.prompt_tokens + num_tokens(max(args.rows), args) + 1,
            max_num_seqs=max(args.rows),
            max_num_batched_tokens=args.chunk,
            enable_prefix_caching=False,
        )
    )


def step_times(engine: LLMEngine, num_rows: int, args: argparse.Namespace) -> tuple[list[float], list[str]]:
    """(milliseconds of each step in which all rows decode, the rows' digests)."""
    rng = random.Random(num_rows)
    sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens(num_rows, args), ignore_eos=True)
    for index in range(num_rows):
        prompt = [rng.randrange(10, engine.runner.model_config.vocab_size) for _ in range(args.prompt_tokens)]
        engine.add_request(
            Request(request_id=f"{num_rows} {index}", prompt_token_ids=prompt, sampling=sampling)
        )
    times, digests = [], {}
    while engine.has_unfinished():
        before = engine.stats()
        started = time.perf_counter()
        for output in engine.step():
            digests[output.request_id] = output.completions[0].output_digest
        took = time.perf_counter() - started
        after = engine.stats()
        is_decode = after.num_prefill_tokens == before.num_prefill_tokens
        if is_decode and after.num_decode_tokens - before.num_decode_tokens == num_rows:
            times.append(1e3 * took)
    return times, [digests[name] for name in sorted(digests)]


def measure(engine: LLMEngine, num_rows: int, args: argparse.Namespace) -> dict[str, object]:
    """Medians of both ways for so many rows."""
    graphs = engine.runner.decode_graphs
    step_times(engine, num_rows, args)  # compiles and captures
    found: dict[str, list[float]] = {"replayed": [], "launched": []}
    seen = set()
    for _ in range(args.repeats):
        for way, times in found.items():
            engine.runner.decode_graphs = graphs if way == "replayed" else None
            # The first of a batch may still compile for its number of rows.
            new, digests = step_times(engine, num_rows, args)
            times += new[2:]
            seen.add(tuple(digests))
    engine.runner.decode_graphs = graphs
    replayed, launched = (statistics.median(times) for times in found.values())
    return {
        "rows": num_rows,
        "replayed_ms": round(replayed, 3),
        "launched_ms": round(launched, 3),
        "replayed_tokens_per_s": round(1e3 * num_rows / replayed, 1),
        "ratio": round(launched / replayed, 2),
        "same_digests": len(seen) == 1,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.decode_steps",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", required=True, help="a model folder; make_checkpoint writes large ones")
    parser.add_argument("--rows", type=positives, default=[1, 16, 64, 256])
    parser.add_argument("--prompt-tokens", type=positive, default=1024)
    parser.add_argument("--steps", type=positive, default=24, help="with all rows in them, at least")
    parser.add_argument("--repeats", type=positive, default=2)
    parser.add_argument("--chunk", type=positive, default=4096, help="rows a prefill step")
    parser.add_argument("--activations", default="row", choices=["release", "row", "none"])
    args = parser.parse_args(arguments)
    need_gpus(parser, 1)
    print(describe(), flush=True)
    engine = build_engine(args)
    results = []
    for num_rows in args.rows:
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info()[0]
        result = measure(engine, num_rows, args)
        torch.cuda.empty_cache()
        result["graphs_mib"] = round((free - torch.cuda.mem_get_info()[0]) / 2**20, 1)
        found = "equal" if result["same_digests"] else "DIFFERENT"
        print(
            f"{num_rows} rows: replayed {result['replayed_ms']} ms, {result['replayed_tokens_per_s']} tok/s; "
            f"launched {result['launched_ms']} ms, {result['ratio']} times as long; "
            f"graphs took {result['graphs_mib']} MiB; digests {found}",
            flush=True,
        )
        results.append(result)
    print(json.dumps({"model": args.model, "prompt_tokens": args.prompt_tokens, "results": results}))


if __name__ == "__main__":
    main()

"""What does the decoder tail save? Prefill of one long prompt under ``decoder_prefill`` full, exact, bounded.

At the release's dimensions the three stand as 1 : 0.51 : 0.50 by floating-point operations; a small
model has a shorter tail and fewer layers behind the last KV source, so its ratios differ: the share
of row-layers that each mode runs is printed beside the measured time.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.environment import describe
from engine import EngineConfig, Request, SamplingParams
from engine.layer_rows import num_row_layers
from engine.llm_engine import LLMEngine


def with_max_positions(model: str, num_positions: int, folder: str) -> str:
    """A model folder whose config allows ``num_positions``; its weights and tokenizer are links."""
    for path in Path(model).resolve().iterdir():
        if path.name != "config.json":
            (Path(folder) / path.name).symlink_to(path)
    config = json.loads((Path(model) / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = num_positions
    (Path(folder) / "config.json").write_text(json.dumps(config))
    return folder


def measure(model: str, mode: str, prompt: list[int], args: argparse.Namespace) -> tuple[float, float, str]:
    """(seconds, row-layers over all row-layers, digest of the one generated token)."""
    engine = LLMEngine.build(
        EngineConfig(
            model=model,
            dtype=args.dtype,
            kernel_impl=args.kernel_impl,
            max_num_seqs=1,
            max_num_batched_tokens=args.chunk,
            enable_prefix_caching=False,
            decoder_prefill=mode,
        )
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    # Kernels are compiled for the shapes of a long context too: on a GPU the whole prompt is the warm-up.
    warm_up = prompt if torch.cuda.is_available() else prompt[: args.chunk]
    engine.add_request(Request(request_id="warm-up", prompt_token_ids=warm_up, sampling=sampling))
    while engine.has_unfinished():
        engine.step()
    engine.add_request(Request(request_id="long", prompt_token_ids=prompt, sampling=sampling))
    started = time.perf_counter()
    outputs = []
    while engine.has_unfinished():
        outputs += engine.step()
    seconds = time.perf_counter() - started
    shape = engine.runner.shape
    row_layers = num_row_layers(shape, mode, start=0, wanted_ends=[len(prompt)], cached_until=0)
    return seconds, row_layers / (shape.num_layers * len(prompt)), outputs[0].completions[0].output_digest


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.decoder_prefill",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--model", default="examples/bard/model")
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--chunk", type=int, default=4096)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--kernel-impl", default="auto", choices=["auto", "triton", "torch"])
    args = parser.parse_args(arguments)
    print(describe())
    with tempfile.TemporaryDirectory() as folder:
        model = with_max_positions(args.model, args.tokens + 64, folder)
        vocab_size = json.loads((Path(model) / "config.json").read_text())["text_config"]["vocab_size"]
        rng = random.Random(0)
        prompt = [rng.randrange(10, vocab_size) for _ in range(args.tokens)]
        results = {mode: measure(model, mode, prompt, args) for mode in ("full", "exact", "bounded")}
    full = results["full"][0]
    print("mode     seconds  of full  row-layers  digest")
    for mode, (seconds, share, digest) in results.items():
        note = "  (an approximation)" if mode == "bounded" else ""
        print(f"{mode:8} {seconds:7.2f}  {seconds / full:7.3f}  {share:10.3f}  {digest}{note}")
    assert results["full"][2] == results["exact"][2], "exact must give the bits of full"


if __name__ == "__main__":
    main()

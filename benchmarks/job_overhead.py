"""What does the job layer cost? The same rows through a bare engine and through a whole job on one rank.

Starting Ray, loading the model and filling the first batch cost a job some seconds whatever its size, so
both are run on N rows and on 2N, and the rate is that of the second N: marginal tokens over marginal
seconds. The wall time of the larger job, with its start, is printed beside it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.environment import describe
from engine import EngineConfig, SamplingParams
from engine.llm_engine import LLMEngine
from pipelines.chat import ChatOptions
from pipelines.prompt import build_renderer
from pipelines.report import read_status


def bare_seconds(model: str, prompts: list[str], max_tokens: int) -> tuple[float, int]:
    """(seconds, tokens in and out) of one engine fed with all rows, after it was built."""
    engine = LLMEngine.build(EngineConfig(model=model, dtype="float32"))
    sampling = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=max_tokens, ignore_eos=True)
    renderer = build_renderer(model, sampling, ChatOptions())
    started, num_tokens = time.perf_counter(), 0
    for index, prompt in enumerate(prompts):
        engine.add_request(renderer.render({"prompt": prompt}, f"rows.parquet#{index}"))
    while engine.has_unfinished():
        for output in engine.step():
            num_tokens += output.num_prompt_tokens + len(output.completions[0].token_ids)
    return time.perf_counter() - started, num_tokens


def job_seconds(model: str, prompts: list[str], max_tokens: int) -> tuple[float, int]:
    """(seconds of the driver, tokens in and out) of a whole job on one rank."""
    with tempfile.TemporaryDirectory() as folder:
        pq.write_table(pa.table({"prompt": prompts}), f"{folder}/rows.parquet")
        sampling = {"temperature": 0.8, "top_p": 0.95, "max_tokens": max_tokens, "ignore_eos": "true"}
        settings = [f"sampling.{name}={value}" for name, value in sampling.items()] + ["engine.dtype=float32"]
        command = [sys.executable, "-m", "jobs.cli", "run", "--model", str(Path(model).resolve())]
        command += ["--input", f"{folder}/rows.parquet", "--output", f"{folder}/out", "--num-ranks", "1"]
        command += [word for setting in settings for word in ("--set", setting)]
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
        started = time.perf_counter()
        subprocess.run(command, check=True, env=environment, stderr=subprocess.DEVNULL)
        seconds = time.perf_counter() - started
        tally = read_status(f"{folder}/out").tally
        assert tally.num_ok == len(prompts), f"only {tally.num_ok} of {len(prompts)} rows were answered"
        return seconds, tally.num_prompt_tokens + tally.num_completion_tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="examples/bard/model")
    parser.add_argument("--prompts", default="examples/bard/prompts.parquet")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--max-tokens", type=int, default=48)
    args = parser.parse_args()
    print(describe())
    known = pq.read_table(args.prompts)["prompt"].to_pylist()
    prompts = [known[i % len(known)] for i in range(2 * args.rows)]
    rates = {}
    for name, measure in (("bare engine", bare_seconds), ("whole job", job_seconds)):
        half = measure(args.model, prompts[: args.rows], args.max_tokens)
        whole = measure(args.model, prompts, args.max_tokens)
        rates[name] = (whole[1] - half[1]) / (whole[0] - half[0])
        print(f"{name}: {rates[name]:.1f} tok/s; {whole[1]} tokens in {whole[0]:.1f} s with its start")
    ratio = rates["whole job"] / rates["bare engine"]
    print(f"whole job / bare engine: {ratio:.3f} (the job layer costs {100 * (1 - ratio):.1f} %)")


if __name__ == "__main__":
    main()

"""Goodput of the small trained model on one device: requests that arrive at seeded random moments.

Reports throughput, time to the first token (TTFT), time per further token (TPOT), and good requests a second:
those with TTFT <= 1 s and TPOT <= 20 ms. Then dozens of short prompts in one step: selection and attention of
the whole batch in one launch, against a launch for each sequence. Answers are hashed; they must not depend on
arrivals.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import time
from dataclasses import dataclass, field

import torch

from benchmarks.environment import describe, device_name
from benchmarks.short_prompts import measure_short_prompts
from engine import EngineConfig, Request, SamplingParams
from engine.llm_engine import LLMEngine
from engine.scheduled_batch import ScheduledBatch

GOOD_TTFT_S, GOOD_TPOT_S = 1.0, 0.020
NUM_ARRIVING = 32


@dataclass(slots=True)
class Served:
    """One request's moments, in seconds from the start: its arrival, then each of its tokens."""

    arrival: float
    token_times: list[float] = field(default_factory=list)
    digest: str = ""

    @property
    def ttft(self) -> float:
        """Arrival to first token."""
        return self.token_times[0] - self.arrival

    @property
    def tpot(self) -> float | None:
        """Mean time of the tokens behind the first; None of a single token."""
        gaps = len(self.token_times) - 1
        return (self.token_times[-1] - self.token_times[0]) / gaps if gaps else None

    @property
    def is_good(self) -> bool:
        """Whether a reader would have been content."""
        return self.ttft <= GOOD_TTFT_S and (self.tpot or 0.0) <= GOOD_TPOT_S


def draw_requests(args: argparse.Namespace, vocab_size: int) -> list[tuple[float, Request]]:
    """Poisson arrivals; prompts of 16 to 512 ids, answers from 8 tokens on, their logarithms uniform."""
    rng = random.Random(args.seed)
    drawn, now = [], 0.0
    for index in range(args.requests):
        now += rng.expovariate(args.rate)
        prompt = [rng.randrange(10, vocab_size) for _ in range(int(16 * 32 ** rng.random()))]
        sampling = SamplingParams(
            temperature=0.8, max_tokens=int(8 * (args.max_tokens / 8) ** rng.random()), ignore_eos=True
        )
        drawn.append(
            (now, Request(request_id=f"request {index}", prompt_token_ids=prompt, sampling=sampling))
        )
    return drawn


def serve(engine: LLMEngine, requests: list[tuple[float, Request]]) -> tuple[dict[str, Served], float]:
    """Add each request at its moment and step until all are answered; the seconds that it took."""
    served = {request.request_id: Served(arrival) for arrival, request in requests}
    sampled: list[str] = []
    finish_step = engine.scheduler.finish_step

    def observe(batch: ScheduledBatch) -> None:
        finish_step(batch)
        sampled.extend(chunk.seq.request.request_id for chunk in batch.chunks if chunk.samples)

    engine.scheduler.finish_step = observe
    waiting = list(requests)
    started = time.perf_counter()
    while waiting or engine.has_unfinished():
        now = time.perf_counter() - started
        while waiting and waiting[0][0] <= now:
            engine.add_request(waiting.pop(0)[1])
        if not engine.has_unfinished():
            time.sleep(max(0.0, waiting[0][0] - now))
            continue
        outputs = engine.step()
        now = time.perf_counter() - started
        for request_id in sampled:
            served[request_id].token_times.append(now)
        sampled.clear()
        for output in outputs:
            served[output.request_id].digest = output.completions[0].output_digest
    engine.scheduler.finish_step = finish_step
    return served, time.perf_counter() - started


def percentile(values: list[float], percent: int) -> float:
    """The smallest value that ``percent`` % of the values do not exceed; NaN of none."""
    ordered = sorted(values)
    return ordered[-(-len(ordered) * percent // 100) - 1] if ordered else float("nan")


def goodput_figures(served: dict[str, Served], seconds: float) -> dict[str, float]:
    """Throughput counts generated tokens."""
    answers = list(served.values())
    tpots = [answer.tpot for answer in answers if answer.tpot is not None]
    good = sum(answer.is_good for answer in answers)
    return {
        "tokens_per_s": sum(len(answer.token_times) for answer in answers) / seconds,
        "requests_per_s": len(answers) / seconds,
        "ttft_p50_ms": 1e3 * percentile([answer.ttft for answer in answers], 50),
        "ttft_p99_ms": 1e3 * percentile([answer.ttft for answer in answers], 99),
        "tpot_p50_ms": 1e3 * percentile(tpots, 50),
        "tpot_p99_ms": 1e3 * percentile(tpots, 99),
        "good_requests_per_s": good / seconds,
        "good_share": good / len(answers),
    }


def warm_up(engine: LLMEngine, requests: list[tuple[float, Request]]) -> None:
    """Compile what the measured requests will launch: some as they arrive, all at once; then forget all."""
    serve(engine, requests[:NUM_ARRIVING])
    serve(engine, [(0.0, request) for _, request in requests])
    resolved = engine.resolved
    engine.restart(max_num_seqs=resolved.max_num_seqs, max_num_batched_tokens=resolved.max_num_batched_tokens)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks tiny",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--model", default="examples/bard/model")
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument(
        "--max-tokens", type=int, default=64, help="the longest answer; the shortest has 8 (64)"
    )
    parser.add_argument("--rate", type=float, default=8.0, help="arrivals a second (8)")
    parser.add_argument(
        "--short-prompts", type=int, default=48, help="sequences of the batch of short prompts (48)"
    )
    parser.add_argument("--kernel-impl", choices=["triton", "torch"], default="triton" if on_gpu else "torch")
    parser.add_argument(
        "--dtype", choices=["bfloat16", "float32"], default="bfloat16" if on_gpu else "float32"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    if args.requests < 1 or args.short_prompts < 1 or args.rate <= 0 or args.max_tokens < 8:
        parser.error(
            "expected --requests and --short-prompts of at least 1, --rate above 0, --max-tokens from 8"
        )
    print(describe(), flush=True)
    config = EngineConfig(
        model=args.model, dtype=args.dtype, kernel_impl=args.kernel_impl, max_num_seqs=64, max_model_len=1024
    )
    engine = LLMEngine.build(config)
    requests = draw_requests(args, engine.runner.model_config.vocab_size)
    started = time.perf_counter()
    warm_up(engine, requests)
    print(f"warm-up, compiling included: {time.perf_counter() - started:.1f} s", flush=True)
    served, seconds = serve(engine, requests)
    figures = goodput_figures(served, seconds) | measure_short_prompts(config, args.short_prompts, args.seed)
    for name, value in figures.items():
        print(f"{name:40} {value:12.3f}")
    answers = hashlib.blake2b("".join(s.digest for s in served.values()).encode(), digest_size=8).hexdigest()
    facts = {"suite": "tiny", "device": device_name(), "workload": vars(args)}
    print(json.dumps(facts | {"figures": figures, "hashes": {"tokens": answers}}))


if __name__ == "__main__":
    main()

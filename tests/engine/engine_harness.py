"""Runs requests through a whole engine on the CPU and keeps what proves equality: ids and digests.

The engine's queues, blocks and slots are checked after every step. It knows no test's expectations.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from engine.api import Request, RequestOutput, SamplingParams
from engine.config import EngineConfig
from engine.llm_engine import LLMEngine

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=4)
Digests = dict[str, tuple[str, ...]]


def build_engine(folder: Path, **settings: object) -> LLMEngine:
    """A float32 CPU engine; contexts of 1024 unless asked otherwise."""
    defaults: dict[str, object] = {
        "dtype": "float32",
        "device": "cpu",
        "max_model_len": 1024,
        "max_num_seqs": 24,
    }
    return LLMEngine.build(EngineConfig(model=str(folder), **{**defaults, **settings}))  # type: ignore[arg-type]


def run(engine: LLMEngine, requests: Iterable[Request], *, per_step: int = 10**9) -> dict[str, RequestOutput]:
    """Run all requests to their end, adding ``per_step`` of them before each step."""
    queue = list(requests)
    outputs: dict[str, RequestOutput] = {}
    while queue or engine.has_unfinished():
        for request in queue[:per_step]:
            engine.add_request(request)
        del queue[:per_step]
        for output in engine.step():
            assert output.request_id not in outputs, "a request finished twice"
            outputs[output.request_id] = output
        engine.scheduler.check_integrity()
    return outputs


def digests(outputs: dict[str, RequestOutput]) -> Digests:
    """What has to be equal: each sample's hash of ids and log-probability bits."""
    return {key: tuple(c.output_digest for c in output.completions) for key, output in outputs.items()}


def undisturbed(folder: Path, requests: Iterable[Request]) -> Digests:
    """Each request alone: one chunk, no cache, no preemption, every layer on every row."""
    engine = build_engine(
        folder,
        enable_prefix_caching=False,
        decoder_prefill="full",
        max_num_batched_tokens=1024,
        num_kv_blocks=64,
    )
    alone: Digests = {}
    for request in requests:
        alone |= digests(run(engine, [request]))
    assert engine.stats().num_preemptions == 0
    return alone

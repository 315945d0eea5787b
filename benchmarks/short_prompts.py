"""Dozens of short prompts in one step: an op launched once for the whole batch, against once for each
sequence.

A real prefill step is run and the arguments of its selection and attention are kept; these calls are then
repeated as they were, and cut into a call a sequence, whose results must be the same bytes. Whole steps are
compared too.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from engine import EngineConfig, Request, SamplingParams
from engine.layers.ops import Ops, build_ops
from engine.llm_engine import LLMEngine

MAX_PROMPT, REPEATS = 48, 20


@dataclass(frozen=True, slots=True)
class Call:
    """What an op was called with in a step."""

    op: Callable[..., Any]
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    def run(self) -> Any:
        """The same call again."""
        return self.op(*self.arguments, **self.options)


def measure_short_prompts(config: EngineConfig, num_prompts: int, seed: int) -> dict[str, float]:
    """Milliseconds of selection, attention and whole steps for ``num_prompts``, together and one by one."""
    calls: dict[str, Call] = {}
    changed = replace(
        config,
        max_num_seqs=num_prompts,
        max_num_batched_tokens=MAX_PROMPT * num_prompts,
        enable_prefix_caching=False,
        decoder_prefill="full",
    )
    with patch("engine.model_runner.build_ops", lambda impl: _recording_ops(impl, calls)):
        engine = LLMEngine.build(changed)
    rng = random.Random(seed)
    figures = {}
    step_ms: dict[str, list[float]] = {"in one step": [], "a step each": []}
    for _ in range(6):
        prompts = [_prompt(rng, engine) for _ in range(num_prompts)]
        step_ms["a step each"].append(sum(_prefill_ms(engine, [prompt]) for prompt in prompts))
        step_ms["in one step"].append(_prefill_ms(engine, prompts))
    for name, times in step_ms.items():
        figures[f"{num_prompts} short prompts, {name}, ms"] = statistics.median(times[1:])
    rows = _rows_by_sequence(calls["select_entries"].arguments[2].sequences)
    for name, cut in (("select_entries", _cut_selection), ("paged_sparse_attention", _cut_attention)):
        whole = calls[name]
        parts = [cut(whole, part) for part in rows]
        _check_equal(whole.run(), [part.run() for part in parts])
        figures[f"{name}, one launch, ms"] = _median_ms(whole.run)
        figures[f"{name}, a launch a sequence, ms"] = _median_ms(lambda parts=parts: [p.run() for p in parts])
    return figures


def _recording_ops(impl: Any, calls: dict[str, Call]) -> Ops:
    ops = build_ops(impl)

    def recording(name: str) -> Callable[..., Any]:
        op = getattr(ops, name)

        def call(*arguments: Any, **options: Any) -> Any:
            # Selection in listed blocks is another kernel, for contexts that these prompts do not have.
            if options.get("blocks") is None:
                calls[name] = Call(op, arguments, options)
            return op(*arguments, **options)

        return call

    return replace(ops, **{name: recording(name) for name in ("select_entries", "paged_sparse_attention")})


def _prompt(rng: random.Random, engine: LLMEngine) -> list[int]:
    vocab_size = engine.runner.model_config.vocab_size
    return [rng.randrange(10, vocab_size) for _ in range(rng.randint(8, MAX_PROMPT))]


def _prefill_ms(engine: LLMEngine, prompts: list[list[int]]) -> float:
    """One step that answers all of them."""
    sampling = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    for index, prompt in enumerate(prompts):
        engine.add_request(Request(request_id=str(index), prompt_token_ids=prompt, sampling=sampling))
    started = time.perf_counter()
    engine.step()
    seconds = time.perf_counter() - started
    assert not engine.has_unfinished(), "one step holds all prompts"
    return 1e3 * seconds


def _rows_by_sequence(sequences: Tensor) -> list[slice]:
    """Rows of each sequence; padding lies with the last one's."""
    counts = torch.unique_consecutive(sequences, return_counts=True)[1].tolist()
    ends = [sum(counts[: index + 1]) for index in range(len(counts))]
    return [slice(end - count, end) for count, end in zip(counts, ends, strict=True)]


def _cut_selection(call: Call, rows: slice) -> Call:
    q, weights, pages = call.arguments
    part = pages._replace(sequences=pages.sequences[rows], num_visible=pages.num_visible[rows])
    part = part._replace(max_entries=max(int(part.num_visible.max()), 1))
    return replace(call, arguments=(q[rows], weights[rows], part))


def _cut_attention(call: Call, rows: slice) -> Call:
    q, ring, chunk, window_rows, entries, slots, sink, cos, sin = call.arguments
    cut = (q[rows], ring, chunk, window_rows[rows], entries, slots[rows], sink, cos[rows], sin[rows])
    return replace(call, arguments=cut)


def _check_equal(whole: Any, parts: list[Any]) -> None:
    if isinstance(whole, Tensor):
        assert torch.equal(whole, torch.cat(parts)), "a row's bits follow the launch that it is in"
    else:
        for index, tensor in enumerate(whole):
            if tensor is not None:
                _check_equal(tensor, [part[index] for part in parts])


def _median_ms(run: Callable[[], object]) -> float:
    """Wall time with the host's share in it, the device drained after each call."""
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - started))
    return statistics.median(times[2:])

"""An engine restarted within other limits: an empty cache, the same answers, and limits that hold."""

from __future__ import annotations

import pytest

from engine import EngineConfig, Request, RequestOutput, SamplingParams
from engine.llm_engine import LLMEngine
from tests.conftest import ROOT

PROMPT = [5 + i * 7 % 200 for i in range(150)]


@pytest.fixture(scope="module")
def engine() -> LLMEngine:
    model = ROOT / "tests" / "data" / "tiny"
    return LLMEngine.build(EngineConfig(model=str(model), max_num_seqs=3, max_num_batched_tokens=96))


def run(engine: LLMEngine, *names: str) -> list[RequestOutput]:
    for name in names:
        sampling = SamplingParams(max_tokens=2, temperature=0.0)
        engine.add_request(Request(request_id=name, prompt_token_ids=PROMPT, sampling=sampling))
    outputs = []
    while engine.has_unfinished():
        outputs += engine.step()
        assert engine.stats().num_running <= engine.resolved.max_num_seqs
    return outputs


def test_a_restart_forgets_the_cache_and_changes_no_answer(engine: LLMEngine) -> None:
    outputs = run(engine, "a", "b", "c")
    (again,) = run(engine, "a")
    assert again.num_cached_tokens > 0
    engine.restart(max_num_seqs=1, max_num_batched_tokens=7)
    assert (engine.resolved.max_num_seqs, engine.resolved.max_num_batched_tokens) == (1, 7)
    (cold,) = run(engine, "a")
    assert cold.num_cached_tokens == 0
    (answer,) = {output.completions[0].output_digest for output in [*outputs, again, cold]}
    assert answer
    engine.scheduler.check_integrity()
    engine.restart(max_num_seqs=3, max_num_batched_tokens=96)
    assert engine.stats().num_steps == 0


def test_a_restart_is_refused_in_mid_work_and_beyond_what_was_built(engine: LLMEngine) -> None:
    for limits in [(4, 96), (3, 97), (0, 96), (3, 0)]:
        with pytest.raises(ValueError, match=r"must lie in 1\.\."):
            engine.restart(max_num_seqs=limits[0], max_num_batched_tokens=limits[1])
    engine.add_request(Request(request_id="x", prompt_token_ids=PROMPT))
    with pytest.raises(ValueError, match="nothing is unfinished"):
        engine.restart(max_num_seqs=1, max_num_batched_tokens=1)
    engine.abort("x")
    engine.restart(max_num_seqs=3, max_num_batched_tokens=96)

"""The engine's face: limits and stops, samples and seeds, refusals, aborts, and what it counts."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from engine.api import FinishReason, Request, SamplingParams
from engine.config import KV_BLOCK_SIZE, EngineConfig
from engine.errors import ConfigError, EngineDead, RequestRejected
from engine.llm_engine import LLMEngine
from tests.engine.engine_harness import GREEDY, build_engine, digests, run, undisturbed
from tests.engine.golden_harness import MODEL_FOLDERS

TINY = MODEL_FOLDERS["tiny"]
PROMPT = [9, 40, 77, 300, 12, 51]


@pytest.fixture(scope="module")
def engine() -> LLMEngine:
    """One engine for all tests that leave nothing behind."""
    return build_engine(TINY, max_num_batched_tokens=64)


def complete(engine: LLMEngine, sampling: SamplingParams, name: str = "r", prompt: list[int] = PROMPT):
    (output,) = run(engine, [Request(request_id=name, prompt_token_ids=prompt, sampling=sampling)]).values()
    return output


def test_max_tokens_ends_a_completion(engine: LLMEngine) -> None:
    output = complete(engine, replace(GREEDY, max_tokens=3))
    (completion,) = output.completions
    assert completion.finish_reason is FinishReason.LENGTH
    assert len(completion.token_ids) == len(completion.logprobs) == 3
    assert output.num_prompt_tokens == len(PROMPT)
    assert completion.top_logprobs is None


@pytest.mark.parametrize("seed", range(3))
def test_steps_of_some_requests_alone_change_no_answer(seed: int) -> None:
    """Little room, so that those who are left out hold what others want; what has no room says so."""
    print("seed", seed)
    draw = random.Random(seed)
    requests = [
        Request(
            request_id=str(index),
            prompt_token_ids=[draw.randrange(3, 250) for _ in range(draw.choice([1, 40, 100]))],
            sampling=replace(GREEDY, temperature=index % 2, max_tokens=4, n=1 + index % 3 // 2),
        )
        for index in range(9)
    ]
    wanted = undisturbed(TINY, requests)
    engine = build_engine(TINY, max_num_seqs=5, max_num_batched_tokens=48, num_kv_blocks=8, max_model_len=256)
    for request in requests:
        engine.add_request(request)
    found, num_without_room = [], 0
    while engine.has_unfinished():
        names = list(engine.num_generated_tokens())
        outputs = engine.try_step_only(draw.sample(names, draw.randint(1, min(3, len(names)))))
        num_without_room += outputs is None
        found += engine.step() if outputs is None else outputs
        engine.scheduler.check_integrity()
    assert digests({output.request_id: output for output in found}) == wanted
    assert num_without_room > 0


def test_how_far_each_request_is_does_not_depend_on_those_beside_it(engine: LLMEngine) -> None:
    """A row that kills its rank is known by it: at each step as many tokens of its own, all samples together."""
    seen: dict[str, list[int]] = {}
    for names in (("one",), ("two",), ("one", "two")):
        for name in names:
            sampling = replace(GREEDY, max_tokens=4, n=1 + (name == "two"))
            engine.add_request(Request(request_id=name, prompt_token_ids=PROMPT, sampling=sampling))
        counts: dict[str, list[int]] = {name: [] for name in names}
        while engine.has_unfinished():
            for name, number in engine.num_generated_tokens().items():
                counts[name].append(number)
            engine.step()
        assert engine.num_generated_tokens() == {}
        for name, numbers in counts.items():
            assert seen.setdefault(name, numbers) == numbers
    assert (seen["one"][0], seen["one"][-1], seen["two"][0]) == (0, 3, 0)
    assert seen["two"] == sorted(seen["two"])


def test_the_models_length_ends_a_completion() -> None:
    engine = build_engine(TINY, max_model_len=12)
    (completion,) = complete(engine, replace(GREEDY, max_tokens=None)).completions
    assert len(completion.token_ids) == 12 - len(PROMPT)
    assert completion.finish_reason is FinishReason.LENGTH


def test_a_stop_id_ends_a_completion_and_is_part_of_it(engine: LLMEngine) -> None:
    free = complete(engine, replace(GREEDY, max_tokens=5)).completions[0]
    stop = free.token_ids[2]
    end = free.token_ids.index(stop) + 1
    stopped = complete(engine, replace(GREEDY, max_tokens=5, stop_token_ids=(stop,))).completions[0]
    assert stopped.token_ids == free.token_ids[:end]
    assert stopped.finish_reason is FinishReason.STOP


def test_the_end_token_stops_unless_it_is_ignored(engine: LLMEngine) -> None:
    """A sampler that may only choose eos: its repetition is what the end token would have cut."""
    eos = engine.runner.model_config.eos_token_id
    run_on = complete(engine, replace(GREEDY, max_tokens=4)).completions[0]
    original = engine.runner.run

    def only_eos(batch, trace=None):
        logits = original(batch, trace).clone()
        logits[:, eos] = 1e4
        return logits

    engine.runner.run = only_eos
    try:
        ignored = complete(engine, replace(GREEDY, max_tokens=4)).completions[0]
        stopped = complete(engine, replace(GREEDY, max_tokens=4, ignore_eos=False)).completions[0]
    finally:
        engine.runner.run = original
    assert ignored.token_ids == (eos,) * 4
    assert (stopped.token_ids, stopped.finish_reason, stopped.text) == ((eos,), FinishReason.STOP, "")
    assert complete(engine, replace(GREEDY, max_tokens=4)).completions[0] == run_on


def test_a_stop_string_ends_the_text_before_it(engine: LLMEngine) -> None:
    free = complete(engine, replace(GREEDY, max_tokens=12)).completions[0]
    start = next(i for i, c in enumerate(free.text) if c.isalnum() and i > 1)
    stopped = complete(engine, replace(GREEDY, max_tokens=12, stop=(free.text[start],))).completions[0]
    assert stopped.text == free.text[: free.text.index(free.text[start])]
    assert stopped.finish_reason is FinishReason.STOP
    assert stopped.token_ids == free.token_ids[: len(stopped.token_ids)]


def test_temperature_zero_is_top_k_one(engine: LLMEngine) -> None:
    cold = complete(engine, SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True))
    narrow = complete(engine, SamplingParams(temperature=1.7, top_k=1, max_tokens=6, ignore_eos=True))
    assert cold.completions[0].output_digest == narrow.completions[0].output_digest


def test_samples_differ_from_each_other_and_repeat() -> None:
    """The same in another engine, whatever else runs; other with another seed or another row id."""
    sampling = SamplingParams(temperature=1.0, n=4, max_tokens=4, ignore_eos=True)
    row = Request(request_id="row", prompt_token_ids=PROMPT, sampling=sampling)
    first = digests(run(build_engine(TINY), [row]))["row"]
    assert len(set(first)) == 4
    others = [
        Request(request_id=f"other{i}", prompt_token_ids=PROMPT[i:], sampling=replace(sampling, n=1))
        for i in range(3)
    ]
    crowded = digests(run(build_engine(TINY, max_num_batched_tokens=16), [*others, row], per_step=2))
    assert crowded["row"] == first
    assert crowded["other0"][0] not in first
    assert not set(digests(run(build_engine(TINY, seed=1), [row]))["row"]) & set(first)
    # A request's own seed stands in for the job's.
    seeded = replace(row, sampling=replace(sampling, seed=1))
    assert digests(run(build_engine(TINY), [seeded])) == digests(run(build_engine(TINY, seed=9), [seeded]))


def test_top_logprobs_are_the_raw_distributions(engine: LLMEngine) -> None:
    sampling = SamplingParams(temperature=0.7, top_p=0.5, max_tokens=3, ignore_eos=True, logprobs=480 // 8)
    (completion,) = complete(engine, sampling).completions
    assert len(completion.top_logprobs) == 3
    for token, logprob, top in zip(
        completion.token_ids, completion.logprobs, completion.top_logprobs, strict=True
    ):
        assert list(top.logprobs) == sorted(top.logprobs, reverse=True)
        assert sum(math.exp(value) for value in top.logprobs) <= 1 + 1e-5
        assert dict(zip(top.token_ids, top.logprobs, strict=True))[token] == logprob
    greedy = complete(engine, replace(GREEDY, logprobs=1)).completions[0]
    assert [top.token_ids[0] for top in greedy.top_logprobs] == list(greedy.token_ids)


@pytest.mark.parametrize(
    ("prompt", "code"),
    [
        ([], "empty_prompt"),
        ([9] * 1024, "prompt_too_long"),
        ([9, 480], "bad_token_id"),
        ([-1], "bad_token_id"),
    ],
)
def test_a_row_that_cannot_be_served_is_refused_and_leaves_nothing(
    engine: LLMEngine, prompt: list[int], code: str
) -> None:
    with pytest.raises(RequestRejected) as refused:
        engine.add_request(Request(request_id="bad", prompt_token_ids=prompt, sampling=replace(GREEDY, n=3)))
    assert refused.value.code == code
    assert not engine.has_unfinished()
    assert complete(engine, GREEDY, name="bad").completions


def test_a_request_may_be_in_the_engine_once(engine: LLMEngine) -> None:
    request = Request(request_id="twice", prompt_token_ids=PROMPT, sampling=GREEDY)
    engine.add_request(request)
    with pytest.raises(ValueError, match="twice is in the engine already"):
        engine.add_request(request)
    engine.abort("twice")
    assert not engine.has_unfinished()
    assert engine.step() == []


def test_abort_frees_what_a_request_holds_and_the_others_go_on() -> None:
    engine = build_engine(TINY, max_num_batched_tokens=64, num_kv_blocks=20, max_num_seqs=4)
    wanted = complete(engine, GREEDY, name="kept")
    for name in ("kept", "gone"):
        sampling = GREEDY if name == "kept" else replace(GREEDY, n=3, max_tokens=40)
        engine.add_request(Request(request_id=name, prompt_token_ids=PROMPT, sampling=sampling))
    engine.step()
    engine.abort("gone")
    engine.abort("never seen")
    engine.scheduler.check_integrity()
    assert digests(run(engine, [])) == digests({"kept": wanted})
    stats = engine.stats()
    assert (stats.num_waiting, stats.num_running) == (0, 0)
    assert stats.num_free_blocks == stats.num_kv_blocks == 20


def test_the_counters_add_up(engine: LLMEngine) -> None:
    before = engine.stats()
    rows = [Request(request_id=f"c{i}", prompt_token_ids=[20 + i] * 10, sampling=GREEDY) for i in range(3)]
    run(engine, rows)
    after = engine.stats()
    assert after.num_prefill_tokens - before.num_prefill_tokens == 30
    # The last sampled token of a row is never run.
    assert after.num_decode_tokens - before.num_decode_tokens == 3 * (GREEDY.max_tokens - 1)
    assert after.num_steps - before.num_steps == GREEDY.max_tokens


def test_a_device_failure_kills_the_engine_not_the_row() -> None:
    engine = build_engine(TINY)

    def broken(batch, trace=None):
        raise RuntimeError("the device is gone")

    engine.runner.run = broken
    engine.add_request(Request(request_id="r", prompt_token_ids=PROMPT, sampling=GREEDY))
    with pytest.raises(EngineDead, match="the device is gone"):
        engine.step()


@pytest.mark.parametrize("error", [ValueError, AssertionError, IndexError, TypeError, OSError])
@pytest.mark.parametrize("place", ["runner.run", "scheduler.schedule", "scheduler.finish_step"])
def test_any_failure_of_a_step_is_the_engines_end_and_its_groups(
    monkeypatch: pytest.MonkeyPatch, place: str, error: type[Exception]
) -> None:
    """What went wrong is told by name; nobody is left waiting; nothing goes on with books that are wrong."""
    engine, calls = build_engine(TINY), []
    group = SimpleNamespace(
        agree=lambda *_, **__: None, abandon=lambda: calls.append("abandon"), has_waited_in_vain=True
    )
    monkeypatch.setattr(engine.runner, "group", group)

    def broken(*_: object) -> None:
        calls.append("broken")
        raise error("expected [n, 3]")

    engine.add_request(Request(request_id="r", prompt_token_ids=PROMPT, sampling=GREEDY))
    owner, name = place.split(".")
    monkeypatch.setattr(getattr(engine, owner), name, broken)
    with pytest.raises(EngineDead, match=rf"{error.__name__}: expected \[n, 3\]") as told:
        engine.step()
    assert type(told.value) is EngineDead, "no other rank is to blame, however long the step took"
    assert type(told.value.__cause__) is error
    assert calls == ["broken", "abandon"]
    other = Request(request_id="s", prompt_token_ids=PROMPT, sampling=GREEDY)
    for ask in (
        engine.step,
        engine.await_device,
        lambda: engine.try_step_only(["r"]),
        lambda: engine.add_request(other),
        lambda: engine.restart(max_num_seqs=1, max_num_batched_tokens=1),
    ):
        with pytest.raises(EngineDead, match=rf"{error.__name__}: expected \[n, 3\]"):
            ask()
    assert calls == ["broken", "abandon"]


def test_bfloat16_is_as_exact_as_float32() -> None:
    rows = [
        Request(
            request_id=f"r{i}",
            prompt_token_ids=[(7 * j + i) % 400 + 9 for j in range(30 + 60 * i)],
            sampling=GREEDY,
        )
        for i in range(2)
    ]
    settings = {"dtype": "bfloat16", "enable_prefix_caching": False}
    whole = {}
    for row in rows:
        whole |= digests(run(build_engine(TINY, decoder_prefill="full", **settings), [row]))
    assert digests(run(build_engine(TINY, max_num_batched_tokens=21, **settings), rows)) == whole


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_model_len": 5000}, "max_model_len 5000 exceeds the model's 4096"),
        ({"device": "cuda"}, "no usable GPU"),
    ],
)
def test_settings_that_cannot_hold_are_refused(settings: dict[str, object], message: str) -> None:
    if "device" in settings and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(ConfigError, match=message):
        LLMEngine.build(EngineConfig(model=str(TINY), **settings))


def test_a_folder_that_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        LLMEngine.build(EngineConfig(model=str(tmp_path)))


def test_an_open_end_is_what_the_pool_holds_and_a_number_is_meant() -> None:
    engine = build_engine(TINY, num_kv_blocks=2)
    output = complete(engine, replace(GREEDY, max_tokens=None))
    (completion,) = output.completions
    assert completion.finish_reason is FinishReason.LENGTH
    assert len(PROMPT) + len(completion.token_ids) == 2 * KV_BLOCK_SIZE + 1, "the last token needs no room"
    for prompt, max_tokens in ((PROMPT, 200), ([9] * (2 * KV_BLOCK_SIZE + 1), None)):
        with pytest.raises(RequestRejected) as refused:
            complete(engine, replace(GREEDY, max_tokens=max_tokens), prompt=prompt)
        assert refused.value.code == "kv_too_small"

"""Whatever the batch, the chunk, the cache, a preemption or the decoder's tail: the same bits.

Everything is compared with each request run alone and undisturbed. The counters are asserted too, so that
a test in which nothing was preempted, evicted, replayed or restored cannot pass.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
import torch

import engine.scheduled_batch
from engine.api import Request, SamplingParams
from engine.errors import RequestRejected
from engine.layer_rows import LayerRows, layer_rows
from engine.scheduler import Scheduler
from tests.engine.engine_harness import GREEDY, Digests, build_engine, digests, run, undisturbed
from tests.engine.golden_harness import MODEL_FOLDERS, PromptRun, load_model, run_prompts

VOCAB = {"tiny": 480, "tiny-quant": 480, "bard": 4096}
MODELS = list(MODEL_FOLDERS)


def tokens(rng: random.Random, model: str, count: int) -> list[int]:
    return [rng.randrange(9, VOCAB[model]) for _ in range(count)]


def random_requests(model: str) -> list[Request]:
    """Short and long prompts, some sharing a prefix, greedy and sampled, two with several samples.

    Most end shortly before a block is full, so that they all want a new block while they decode.
    """
    rng = random.Random(f"requests of {model}")
    prefix = tokens(rng, model, 210)
    shapes = [(0, 1), (0, 62), (0, 63), (0, 61), (64, 62), (130, 1), (130, 60), (210, 42), (192, 60), (60, 2)]
    samplings = [
        SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True),
        SamplingParams(temperature=0.8, top_p=0.9, max_tokens=4, ignore_eos=True),
        SamplingParams(temperature=1.0, min_p=0.02, seed=7, max_tokens=7, ignore_eos=True),
        SamplingParams(temperature=0.7, top_k=20, repetition_penalty=1.3, max_tokens=5),
    ]
    return [
        Request(
            request_id=f"file#{index}",
            prompt_token_ids=prefix[:shared] + tokens(rng, model, own),
            sampling=replace(samplings[index % 4], n=2 if index in (1, 6) else 1),
            prefix_ends=(shared,) if index in (7, 8) else (),
        )
        for index, (shared, own) in enumerate(shapes)
    ]


@pytest.fixture(scope="session")
def alone() -> dict[str, Digests]:
    """The undisturbed digests of ``random_requests``, by model, filled when first asked for."""
    return {}


def expected(model: str, alone: dict[str, Digests]) -> Digests:
    if model not in alone:
        alone[model] = undisturbed(MODEL_FOLDERS[model], random_requests(model))
    return alone[model]


SMALL_POOL = {"num_kv_blocks": 6, "max_num_seqs": 12}
DISTURBANCES: list[dict[str, object]] = [
    {**SMALL_POOL, "preemption": "offload", "num_host_kv_blocks": 30, "max_num_batched_tokens": 90},
    {**SMALL_POOL, "preemption": "recompute", "max_num_batched_tokens": 90},
    {"num_kv_blocks": 60, "max_num_batched_tokens": 300, "num_host_states": 4},
    {**SMALL_POOL, "enable_prefix_caching": False, "host_memory_bytes": 0, "max_num_batched_tokens": 90},
    {
        "num_kv_blocks": 7,
        "max_num_seqs": 3,
        "max_num_batched_tokens": 53,
        "num_host_kv_blocks": 3,
        "num_host_states": 2,
    },
]
ROOMY = 2
DISTURBANCES_OF = {"tiny": (0, 1, 2, 3, 4), "tiny-quant": (0, 3), "bard": (0, 3)}


@pytest.mark.parametrize("model", MODELS)
def test_disturbances_change_no_bit(model: str, alone: dict[str, Digests]) -> None:
    """The same rows under each disturbance; the roomy one once more, now that the cache is warm."""
    counts: Counter[str] = Counter()
    for index in DISTURBANCES_OF[model]:
        settings = DISTURBANCES[index]
        rng = random.Random(f"{model} {index}")
        engine = build_engine(MODEL_FOLDERS[model], **settings)
        for _ in range(2 if index == ROOMY else 1):
            requests = random_requests(model)
            if "max_num_seqs" in settings:
                # The short ones fill the pool, and then all want another block.
                requests.sort(key=lambda request: len(request.prompt_token_ids))
            else:
                rng.shuffle(requests)
            per_step = 100 if "max_num_seqs" in settings else rng.choice([2, 4])
            print(f"seed '{model} {index}': {settings}, {per_step} requests a step")
            assert digests(run(engine, requests, per_step=per_step)) == expected(model, alone)
        counts += Counter(engine_counters(engine.scheduler))
    print(counts)
    for name in COUNTERS:
        assert counts[name] > 0, f"{name}: nothing of it happened"


@pytest.mark.parametrize("seed", range(4))
def test_random_settings_change_no_bit(seed: int, alone: dict[str, Digests]) -> None:
    """Any mix of settings, on the smallest model. The test's id is its seed."""
    rng = random.Random(seed)
    settings = {
        "max_num_batched_tokens": rng.choice([29, 50, 64, 130, 400]),
        "num_kv_blocks": rng.choice([5, 6, 8, 12, 40]),
        "max_num_seqs": rng.choice([3, 5, 16]),
        "enable_prefix_caching": rng.random() < 0.8,
        "decoder_prefill": rng.choice(["exact", "exact", "full"]),
        "preemption": rng.choice(["offload", "recompute"]),
        "max_num_preemptions": rng.choice([0, 1, 3]),
        "num_host_kv_blocks": rng.choice([1, 6, 40]),
        "num_host_states": rng.choice([1, 3, 10]),
    }
    per_step = rng.choice([1, 2, 100])
    print(f"seed {seed}: {settings}, {per_step} requests a step")
    requests = random_requests("tiny")
    rng.shuffle(requests)
    engine = build_engine(MODEL_FOLDERS["tiny"], **settings)
    assert digests(run(engine, requests, per_step=per_step)) == expected("tiny", alone)


COUNTERS = (
    "num_preemptions",
    "num_offloads",
    "num_recomputed_tokens",
    "num_cached_tokens",
    "num_snapshots",
    "num_replayed_tokens",
)


def engine_counters(scheduler: Scheduler) -> dict[str, int]:
    return {name: getattr(scheduler.stats, name) for name in COUNTERS}


# The named cases


def test_c05_a_request_that_can_never_fit_is_refused_and_the_others_finish() -> None:
    engine = build_engine(
        MODEL_FOLDERS["tiny"], num_kv_blocks=16, max_model_len=4096, max_num_batched_tokens=64
    )
    rng = random.Random(5)
    prompts = {name: tokens(rng, "tiny", n) for name, n in (("a", 1100), ("b", 50), ("c", 50))}
    with pytest.raises(RequestRejected) as refused:
        engine.add_request(Request(request_id="a", prompt_token_ids=prompts["a"], sampling=GREEDY))
    assert refused.value.code == "kv_too_small"
    rows = [Request(request_id=name, prompt_token_ids=prompts[name], sampling=GREEDY) for name in "bc"]
    assert run(engine, rows).keys() == {"b", "c"}
    assert engine.stats().num_steps < 10


@pytest.mark.parametrize("is_caching", [False, True], ids=["cache-off", "cache-on"])
def test_c06_preemption_changes_no_bit_and_is_bounded(is_caching: bool) -> None:
    """The case in small: a pool of 256 tokens, 5 rows of 56 + 12 tokens, chunks of 32."""
    rng = random.Random(6)
    sampling = replace(GREEDY, max_tokens=12)
    rows = [
        Request(request_id=f"r{i}", prompt_token_ids=tokens(rng, "tiny", 56), sampling=sampling)
        for i in range(5)
    ]
    settings = {"enable_prefix_caching": is_caching, "max_num_batched_tokens": 32}
    large = build_engine(MODEL_FOLDERS["tiny"], num_kv_blocks=32, **settings)
    wanted = digests(run(large, rows))
    assert large.stats().num_preemptions == 0
    for preemption in ("offload", "recompute"):
        small = build_engine(
            MODEL_FOLDERS["tiny"], num_kv_blocks=4, max_model_len=256, preemption=preemption, **settings
        )
        outputs = run(small, rows)
        assert digests(outputs) == wanted
        per_row = [output.num_preemptions for output in outputs.values()]
        assert 0 < sum(per_row) == small.stats().num_preemptions
        assert max(per_row) <= small.resolved.max_num_preemptions
        assert (small.scheduler.stats.num_offloads > 0) == (preemption == "offload")


@pytest.mark.parametrize(("chunk", "multiples"), [(16, (1, 2, 3, 4)), (64, (1, 2, 3, 4)), (256, (1,))])
def test_c07_prompts_around_a_multiple_of_the_chunk(chunk: int, multiples: tuple[int, ...]) -> None:
    rng = random.Random(chunk)
    sampling = replace(GREEDY, max_tokens=2)
    rows = [
        Request(request_id=f"r{k}{d}", prompt_token_ids=tokens(rng, "tiny", k * chunk + d), sampling=sampling)
        for k in multiples
        for d in (-1, 0, 1)
    ]
    whole = undisturbed(MODEL_FOLDERS["tiny"], rows)
    engine = build_engine(MODEL_FOLDERS["tiny"], max_num_batched_tokens=chunk, num_kv_blocks=64)
    # First with a row that decodes all along, hence takes a place in every chunk; then without.
    decoding = Request(
        request_id="decoding", prompt_token_ids=[9, 10], sampling=replace(GREEDY, max_tokens=30)
    )
    mixed = run(engine, [decoding, *rows], per_step=1)
    assert {name: d for name, d in digests(mixed).items() if name != "decoding"} == whole
    alone = build_engine(MODEL_FOLDERS["tiny"], max_num_batched_tokens=chunk, enable_prefix_caching=False)
    assert digests(run(alone, rows[:3], per_step=1)) == {
        row.request_id: whole[row.request_id] for row in rows[:3]
    }


@pytest.mark.parametrize("model", ["tiny", "bard"])
def test_c08_the_prefix_cache_changes_no_bit(model: str) -> None:
    """Prompts sharing 203 tokens (no multiple of a block or a group): cold, warm, then after eviction."""
    rows = sharing_rows(model)
    if model == "bard":
        # Its replay reaches to the prompt's start; a known end keeps a snapshot from the first row on.
        rows = [replace(row, prefix_ends=(203,)) for row in rows]
    plain = undisturbed(MODEL_FOLDERS[model], rows)
    cached = build_engine(MODEL_FOLDERS[model], max_num_batched_tokens=150, num_kv_blocks=40)
    assert digests(run(cached, rows, per_step=1)) == plain
    cold = cached.stats().num_cached_tokens
    warm = run(cached, rows)
    assert digests(warm) == plain
    assert cached.stats().num_cached_tokens > cold > 0
    assert min(output.num_cached_tokens for output in warm.values()) >= 192
    assert cached.scheduler.stats.num_snapshots > 0

    # A pool of five blocks: strangers between the passes evict what a row left, to host memory or for good.
    rng = random.Random(80)
    strangers = [
        Request(
            request_id=f"s{i}",
            prompt_token_ids=tokens(rng, model, 130),
            sampling=replace(GREEDY, max_tokens=1),
        )
        for i in range(2)
    ]
    for num_host_blocks in (0, 40):
        host = {"num_host_kv_blocks": 40} if num_host_blocks else {"host_memory_bytes": 0}
        small = build_engine(MODEL_FOLDERS[model], max_num_batched_tokens=150, num_kv_blocks=5, **host)
        assert digests(run(small, rows[:2])) == {row.request_id: plain[row.request_id] for row in rows[:2]}
        run(small, strangers)
        before = engine_counters(small.scheduler)
        assert digests(run(small, rows[:1])) == {"r0": plain["r0"]}
        after = engine_counters(small.scheduler)
        found = sum(after[name] - before[name] for name in ("num_cached_tokens", "num_replayed_tokens"))
        assert (found > 0) == (num_host_blocks > 0)


def test_c08_colliding_hashes_change_no_bit() -> None:
    """Every block in one bucket: only comparing the tokens themselves tells them apart."""
    rows = sharing_rows("tiny")
    engine = build_engine(MODEL_FOLDERS["tiny"], max_num_batched_tokens=150, num_kv_blocks=40)
    engine.scheduler = Scheduler(
        engine.scheduler.config, engine.runner.shape, hash_function=lambda parent, block: 0
    )
    shifted = replace(rows[2], request_id="shifted", prompt_token_ids=[*rows[2].prompt_token_ids[1:], 9])
    mixed = [rows[0], shifted, rows[1]]
    assert digests(run(engine, mixed, per_step=1)) == undisturbed(MODEL_FOLDERS["tiny"], mixed)
    assert engine.stats().num_cached_tokens > 0


def sharing_rows(model: str) -> list[Request]:
    rng = random.Random(8)
    shared = tokens(rng, model, 203)
    return [
        Request(
            request_id=f"r{i}",
            prompt_token_ids=shared + tokens(rng, model, 10),
            sampling=replace(GREEDY, max_tokens=3),
        )
        for i in range(3)
    ]


@pytest.mark.parametrize("model", ["tiny", "bard"])
def test_c10_neighbours_change_no_bit(model: str) -> None:
    rng = random.Random(10)
    sampling = replace(GREEDY, max_tokens=4)
    rows = [
        Request(
            request_id=f"r{i}",
            prompt_token_ids=tokens(rng, model, rng.choice([3, 21, 48])),
            sampling=sampling,
        )
        for i in range(21)
    ]
    wanted = undisturbed(MODEL_FOLDERS[model], rows[:1])["r0"]
    for num_others in (1, 20) if model == "bard" else (1, 3, 20):
        batch = rows[: num_others + 1]
        rng.shuffle(batch)
        engine = build_engine(MODEL_FOLDERS[model], max_num_batched_tokens=2048)
        assert digests(run(engine, batch))["r0"] == wanted, f"with {num_others} others"


# The decoder's tail


@pytest.mark.parametrize(("model", "length"), [("tiny", 130), ("bard", 250)])
def test_one_row_fewer_in_the_decoder_tail_changes_the_bits(
    model: str, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load_model(MODEL_FOLDERS[model])
    prompt = tokens(random.Random(length), model, length)

    def last_logits(mode: str) -> torch.Tensor:
        # Unquantised caches: a rounding step may swallow what one row far back contributes.
        (done,) = run_prompts(
            loaded, [PromptRun(prompt, (70,))], is_quantised=False, mode=mode, is_traced=False
        )
        return done.last_logits

    full, exact = last_logits("full"), last_logits("exact")
    start, last = loaded.shape.decoder_start, loaded.shape.num_layers - 1
    assert layer_rows(loaded.shape, "exact", tail_end=length, cached_until=0).first_output[start] > 0
    assert torch.equal(full, exact)
    for layer in range(start, last):

        def one_row_fewer(shape, mode, *, layer=layer, **bounds) -> LayerRows:
            rows = layer_rows(shape, mode, **bounds)
            output, window, inputs = (
                list(r) for r in (rows.first_output, rows.first_window, rows.first_input)
            )
            output[layer] += 1
            # The layer above does without the row that is missing.
            window[layer + 1] = inputs[layer + 1] = output[layer]
            return LayerRows(tuple(output), tuple(window), tuple(inputs))

        monkeypatch.setattr(engine.scheduled_batch, "layer_rows", one_row_fewer)
        assert not torch.equal(last_logits("exact"), full), f"layer {layer} runs a row that nothing reads"

"""A row's token and log-probability bits are its own; filters do what a plain implementation does."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engine.api import MIN_TEMPERATURE, SamplingParams
from engine.errors import EngineDead
from engine.sampler import SampledTokens, Sampler, SamplingRow

VOCAB = 1000  # no multiple of 64, so that padding is at work
ROW_COUNTS = [1, 2, 3, 5, 16, 17, 64, 65]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]

KINDS = {
    "greedy": SamplingParams(temperature=0.0),
    "plain": SamplingParams(),
    "top_k": SamplingParams(temperature=0.7, top_k=40, logprobs=3),
    "top_p": SamplingParams(temperature=0.8, top_p=0.95),
    "min_p": SamplingParams(temperature=1.3, min_p=0.05, logprobs=0),
    "all": SamplingParams(temperature=0.9, top_k=60, top_p=0.9, min_p=0.01, repetition_penalty=1.2),
    "penalty": SamplingParams(temperature=0.0, repetition_penalty=1.5),
}


def random_logits(num_rows: int, seed: int = 0, vocab: int = VOCAB) -> Tensor:
    return torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def make_row(params: SamplingParams, index: int = 0, **identity: object) -> SamplingRow:
    row = SamplingRow(
        params=params, request_id=f"a.parquet#{index}", sample_index=0, position=7, token_ids=[1, 5, 5, 999]
    )
    return replace(row, **identity)  # type: ignore[arg-type]


def mixed_rows(num_rows: int) -> list[SamplingRow]:
    kinds = list(KINDS.values())
    return [make_row(kinds[i % len(kinds)], i) for i in range(num_rows)]


def bits_of(sampled: SampledTokens, i: int) -> tuple[object, ...]:
    top = sampled.top_logprobs[i]
    hexes = tuple(value.hex() for value in top.logprobs) if top else None
    return sampled.token_ids[i], sampled.logprobs[i].hex(), top.token_ids if top else None, hexes


@pytest.mark.parametrize("device", DEVICES)
def test_a_row_does_not_depend_on_its_neighbours(device: str) -> None:
    logits, rows = random_logits(max(ROW_COUNTS)).to(device), mixed_rows(max(ROW_COUNTS))
    sampler = Sampler(VOCAB, seed=3)
    alone = [bits_of(sampler.sample(logits[i : i + 1], rows[i : i + 1]), 0) for i in range(len(rows))]
    for count in ROW_COUNTS:
        for offset in {0, 1, len(rows) - count}:
            stop = min(offset + count, len(rows))
            sampled = sampler.sample(logits[offset:stop], rows[offset:stop])
            assert [bits_of(sampled, i) for i in range(stop - offset)] == alone[offset:stop]


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_does_not_depend_on_what_its_neighbours_ask(kind: str) -> None:
    logits = random_logits(2)
    row = make_row(KINDS[kind])
    results = {
        bits_of(Sampler(VOCAB, 0).sample(logits, [row, make_row(other, 1)]), 0) for other in KINDS.values()
    }
    assert len(results) == 1


def test_logprobs_are_the_log_softmax_of_the_raw_logits() -> None:
    logits, rows = random_logits(32), mixed_rows(32)
    sampled = Sampler(VOCAB, 0).sample(logits, rows)
    expected = logits.double().log_softmax(-1)
    for i in range(32):
        assert sampled.logprobs[i] == pytest.approx(expected[i, sampled.token_ids[i]].item(), abs=2e-6)
        assert torch.tensor(sampled.logprobs[i], dtype=torch.float32).item() == sampled.logprobs[i]


def test_top_logprobs_come_best_first_with_ties_by_lowest_id() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, [700, 20, 300]] = torch.tensor([2.0, 1.0, 1.0])
    (top,) = Sampler(VOCAB, 0).sample(logits, [make_row(SamplingParams(logprobs=5))]).top_logprobs
    assert top is not None
    assert top.token_ids == (700, 20, 300, 0, 1)
    assert top.logprobs == pytest.approx(logits.log_softmax(-1)[0, list(top.token_ids)].tolist(), abs=1e-6)
    assert Sampler(VOCAB, 0).sample(logits, [make_row(SamplingParams())]).top_logprobs == [None]


def test_temperature_zero_equals_top_k_one_and_takes_the_lowest_id_of_equals() -> None:
    logits = random_logits(16)
    logits[0] = 0.0
    logits[1, 500] = logits[1, 400] = 50.0
    sampler = Sampler(VOCAB, 0)
    zero = sampler.sample(logits, [make_row(SamplingParams(temperature=0.0), i) for i in range(16)])
    one = sampler.sample(logits, [make_row(SamplingParams(temperature=2.0, top_k=1), i) for i in range(16)])
    assert zero == one
    assert zero.token_ids[:2] == [0, 400]
    assert zero.token_ids == logits.argmax(-1).tolist()


def test_the_lowest_temperature_still_draws_the_most_likely_token() -> None:
    logits = random_logits(16)
    params = SamplingParams(temperature=MIN_TEMPERATURE)
    rows = [make_row(params, i) for i in range(16)]
    assert Sampler(VOCAB, 0).sample(logits, rows).token_ids == logits.argmax(-1).tolist()
    with pytest.raises(ValueError, match="at least 1e-05"):
        SamplingParams(temperature=MIN_TEMPERATURE / 2)


@pytest.mark.parametrize(
    "change",
    [
        {"request_id": "b.parquet#0"},
        {"sample_index": 1},
        {"position": 8},
        {"params": SamplingParams(seed=1)},
    ],
    ids=["request", "sample", "position", "seed"],
)
def test_every_part_of_the_key_changes_the_draw(change: dict[str, object]) -> None:
    logits = torch.zeros(1, VOCAB).expand(40, VOCAB).contiguous()
    sampler = Sampler(VOCAB, seed=0)
    rows = [make_row(SamplingParams(), position=100 * i) for i in range(40)]
    if "position" in change:
        changed = [replace(row, position=row.position + 1) for row in rows]
    else:
        changed = [replace(row, **change) for row in rows]  # type: ignore[arg-type]
    first, second = sampler.sample(logits, rows), sampler.sample(logits, changed)
    assert first == sampler.sample(logits, rows)
    assert sum(a == b for a, b in zip(first.token_ids, second.token_ids, strict=True)) <= 3


def test_the_row_seed_replaces_the_job_seed() -> None:
    logits = random_logits(8)
    own = [make_row(SamplingParams(seed=5), i) for i in range(8)]
    inherited = [make_row(SamplingParams(), i) for i in range(8)]
    assert Sampler(VOCAB, 1).sample(logits, own) == Sampler(VOCAB, 5).sample(logits, inherited)


def chi_square(observed: Counter[int], expected: Tensor, num_draws: int) -> float:
    return sum(
        (observed[i] - p * num_draws) ** 2 / (p * num_draws) for i, p in enumerate(expected.tolist()) if p
    )


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        (SamplingParams(), 8),
        (SamplingParams(temperature=0.5), 8),
        (SamplingParams(top_k=4), 4),
        (SamplingParams(top_p=0.6), 2),
        (SamplingParams(min_p=0.3), 3),
    ],
    ids=["plain", "temperature", "top_k", "top_p", "min_p"],
)
def test_draws_follow_the_distribution(params: SamplingParams, kept: int) -> None:
    logits = torch.tensor([[0.1, 2.0, -1.0, 1.5, 0.8, 0.0, -0.5, 0.5]])
    num_draws = 4000
    rows = [make_row(params, position=i) for i in range(num_draws)]
    drawn = Counter(Sampler(8, seed=11).sample(logits.expand(num_draws, 8), rows).token_ids)
    probs = (logits[0].double() / params.temperature).softmax(-1)
    best = probs.argsort(descending=True)[:kept]
    expected = torch.zeros(8, dtype=torch.double)
    expected[best] = probs[best] / probs[best].sum()
    assert set(drawn) <= set(best.tolist())
    assert chi_square(drawn, expected, num_draws) < 24.3  # 99.9 % point at 7 degrees of freedom


def naively_kept(logits: list[float], params: SamplingParams, seen: set[int]) -> set[int]:
    """Which ids may be drawn, by the textbook: penalty, temperature, top_k, top_p, min_p."""
    scores = [
        (x * params.repetition_penalty if x < 0 else x / params.repetition_penalty) if i in seen else x
        for i, x in enumerate(logits)
    ]
    scores = [x / params.temperature for x in scores]
    ranked = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    ranked = ranked[: params.top_k or len(ranked)]
    weights = [math.exp(scores[i] - scores[ranked[0]]) for i in ranked]
    total, running, kept = sum(weights), 0.0, []
    for i, weight in zip(ranked, weights, strict=True):
        if running < params.top_p * total and weight >= params.min_p:
            kept.append(i)
        running += weight
    return set(kept)


@pytest.mark.parametrize("seed", range(6))
def test_filters_agree_with_a_plain_implementation(seed: int) -> None:
    vocab = 24
    logits = random_logits(1, seed, vocab) / 2
    params = SamplingParams(
        temperature=1.5,
        top_k=[0, 9, 15][seed % 3],
        top_p=[0.9, 1.0][seed % 2],
        min_p=0.02,
        repetition_penalty=1.4,
    )
    seen = [3, 4, 4, 17]
    rows = [make_row(params, position=i, token_ids=seen) for i in range(3000)]
    drawn = set(Sampler(vocab, seed).sample(logits.expand(3000, vocab), rows).token_ids)
    assert drawn == naively_kept(logits[0].tolist(), params, set(seen))


def test_top_k_keeps_the_lowest_ids_of_equals() -> None:
    rows = [make_row(SamplingParams(top_k=3), position=i) for i in range(300)]
    drawn = set(Sampler(VOCAB, 0).sample(torch.zeros(300, VOCAB), rows).token_ids)
    assert drawn == {0, 1, 2}


def test_the_repetition_penalty_moves_seen_tokens_only() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, [10, 20]] = torch.tensor([3.0, 2.5])
    params = SamplingParams(temperature=0.0, repetition_penalty=2.0)
    sampler = Sampler(VOCAB, 0)
    assert sampler.sample(logits, [make_row(params, token_ids=[10])]).token_ids == [20]
    assert sampler.sample(logits, [make_row(params, token_ids=[10, 20])]).token_ids == [10]
    assert sampler.sample(-logits - 1, [make_row(params, token_ids=[0, 1, 2])]).token_ids == [3]
    assert sampler.sample(logits, [make_row(params, token_ids=None)]).token_ids == [10]


def test_the_callers_logits_are_left_alone() -> None:
    logits = random_logits(4, vocab=1024)
    before = logits.clone()
    Sampler(1024, 0).sample(logits, [make_row(KINDS["all"], i) for i in range(4)])
    assert torch.equal(logits, before)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_broken_logits_end_the_engine(bad: float) -> None:
    logits = random_logits(3)
    logits[1, 17] = bad
    with pytest.raises(EngineDead, match=r"a\.parquet#1"):
        Sampler(VOCAB, 0).sample(logits, [make_row(SamplingParams(), i) for i in range(3)])


def test_a_wrong_shape_is_the_callers_mistake() -> None:
    with pytest.raises(ValueError, match=r"float32 \[1, 1000\]"):
        Sampler(VOCAB, 0).sample(torch.zeros(2, VOCAB), [make_row(SamplingParams())])


def test_no_rows_no_tokens() -> None:
    assert Sampler(VOCAB, 0).sample(torch.zeros(0, VOCAB), []) == SampledTokens([], [], [])

"""Where prompts part, against a definition that looks at every pair; and what an engine makes of it."""

from __future__ import annotations

import random

import pytest

from engine import EngineConfig, Request, SamplingParams
from engine.llm_engine import LLMEngine
from pipelines.shared_prefixes import MIN_SHARED_TOKENS, shared_prefix_ends
from tests.conftest import ROOT

TINY = ROOT / "tests" / "data" / "tiny"


def common_length(a: list[int], b: list[int]) -> int:
    length = 0
    while length < min(len(a), len(b)) and a[length] == b[length]:
        length += 1
    return length


def random_prompts(random_: random.Random) -> list[list[int]]:
    """A forest: each prompt goes on from a random length of an earlier one, or starts anew."""
    prompts: list[list[int]] = []
    for _ in range(random_.randrange(1, 30)):
        trunk = random_.choice(prompts) if prompts and random_.random() < 0.8 else []
        kept = trunk[: random_.randrange(len(trunk) + 1)]
        prompts.append(kept + [random_.randrange(3) for _ in range(random_.choice([0, 1, 5, 90]))] or [0])
    return prompts


@pytest.mark.parametrize("seed", range(20))
def test_every_end_is_shared_and_the_longest_is_among_them(seed: int) -> None:
    print("seed", seed)
    prompts = random_prompts(random.Random(seed))
    ends = shared_prefix_ends(prompts)
    assert len(ends) == len(prompts)
    for index, (prompt, found) in enumerate(zip(prompts, ends, strict=True)):
        others = prompts[:index] + prompts[index + 1 :]
        lengths = [
            common_length(prompt, other) - (prompt == other)
            for other in others
            if common_length(prompt, other)
        ]
        longest = max(lengths, default=0)
        assert list(found) == sorted(set(found))
        assert all(MIN_SHARED_TOKENS <= end <= len(prompt) for end in found)
        assert set(found) <= set(lengths)
        if longest >= MIN_SHARED_TOKENS and prompts.count(prompt) == 1:
            assert found[-1] == longest
        if longest < MIN_SHARED_TOKENS:
            assert found == ()


def test_the_order_of_prompts_does_not_matter() -> None:
    random_ = random.Random(7)
    prompts = [list(p) for p in {tuple(p) for p in random_prompts(random_)}]
    ends = dict(zip(map(tuple, prompts), shared_prefix_ends(prompts), strict=True))
    random_.shuffle(prompts)
    assert shared_prefix_ends(prompts) == [ends[tuple(prompt)] for prompt in prompts]


def test_a_system_prompt_few_shots_and_questions() -> None:
    system, shots_a, shots_b = [1] * 100, [2] * 70, [3] * 70
    prompts = [
        system + shots_a + [10, 11],
        system + shots_b + [12],
        system + shots_a + [13],
        [9] * 200,
        system + shots_b + [14, 15],
        [1] * 63,
    ]
    assert shared_prefix_ends(prompts) == [(170,), (100, 170), (100, 170), (), (170,), ()]


def test_equal_prompts_and_a_prompt_inside_another() -> None:
    assert shared_prefix_ends([[5] * 128, [5] * 128]) == [(127,), (127,)]
    assert shared_prefix_ends([[5] * 128, [5] * 200]) == [(128,), (128,)]
    assert shared_prefix_ends([[5] * 128]) == [()]
    assert shared_prefix_ends([]) == []


def test_an_engine_that_is_told_keeps_more_and_answers_the_same() -> None:
    random_ = random.Random(2)
    trunks = [[random_.randrange(3, 250) for _ in range(140)] for _ in range(2)]
    prompts = [
        trunks[i % 2] + [random_.randrange(3, 250) for _ in range(random_.randrange(1, 9))] for i in range(8)
    ]
    digests, num_cached = [], []
    for ends in ([()] * len(prompts), shared_prefix_ends(prompts)):
        engine = LLMEngine.build(EngineConfig(model=str(TINY), max_num_seqs=3, max_num_batched_tokens=128))
        for index, (prompt, prefix_ends) in enumerate(zip(prompts, ends, strict=True)):
            sampling = SamplingParams(max_tokens=2)
            engine.add_request(
                Request(
                    request_id=str(index), prompt_token_ids=prompt, sampling=sampling, prefix_ends=prefix_ends
                )
            )
        outputs = {}
        while engine.has_unfinished():
            outputs |= {output.request_id: output for output in engine.step()}
        digests.append({key: output.completions[0].output_digest for key, output in outputs.items()})
        num_cached.append(sum(output.num_cached_tokens for output in outputs.values()))
    assert digests[0] == digests[1]
    assert len(digests[0]) == len(prompts)
    assert num_cached[1] > num_cached[0], "known ends are kept the first time they are seen"

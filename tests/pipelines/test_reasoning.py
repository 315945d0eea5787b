"""Reasoning apart from answers: by token ids, whether the markers are in the text or not."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from engine import Completion, ConfigError, FinishReason, RequestOutput
from pipelines.reasoning import ReasoningSplitter, split_output

TOKENIZER = Tokenizer.from_file(
    str(Path(__file__).resolve().parents[2] / "examples" / "bard" / "model" / "tokenizer.json")
)
THINK, END_THINK = 7, 8
OPEN, CLOSED = [0, 5, 40, 6, THINK], [0, 5, 40, 6, THINK, 41, END_THINK]
THOUGHT, ANSWER = TOKENIZER.encode("Let me see. né").ids, TOKENIZER.encode(" It is so.").ids


def completion(token_ids: list[int], text: str, index: int = 0) -> Completion:
    return Completion(
        index=index,
        token_ids=tuple(token_ids),
        text=text,
        finish_reason=FinishReason.STOP,
        logprobs=(0.0,) * len(token_ids),
    )


@pytest.mark.parametrize("marker", ["", "</think>"], ids=["special", "plain"])
def test_a_closed_thought(marker: str) -> None:
    found = completion([*THOUGHT, END_THINK, *ANSWER], f"Let me see. né{marker} It is so.")
    assert ReasoningSplitter(TOKENIZER).split(OPEN, found) == ("Let me see. né", " It is so.")


def test_an_open_thought_is_all_reasoning() -> None:
    assert ReasoningSplitter(TOKENIZER).split(OPEN, completion(THOUGHT, "Let me")) == ("Let me", "")


def test_a_prompt_that_opens_no_thought_has_no_reasoning() -> None:
    found = completion([*ANSWER, END_THINK], "It is so.")
    assert ReasoningSplitter(TOKENIZER).split(CLOSED, found) == (None, "It is so.")
    assert ReasoningSplitter(TOKENIZER).split([0, 40], found) == (None, "It is so.")


def test_a_stop_string_inside_the_thought_leaves_no_answer() -> None:
    found = completion([*THOUGHT, END_THINK], "Let me ")
    assert ReasoningSplitter(TOKENIZER).split(OPEN, found) == ("Let me ", "")


def test_digests_do_not_change_and_samples_keep_their_order() -> None:
    samples = (
        completion([*THOUGHT, END_THINK, *ANSWER], "Let me see. né It is so."),
        completion(THOUGHT, "Let me see. né", 1),
    )
    output = RequestOutput(request_id="r", completions=samples, num_prompt_tokens=5)
    answers, reasoning = split_output(ReasoningSplitter(TOKENIZER), OPEN, output)
    assert [c.text for c in answers.completions] == [" It is so.", ""]
    assert reasoning == ("Let me see. né", "Let me see. né")
    assert [c.output_digest for c in answers.completions] == [c.output_digest for c in samples]


def test_a_tokenizer_without_the_tokens_is_refused() -> None:
    text = TOKENIZER.to_str().replace("</think>", "</thought>")
    with pytest.raises(ConfigError, match="split_reasoning"):
        ReasoningSplitter(Tokenizer.from_str(text))

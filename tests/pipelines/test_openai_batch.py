"""A request's body becomes prompt, sampling and chat columns, or says why not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine import RequestRejected
from pipelines.openai_batch import CHAT_URL, COMPLETIONS_URL, REQUEST_COLUMNS, read_line, request_values

HI = [{"role": "user", "content": "hi"}]


def values(url: str, body: Any, /, **changed: Any) -> dict[str, object]:
    line = json.dumps({"custom_id": "a", "method": "POST", "url": url, "body": body, **changed})
    return request_values(dict(zip(REQUEST_COLUMNS, read_line(line.encode()), strict=True)))


@pytest.mark.parametrize(
    ("url", "body", "expected"),
    [
        (COMPLETIONS_URL, {"prompt": "x", "model": "m", "stop": ["a"], "seed": 1}, {"prompt": "x", "stop": ["a"], "seed": 1}),
        (COMPLETIONS_URL, {"prompt": "x", "logprobs": 3, "n": None, "echo": False}, {"prompt": "x", "logprobs": 3}),
        (COMPLETIONS_URL, {"prompt": [1, 2]}, {"prompt_token_ids": [1, 2]}),
        (COMPLETIONS_URL, {}, {"prompt": None}),
        (CHAT_URL, {"messages": HI, "max_tokens": 9, "max_completion_tokens": 5}, {"messages": HI, "max_tokens": 5}),
        (CHAT_URL, {"messages": HI, "logprobs": True}, {"messages": HI, "logprobs": 0}),
        (CHAT_URL, {"messages": HI, "logprobs": False, "top_logprobs": 0}, {"messages": HI}),
        (CHAT_URL, {"messages": HI, "top_k": 4, "reasoning_effort": "low"}, {"messages": HI, "top_k": 4, "reasoning_effort": "low"}),
        (CHAT_URL, {"messages": HI, "chat_template_kwargs": {"thinking": False}}, {"messages": HI, "thinking": False}),
        (CHAT_URL, {"messages": HI, "tools": [{"f": 1}], "tool_choice": "auto"}, {"messages": [{"role": "system", "content": "", "tools": [{"f": 1}]}, *HI]}),
        (
            CHAT_URL,
            {"messages": [{"role": "system", "content": "s"}, *HI], "tools": [{"f": 1}]},
            {"messages": [{"role": "system", "content": "s", "tools": [{"f": 1}]}, *HI]},
        ),
    ],
)  # fmt: skip
def test_bodies_that_are_answered(url: str, body: Any, expected: dict[str, object]) -> None:
    assert values(url, body) == expected


@pytest.mark.parametrize(
    ("url", "body", "says"),
    [
        (COMPLETIONS_URL, {"prompt": "x", "logit_bias": {"1": 5}}, "logit_bias"),
        (COMPLETIONS_URL, {"prompt": "x", "stream": True}, "stream"),
        (COMPLETIONS_URL, {"prompt": "x", "messages": HI}, "messages"),
        (CHAT_URL, {"messages": HI, "prompt": "x"}, "prompt"),
        (CHAT_URL, {"messages": HI, "tool_choice": "none", "tools": [{}]}, "tool_choice"),
        (CHAT_URL, {"messages": HI, "response_format": {"type": "json_object"}}, "response_format"),
        (CHAT_URL, {"messages": HI, "chat_template_kwargs": {"x": 1}}, "chat_template_kwargs"),
        ("/v1/responses", {"input": "x"}, "url must be"),
    ],
)
def test_bodies_that_ask_for_something_else_are_refused(url: str, body: Any, says: str) -> None:
    with pytest.raises(RequestRejected, match=says) as refused:
        values(url, body)
    assert refused.value.code == "bad_request"


@pytest.mark.parametrize("changed", [{"custom_id": None}, {"body": "text"}, {"method": "GET"}])
def test_lines_that_are_no_requests_are_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(RequestRejected):
        values(COMPLETIONS_URL, {"prompt": "x"}, **changed)

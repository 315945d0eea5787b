"""The OpenAI batch format: request lines in, response and error lines out.

Owns how a request's body becomes a row of prompt and parameters, and how an answer becomes a line. It
must not know files, shards or engines; what a prompt or a parameter may be is checked elsewhere.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from engine import RequestRejected
from engine.api import SAMPLING_FIELDS

REQUEST_COLUMNS = ("custom_id", "method", "url", "body")
"""A line of requests as a row of texts; ``body`` is JSON. All are null where the line is no JSON object."""

CHAT_URL = "/v1/chat/completions"
COMPLETIONS_URL = "/v1/completions"

_IGNORED = {"model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
"""Fields that change nothing about an answer, or name what the job has decided."""

_NEUTRAL: dict[str, tuple[object, ...]] = {
    "stream": (False,),
    "echo": (False,),
    "best_of": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "suffix": ("",),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto",),
    "parallel_tool_calls": (True, False),
}
"""Fields that are taken with these values only: with another, the answer would not be what was asked for."""


def read_line(line: bytes) -> tuple[str | None, str | None, str | None, str | None]:
    """One line as the values of ``REQUEST_COLUMNS``; what is not as it should be is null."""
    try:
        request = json.loads(line)
        body = request.get("body") if isinstance(request, dict) else None
        text = json.dumps(body) if isinstance(body, dict) else None
    except (ValueError, RecursionError):  # no JSON, or nested deeper than anyone can read it
        return None, None, None, None
    if not isinstance(request, dict):
        return None, None, None, None
    custom_id, method, url = (_text(request.get(name)) for name in REQUEST_COLUMNS[:3])
    return custom_id, method, url, text


def _text(value: object) -> str | None:
    try:
        return value.encode().decode() if isinstance(value, str) else None
    except UnicodeEncodeError:  # half a surrogate pair: JSON can say it, no text can hold it
        return None


def request_values(row: Mapping[str, object]) -> dict[str, object]:
    """A row of ``REQUEST_COLUMNS`` as a row of prompt, sampling and chat columns.

    Raises ``RequestRejected`` for a request that cannot be answered as it asks.
    """
    if row["custom_id"] is None or row["body"] is None:
        raise RequestRejected("bad_request", "the line is no request: it needs custom_id, url and body")
    if row["method"] not in (None, "POST"):
        raise RequestRejected("bad_request", f"method must be POST, got {row['method']!r}")
    prompt = {CHAT_URL: "messages", COMPLETIONS_URL: "prompt"}.get(str(row["url"]))
    if prompt is None:
        raise RequestRejected(
            "bad_request", f"url must be {CHAT_URL} or {COMPLETIONS_URL}, got {row['url']!r}"
        )
    body = {name: value for name, value in json.loads(str(row["body"])).items() if value is not None}
    values = _parameters(body, is_chat=prompt == "messages")
    value = body.pop(prompt, None)
    if prompt == "messages":
        values["messages"] = _declare_tools(value, body.pop("tools", None))
    elif isinstance(value, list) and all(type(item) is int for item in value):
        values["prompt_token_ids"] = value
    else:
        values["prompt"] = value
    for name, content in body.items():
        if name not in _IGNORED and content not in _NEUTRAL.get(name, ()):
            raise RequestRejected("bad_request", f"body field {name} is not supported, got {content!r}")
    return values


def _parameters(body: dict[str, Any], *, is_chat: bool) -> dict[str, object]:
    """Take the parameters out of a body."""
    values: dict[str, object] = {}
    if is_chat:
        # A switch and a count in a chat body; in a completion body logprobs is the count itself.
        num_top = body.pop("top_logprobs", 0)
        if body.pop("logprobs", False):
            values["logprobs"] = num_top
        if "max_completion_tokens" in body:
            body["max_tokens"] = body.pop("max_completion_tokens")
        options = body.pop("chat_template_kwargs", {})
        if not isinstance(options, dict) or not options.keys() <= {"thinking", "drop_thinking"}:
            raise RequestRejected(
                "bad_request", f"chat_template_kwargs may hold thinking and drop_thinking, got {options!r}"
            )
        values |= options
        if "reasoning_effort" in body:
            values["reasoning_effort"] = body.pop("reasoning_effort")
    values |= {name: body.pop(name) for name in SAMPLING_FIELDS if name in body}
    return values


def _declare_tools(messages: object, tools: object) -> object:
    """Put a body's tools where the encoding looks for them: into the system message."""
    if not tools or not isinstance(messages, list):
        return messages
    first = messages[0] if messages else None
    if isinstance(first, dict) and first.get("role") == "system":
        return [{**first, "tools": tools}, *messages[1:]]
    return [{"role": "system", "content": "", "tools": tools}, *messages]


def response_line(row: Mapping[str, Any]) -> dict[str, Any]:
    """An output row as the object of its line: a response, or an error for a row that failed.

    ``row`` holds ``REQUEST_COLUMNS`` and our columns, lists over samples.
    """
    line_id = "batch_req_" + hashlib.blake2b(str(row["row_id"]).encode(), digest_size=12).hexdigest()
    line: dict[str, Any] = {"id": line_id, "custom_id": row["custom_id"], "response": None, "error": None}
    if row["error"] is not None:
        line["error"] = {"code": row["error"], "message": row["error_message"]}
        return line
    is_chat = row["url"] == CHAT_URL
    num_prompt, num_answer = row["num_prompt_tokens"], sum(row["num_completion_tokens"])
    line["response"] = {
        "status_code": 200,
        "request_id": row["row_id"],
        "body": {
            "id": ("chatcmpl-" if is_chat else "cmpl-") + line_id.removeprefix("batch_req_"),
            "object": "chat.completion" if is_chat else "text_completion",
            # No time is given: the same job writes the same bytes.
            "created": 0,
            "model": json.loads(row["body"]).get("model"),
            "choices": [_choice(row, index, is_chat) for index in range(len(row["completion"]))],
            "usage": {
                "prompt_tokens": num_prompt,
                "completion_tokens": num_answer,
                "total_tokens": num_prompt + num_answer,
                "prompt_tokens_details": {"cached_tokens": row["num_cached_tokens"]},
            },
        },
    }
    return line


def _choice(row: Mapping[str, Any], index: int, is_chat: bool) -> dict[str, Any]:
    text = row["completion"][index]
    choice: dict[str, Any] = {"index": index, "finish_reason": row["finish_reason"][index], "logprobs": None}
    chosen = row["logprobs"][index] if row.get("logprobs") else None
    tops = row["top_logprobs"][index] if row.get("top_logprobs") else None
    if chosen is not None and tops is not None:
        ids = row["completion_token_ids"][index]
        choice["logprobs"] = (_chat_logprobs if is_chat else _text_logprobs)(ids, chosen, tops)
    if not is_chat:
        return {**choice, "text": text}
    message = {"role": "assistant", "content": text}
    if row.get("reasoning") and row["reasoning"][index] is not None:
        message["reasoning_content"] = row["reasoning"][index]
    return {**choice, "message": message}


def _name(token_id: int) -> str:
    # An id names the token for certain; a piece of a character has no text of its own.
    return f"token_id:{token_id}"


_Tops = list[list[dict[str, Any]]]


def _chat_logprobs(ids: list[int], chosen: list[float], tops: _Tops) -> dict[str, Any]:
    return {
        "content": [
            {
                "token": _name(token_id),
                "logprob": logprob,
                "bytes": None,
                "top_logprobs": [
                    {"token": _name(item["token_id"]), "logprob": item["logprob"], "bytes": None}
                    for item in top
                ],
            }
            for token_id, logprob, top in zip(ids, chosen, tops, strict=True)
        ]
    }


def _text_logprobs(ids: list[int], chosen: list[float], tops: _Tops) -> dict[str, Any]:
    return {
        "tokens": [_name(token_id) for token_id in ids],
        "token_logprobs": chosen,
        "top_logprobs": [{_name(item["token_id"]): item["logprob"] for item in top} for top in tops],
    }

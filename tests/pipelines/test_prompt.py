"""Rows to requests: three kinds of prompt, per-row parameters, and a code for everything refused."""

from __future__ import annotations

import datetime
import json
import shutil
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from engine import ConfigError, RequestRejected, SamplingParams
from engine.api import SAMPLING_FIELDS
from pipelines.chat import ChatOptions
from pipelines.openai_batch import REQUEST_COLUMNS, read_line
from pipelines.prompt import PromptRenderer, build_renderer

BARD = Path(__file__).resolve().parents[2] / "examples" / "bard" / "model"
TOKENIZER = Tokenizer.from_file(str(BARD / "tokenizer.json"))
BOS, USER, ASSISTANT, THINK, END_THINK = 0, 5, 6, 7, 8
JOB = SamplingParams(temperature=0.5, top_k=7, stop=("x",), seed=3)


def build(model: Path = BARD, **options: Any) -> PromptRenderer:
    return build_renderer(model, JOB, ChatOptions(thinking=False), **options)


RENDERER = build()


def rejection(row: dict[str, Any], renderer: PromptRenderer = RENDERER) -> RequestRejected:
    with pytest.raises(RequestRejected) as caught:
        renderer.render(row, "a.parquet#0")
    return caught.value


@pytest.fixture
def model_copy(tmp_path: Path) -> Path:
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(BARD / name, tmp_path / name)
    return tmp_path


def test_text_becomes_ids_with_one_bos() -> None:
    request = RENDERER.render({"prompt": "To be, or not", "other": 1}, "a.parquet#4")
    assert request.request_id == "a.parquet#4"
    assert request.prompt_token_ids == [BOS, *TOKENIZER.encode("To be, or not").ids]
    assert request.sampling == JOB


def test_a_bos_in_the_text_is_not_doubled() -> None:
    written = RENDERER.render({"prompt": "<｜begin▁of▁sentence｜>To be"}, "r")
    assert written.prompt_token_ids == RENDERER.render({"prompt": "To be"}, "r").prompt_token_ids


def test_a_bos_that_the_tokenizer_adds_is_not_doubled(model_copy: Path) -> None:
    tokenizer = Tokenizer.from_file(str(model_copy / "tokenizer.json"))
    bos = "<｜begin▁of▁sentence｜>"
    tokenizer.post_processor = TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, BOS)])
    tokenizer.save(str(model_copy / "tokenizer.json"))
    renderer = build(model_copy)
    for row in ({"prompt": "To be"}, {"messages": [{"role": "user", "content": "To be"}]}):
        assert renderer.render(row, "r").prompt_token_ids == RENDERER.render(row, "r").prompt_token_ids


def test_messages_become_the_chat_form() -> None:
    request = RENDERER.render({"messages": [{"role": "user", "content": "To be"}]}, "r")
    assert request.prompt_token_ids == [BOS, USER, *TOKENIZER.encode("To be").ids, ASSISTANT, END_THINK]


def test_columns_override_the_chat_options() -> None:
    messages = [{"role": "user", "content": "To be"}]
    plain = RENDERER.render({"messages": messages, "thinking": None}, "r").prompt_token_ids
    row = {"messages": messages, "thinking": True, "reasoning_effort": "41", "drop_thinking": False}
    thinking = RENDERER.render(row, "r").prompt_token_ids
    assert (plain[-1], thinking[-1]) == (END_THINK, THINK)
    text = TOKENIZER.decode(thinking, skip_special_tokens=False)
    assert "Reasoning Effort: 41 " in text
    low = RENDERER.render({**row, "reasoning_effort": "low"}, "r").prompt_token_ids
    assert "Reasoning Effort: 50 " in TOKENIZER.decode(low, skip_special_tokens=False)
    # Only messages have such options: beside a text these columns are the user's own.
    assert RENDERER.render({"prompt": "x", "thinking": "deep"}, "r") == RENDERER.render({"prompt": "x"}, "r")


@pytest.mark.parametrize(
    ("column", "value"), [("thinking", "yes"), ("drop_thinking", 1), ("reasoning_effort", "medium")]
)
def test_a_bad_chat_option_names_its_column(column: str, value: object) -> None:
    error = rejection({"messages": [{"role": "user", "content": "x"}], column: value})
    assert error.code == "bad_chat_option"
    assert f"column {column}" in error.message
    assert repr(value) in error.message


def test_messages_without_a_template_or_the_releases_tokens_are_refused(model_copy: Path) -> None:
    RENDERER.check_column("messages")
    text = (model_copy / "tokenizer.json").read_text(encoding="utf-8")
    (model_copy / "tokenizer.json").write_text(text.replace("<｜User｜>", "<|other|>"), encoding="utf-8")
    renderer = build(model_copy)
    renderer.check_column("prompt")
    with pytest.raises(ConfigError, match=r"chat\.template"):
        renderer.check_column("messages")
    (model_copy / "chat_template.jinja").write_text("{{ messages[0].content }}")
    build(model_copy).check_column("messages")


def test_token_ids_are_taken_as_they_are() -> None:
    assert RENDERER.render({"prompt_token_ids": [9, 4095, 9]}, "r").prompt_token_ids == [9, 4095, 9]


def test_a_template_of_the_job_is_used(tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text("{{ bos_token }}{{ messages[0].content }}")
    renderer = build(template=str(tmp_path / "chat.jinja"))
    messages = {"messages": [{"role": "user", "content": "To be"}]}
    assert renderer.render(messages, "r") == RENDERER.render({"prompt": "To be"}, "r")


@pytest.mark.parametrize(
    ("row", "code"),
    [
        ({"prompt": None}, "null_prompt"),
        ({"messages": None}, "null_prompt"),
        ({"prompt_token_ids": None}, "null_prompt"),
        ({"prompt": 3}, "bad_prompt_type"),
        ({"prompt": ["a"]}, "bad_prompt_type"),
        ({"messages": "hi"}, "bad_prompt_type"),
        ({"prompt_token_ids": 3}, "bad_prompt_type"),
        ({"prompt": ""}, "empty_prompt"),
        ({"prompt": b""}, "empty_prompt"),
        ({"messages": []}, "empty_prompt"),
        ({"prompt_token_ids": []}, "empty_prompt"),
        ({"prompt": b"\xff\xfe"}, "not_utf8"),
        ({"prompt": "\ud800"}, "not_utf8"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "not_utf8"),
        ({"prompt_token_ids": [4096]}, "bad_token_id"),
        ({"prompt_token_ids": [-1]}, "bad_token_id"),
        ({"prompt_token_ids": [None]}, "bad_token_id"),
        ({"prompt_token_ids": [True]}, "bad_token_id"),
        ({"messages": [{"role": "ghost", "content": "x"}]}, "bad_messages"),
    ],
)
def test_every_bad_prompt_has_a_code(row: dict[str, Any], code: str) -> None:
    assert rejection(row).code == code


DEEP = "[" * 30_000 + "]" * 30_000
UNWRITABLE = (datetime.datetime(2026, 1, 1), Decimal("1.5"), b"\xff", {"k": {1}}, {(1, 2): 3}, object())


def calling(arguments: object, **call: object) -> dict[str, Any]:
    calls = [{"function": {"name": "f", "arguments": arguments}, **call}]
    turns = [{"role": "assistant", "tool_calls": calls}, {"role": "tool", "content": "x", "tool_call_id": {}}]
    return {"messages": [{"role": "user", "content": "x"}, *turns]}


def declaring(tools: object) -> dict[str, Any]:
    return {"messages": [{"role": "system", "content": "x", "tools": tools}]}


def with_effort(effort: object) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "x"}], "reasoning_effort": effort}


@pytest.mark.parametrize("kind", ["release", "template"])
def test_no_value_of_a_row_gets_past_its_rendering(model_copy: Path, kind: str) -> None:
    if kind == "template":
        (model_copy / "chat_template.jinja").write_text(
            "{% for m in messages %}{{ m.tool_calls | tojson if m.tool_calls }}{{ m | tojson }}{% endfor %}"
        )
    else:
        (model_copy / "encoding").mkdir()
        (model_copy / "encoding" / "encoding.py").write_text('TOOLS_TEMPLATE = "{tool_schemas}"')
    renderer = build(model_copy)
    for value in UNWRITABLE:
        for row in (calling({"a": value}), declaring([{"function": {"a": value}}])):
            assert rejection(row, renderer).code == "bad_messages", row
        assert rejection({"prompt_token_ids": [value]}, renderer).code == "bad_token_id"
        for name in SAMPLING_FIELDS:
            assert rejection({"prompt": "x", name: value}, renderer).code == "bad_sampling_param", name
        assert rejection(with_effort(value), renderer).code == "bad_chat_option"
    assert rejection(with_effort([1]), renderer).code == "bad_chat_option"
    if kind == "release":
        for row in (calling(DEEP), calling(f'{{"a": {DEEP}}}'), declaring(DEEP), calling({}, id=[1])):
            assert rejection(row, renderer).code == "bad_messages"


def test_a_request_that_nobody_can_read_is_a_bad_request() -> None:
    for body in (DEEP, f'{{"prompt": "x", "user": {DEEP}}}'):
        line = f'{{"custom_id": "a", "url": "/v1/completions", "body": {body}}}'
        row = dict(zip(REQUEST_COLUMNS, read_line(line.encode()), strict=True))
        assert rejection(row).code == "bad_request"
        row |= {"custom_id": "a", "url": "/v1/completions", "body": body}
        assert rejection(row).code == "bad_request"


def test_bytes_that_are_utf8_are_text() -> None:
    assert RENDERER.render({"prompt": "né".encode()}, "r") == RENDERER.render({"prompt": "né"}, "r")


def test_c03_an_over_long_prompt_names_its_length_and_the_limit() -> None:
    renderer = build(max_model_len=16)
    assert len(renderer.render({"prompt_token_ids": [9] * 15}, "r").prompt_token_ids) == 15
    error = rejection({"prompt_token_ids": [9] * 16}, renderer)
    assert error.code == "prompt_too_long"
    assert "16 tokens" in error.message
    assert "limit is 15" in error.message


def test_a_length_beyond_the_models_own_is_bounded_by_it() -> None:
    assert rejection({"prompt_token_ids": [9] * 8192}, build(max_model_len=10**6)).code == "prompt_too_long"


def test_columns_override_the_jobs_parameters() -> None:
    row = {
        "prompt": "x",
        "temperature": 1,
        "top_k": None,
        "max_tokens": 12.0,
        "stop": "end",
        "stop_token_ids": [4, 5],
        "ignore_eos": True,
        "seed": 9,
    }
    expected = SamplingParams(
        temperature=1.0,
        top_k=7,
        max_tokens=12,
        stop=("end",),
        stop_token_ids=(4, 5),
        ignore_eos=True,
        seed=9,
    )
    assert RENDERER.render(row, "r").sampling == expected
    assert type(RENDERER.render(row, "r").sampling.temperature) is float


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("temperature", -1.0),
        ("temperature", "hot"),
        ("temperature", True),
        ("top_p", 0.0),
        ("top_k", 1.5),
        ("max_tokens", 0),
        ("n", "two"),
        ("ignore_eos", 1),
        ("stop", [""]),
        ("stop", 4),
        ("stop_token_ids", "12"),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", b"12"),
        ("temperature", 5e-324),
        ("temperature", 9.9e-06),
        ("temperature", 10**310),
        ("temperature", float("nan")),
        ("repetition_penalty", 0.0009),
    ],
)
def test_a_bad_parameter_names_its_column_and_value(column: str, value: object) -> None:
    error = rejection({"prompt": "x", column: value})
    assert error.code == "bad_sampling_param"
    assert column in error.message
    assert repr(value).strip("[]") in error.message


def test_a_row_without_a_prompt_column_is_the_callers_mistake() -> None:
    with pytest.raises(ValueError, match="exactly one of"):
        RENDERER.render({"text": "x"}, "r")


def test_a_model_folder_that_lacks_a_file_is_refused(model_copy: Path) -> None:
    (model_copy / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json"):
        build(model_copy)
    (model_copy / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        build(model_copy)


@pytest.mark.parametrize("content", ["{", "[]", '{"model": {}}'])
def test_a_damaged_tokenizer_is_refused(model_copy: Path, content: str) -> None:
    (model_copy / "tokenizer.json").write_text(content)
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        build(model_copy)


def test_a_config_without_a_vocabulary_is_refused(model_copy: Path) -> None:
    (model_copy / "config.json").write_text(json.dumps({"text_config": {"max_position_embeddings": 4}}))
    with pytest.raises(ConfigError, match="vocab_size"):
        build(model_copy)

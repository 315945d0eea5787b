"""The release's chat encoding, case by case, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine import ConfigError, RequestRejected
from pipelines.chat import ChatOptions, ReleaseEncoder, read_tools_prose
from pipelines.chat_template import TemplateEncoder, find_template, read_template

CASES = json.loads((Path(__file__).parents[1] / "data" / "chat_cases.json").read_text(encoding="utf-8"))
USER = {"role": "user", "content": "Hi"}
CALLS = [
    {"id": name, "type": "function", "function": {"name": name, "arguments": "{}"}} for name in ("one", "two")
]


def encode(messages: list[Any], prose: str | None = None, **options: Any) -> str:
    options.setdefault("thinking", False)
    return ReleaseEncoder(prose).encode(messages, ChatOptions(**options))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_published_cases(case: dict[str, Any]) -> None:
    options = dict(case["options"])
    options["thinking"] = options.pop("thinking_mode") == "thinking"
    assert encode(case["messages"], **options) == case["text"]


def test_thinking_with_high_effort_is_the_default() -> None:
    assert ChatOptions() == ChatOptions(thinking=True, reasoning_effort="high", drop_thinking=True)
    assert "Reasoning Effort: 75 " in ReleaseEncoder().encode([USER], ChatOptions())


def test_reasoning_is_kept_when_asked() -> None:
    reply = {"role": "assistant", "content": "Hello!", "reasoning_content": "greet back"}
    text = encode([USER, reply, USER], thinking=True, drop_thinking=False)
    assert "<｜Assistant｜><think>greet back</think>Hello!" in text


def test_a_system_message_in_mid_conversation_opens_a_reply() -> None:
    reply = {"role": "assistant", "content": "Hello!"}
    text = encode([USER, reply, {"role": "system", "content": "Go on."}])
    assert text.endswith("<｜System｜>Go on.<｜Assistant｜></think>")


def test_tool_results_take_the_order_of_the_calls() -> None:
    messages = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": CALLS},
        {"role": "tool", "tool_call_id": "two", "content": "2"},
        {"role": "tool", "tool_call_id": "one", "content": "1"},
    ]
    assert "<tool_result>1</tool_result>\n\n<tool_result>2</tool_result>" in encode(messages)


def test_fields_that_parquet_fills_with_nulls_do_not_matter() -> None:
    filled = {**USER, "reasoning_content": None, "tool_calls": None, "tool_call_id": None, "tools": None}
    assert encode([filled]) == encode([USER])


def test_text_blocks_are_joined_by_a_blank_line() -> None:
    blocks = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert "<｜User｜>a\n\nb<" in encode([{"role": "user", "content": blocks}])


TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
RELEASE_FILE = '''
import os
raise SystemExit("this file must not be run")
TOOLS_TEMPLATE: str = """## Tools

Write <{dsml_token}{tc_block_name}>.
{tool_schemas}
Then stop."""
'''


def test_declared_tools_use_the_text_of_the_release(tmp_path: Path) -> None:
    (tmp_path / "encoding").mkdir()
    (tmp_path / "encoding" / "encoding.py").write_text(RELEASE_FILE)
    system = {"role": "system", "content": "Be kind.", "tools": json.dumps([TOOL, TOOL])}
    reply = {"role": "assistant", "content": "Hello!", "reasoning_content": "greet back"}
    text = encode([system, USER, reply, USER], read_tools_prose(tmp_path), thinking=True)
    schema = '{"name": "weather", "parameters": {"type": "object"}}'
    declared = f"Be kind.\n\n## Tools\n\nWrite <｜DSML｜ calls>.\n{schema}\n{schema}\nThen stop.<｜User｜>"
    assert declared in text
    assert "greet back</think>" in text  # kept everywhere, since tools are declared


def test_declared_tools_are_refused_without_that_text(tmp_path: Path) -> None:
    assert read_tools_prose(tmp_path) is None
    with pytest.raises(RequestRejected, match="no encoding/") as caught:
        encode([{"role": "system", "content": "", "tools": [TOOL]}, USER])
    assert caught.value.code == "bad_messages"


def test_an_unreadable_release_file_stops_the_job(tmp_path: Path) -> None:
    (tmp_path / "encoding").mkdir()
    (tmp_path / "encoding" / "encoding.py").write_text('TOOLS_TEMPLATE = "{unheard_of}"')
    with pytest.raises(ConfigError, match="unheard_of"):
        read_tools_prose(tmp_path)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("hi", "must be a mapping"),
        ({"role": "narrator", "content": "x"}, r"messages\[0\].role must be one of"),
        ({"role": "user", "content": None}, "must be text, got NoneType"),
        ({"role": "user", "content": 3}, "must be text, got int"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "reads text only"),
        ({"role": "user", "content": "x", "tools": [TOOL]}, "system message"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, "name and arguments"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
            "not valid JSON",
        ),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": []}}]}, "JSON object"),
        ({"role": "system", "content": "", "tools": "[3]"}, "must hold functions"),
        ({"role": "system", "content": "", "tools": 3}, "must be a list"),
    ],
)
def test_bad_messages_are_refused(message: object, reason: str) -> None:
    with pytest.raises(RequestRejected, match=reason) as caught:
        encode([message])
    assert caught.value.code == "bad_messages"


@pytest.mark.parametrize("effort", ["medium", 0, 101, 1.5, True])
def test_a_wrong_effort_is_refused(effort: Any) -> None:
    with pytest.raises(ValueError, match="reasoning_effort"):
        ChatOptions(reasoning_effort=effort)


TEMPLATE = """{{ bos_token }}{% for message in messages %}
{% if message.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}
[{{ message.role }}]{{ message.content }}{% endfor %}{% if enable_thinking %}<think>{% endif %}"""


def template_encoder(source: str) -> TemplateEncoder:
    return TemplateEncoder(source, "<s>", "</s>")


def test_a_template_replaces_the_encoding() -> None:
    assert template_encoder(TEMPLATE).encode([USER, USER], ChatOptions()) == "<s>[user]Hi[user]Hi<think>"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (TEMPLATE, {"role": "tool", "content": "x"}),
        ("{{ messages[7].role }}", USER),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", USER),
    ],
    ids=["raised", "undefined", "sandboxed"],
)
def test_what_a_template_refuses_is_one_row(source: str, message: dict[str, Any]) -> None:
    with pytest.raises(RequestRejected, match="chat template refused") as caught:
        template_encoder(source).encode([message], ChatOptions())
    assert caught.value.code == "bad_messages"


def test_a_broken_template_stops_the_job() -> None:
    with pytest.raises(ConfigError, match="not valid Jinja"):
        template_encoder("{% if %}")


def test_where_a_template_is_found(tmp_path: Path) -> None:
    assert find_template(tmp_path) is None
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "a"}')
    assert find_template(tmp_path) == "a"
    (tmp_path / "chat_template.jinja").write_text("b")
    assert find_template(tmp_path) == "b"
    with pytest.raises(ConfigError, match="cannot read the chat template"):
        read_template(tmp_path / "absent.jinja")

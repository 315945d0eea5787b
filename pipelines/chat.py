"""Messages to the text the model was trained on: the release's own encoding.

Owns the encoding's rules and the refusal of messages that break them. It knows nothing of token ids
or rows. Special tokens written inside a message's content are kept
as they are, as the release's encoder does: the tokenizer will read them as special tokens.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, Protocol

from engine import ConfigError, RequestRejected

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
SYSTEM = "<｜System｜>"
USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"
REMINDER = "<｜latest_reminder｜>"
THINK, END_THINK = "<think>", "</think>"
DSML = "｜DSML｜"

ROLES = ("system", "user", "assistant", "tool", "latest_reminder")
EFFORTS = {"low": 50, "high": 75, "max": 100}

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """``thinking`` opens replies with reasoning; ``reasoning_effort``: low, high, max or 1..100.

    ``drop_thinking`` leaves out the reasoning of earlier turns; it is kept where tools are declared.
    """

    thinking: bool = True
    reasoning_effort: str | int = "high"
    drop_thinking: bool = True

    def __post_init__(self) -> None:
        effort = self.reasoning_effort
        is_word = isinstance(effort, str) and effort in EFFORTS
        if not is_word and not (type(effort) is int and 1 <= effort <= 100):
            raise ValueError(f"reasoning_effort must be low, high, max or 1..100, got {effort!r}")

    @property
    def effort(self) -> int:
        """The number the model is told."""
        effort = self.reasoning_effort
        return EFFORTS[effort] if isinstance(effort, str) else effort


CHAT_COLUMNS = ("thinking", "reasoning_effort", "drop_thinking")
"""Columns that override the job's options for their row of ``messages``."""


def override_options(job: ChatOptions, row: Mapping[str, Any]) -> ChatOptions:
    """The job's options with the row's own in place. Raises ``RequestRejected`` naming the column."""
    own = {name: row[name] for name in CHAT_COLUMNS if row.get(name) is not None}
    for name in ("thinking", "drop_thinking"):
        if name in own and not isinstance(own[name], bool):
            text = f"column {name} must be true or false, got {own[name]!r}"
            raise RequestRejected("bad_chat_option", text)
    effort = own.get("reasoning_effort")
    if isinstance(effort, str) and effort.isascii() and effort.isdigit():
        own["reasoning_effort"] = int(effort)  # a column that also holds "low" holds its numbers as text
    elif isinstance(effort, float) and effort.is_integer():
        own["reasoning_effort"] = int(effort)  # nulls make a column of whole numbers one of floats
    try:
        return replace(job, **own)
    except ValueError as error:
        raise RequestRejected("bad_chat_option", f"column {error}") from error


class ChatEncoder(Protocol):
    """Messages in, text out, its beginning-of-sentence token included."""

    def encode(self, messages: Sequence[Message], options: ChatOptions) -> str:
        """Raises ``RequestRejected`` with code ``bad_messages``."""


class ReleaseEncoder:
    """The encoding of DeepSeek-V4.1, which ships no template.

    ``tools_prose`` is the text around declared tools, which only the release's own files hold.
    """

    def __init__(self, tools_prose: str | None = None) -> None:
        self._tools_prose = tools_prose

    def encode(self, messages: Sequence[Message], options: ChatOptions) -> str:
        """The conversation as text, ending where the next reply begins."""
        turns = [_check_message(i, message) for i, message in enumerate(messages)]
        turns = _merge_user_turns(turns)
        has_tools = any(turn.tools for turn in turns)
        keeps_thinking = not options.drop_thinking or has_tools
        openers = [i for i, turn in enumerate(turns) if _opens_reply(i, turn)]
        last_opener = openers[-1] if openers else -1
        text = BOS
        for i, turn in enumerate(turns):
            is_current = keeps_thinking or i >= last_opener
            text += _lead(i, turn, options) + self._body(turn, options.thinking and is_current)
            following = turns[i + 1].role if i + 1 < len(turns) else "assistant"
            if _opens_reply(i, turn) and following in ("assistant", "latest_reminder"):
                text += ASSISTANT + (THINK if options.thinking and is_current else END_THINK)
        return text

    def _body(self, turn: _Turn, has_thinking: bool) -> str:
        if turn.role == "assistant":
            reasoning = turn.reasoning + END_THINK if has_thinking else ""
            return reasoning + turn.content + _render_calls(turn.calls) + EOS
        if turn.tools:
            return f"{turn.content}\n\n{self._render_tools(turn.tools)}"
        return turn.content

    def _render_tools(self, tools: Sequence[object]) -> str:
        if self._tools_prose is None:
            refuse("tools are declared, but the model folder has no encoding/ with the text around them")
        return self._tools_prose.replace("\0", "\n".join(map(_to_json, tools)))


@dataclass(frozen=True, slots=True)
class _Call:
    name: str
    arguments: Mapping[str, object]
    call_id: str | None


@dataclass(frozen=True, slots=True)
class _Turn:
    """A checked message. A tool result is a block of the user turn that it belongs to."""

    role: str
    content: str
    reasoning: str = ""
    calls: tuple[_Call, ...] = ()
    tools: tuple[object, ...] = ()
    call_id: str | None = None


def _lead(index: int, turn: _Turn, options: ChatOptions) -> str:
    """What opens a turn; the effort line leads everything and stands in a system turn."""
    is_thinking = options.thinking
    lead = SYSTEM if turn.role == "system" or (index == 0 and is_thinking) else ""
    if index == 0 and is_thinking:
        scale = "(range 1-100, the higher the value, the more thorough the reasoning)"
        lead += f"Reasoning Effort: {options.effort} {scale}\n\n"
    if turn.role == "user":
        lead += USER
    elif turn.role == "latest_reminder":
        lead += REMINDER
    return lead


def refuse(message: str) -> NoReturn:
    """These messages cannot be encoded: an error row."""
    raise RequestRejected("bad_messages", message)


def _check_message(index: int, message: Message) -> _Turn:
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        refuse(f"{where} must be a mapping with role and content, got {type(message).__name__}")
    role = message.get("role")
    if role not in ROLES:
        refuse(f"{where}.role must be one of {', '.join(ROLES)}, got {role!r}")
    content = _check_text(f"{where}.content", message.get("content"), may_be_null=role == "assistant")
    tools = message.get("tools")
    if tools and role != "system":
        refuse(f"{where}.tools: tools are declared in a system message, not in one of role {role}")
    if role == "tool":
        return _Turn(role, f"<tool_result>{content}</tool_result>", call_id=message.get("tool_call_id"))
    if role == "assistant":
        thoughts = message.get("reasoning_content")
        reasoning = _check_text(f"{where}.reasoning_content", thoughts, may_be_null=True)
        return _Turn(role, content, reasoning, _check_calls(where, message.get("tool_calls")))
    return _Turn(role, content, tools=_check_tools(where, tools))


def _check_text(where: str, content: object, *, may_be_null: bool) -> str:
    if content is None and may_be_null:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        refuse(f"{where} must be text, got {type(content).__name__}")
    blocks = []
    for block in content:
        text = block.get("text") if isinstance(block, Mapping) and block.get("type") == "text" else None
        if not isinstance(text, str):
            refuse(f"{where} holds a block that is not text; this engine reads text only")
        blocks.append(text)
    return "\n\n".join(blocks)


def _check_calls(where: str, calls: object) -> tuple[_Call, ...]:
    result = []
    for call in _as_list(f"{where}.tool_calls", calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            refuse(f"{where}.tool_calls must hold functions with a name and arguments, got {call!r}")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            arguments = _from_json(f"{where}.tool_calls: arguments of {function['name']}", arguments)
        if not isinstance(arguments, Mapping):
            refuse(f"{where}.tool_calls: arguments of {function['name']} must be a JSON object")
        result.append(_Call(function["name"], arguments, call.get("id")))
    return tuple(result)


def _check_tools(where: str, tools: object) -> tuple[object, ...]:
    schemas = []
    for tool in _as_list(f"{where}.tools", tools):
        if not isinstance(tool, Mapping) or not isinstance(tool.get("function"), Mapping):
            refuse(f"{where}.tools must hold functions, got {tool!r}")
        schemas.append(tool["function"])
    return tuple(schemas)


def _as_list(where: str, value: object) -> Sequence[Any]:
    """A list, or its JSON: a Parquet column of structs fills absent keys with nulls, its text does not."""
    if isinstance(value, str):
        value = _from_json(where, value)
    if value is None:
        return ()
    if not isinstance(value, Sequence):
        refuse(f"{where} must be a list, got {type(value).__name__}")
    return value


def _from_json(where: str, text: str) -> object:
    try:
        return json.loads(text)
    except ValueError as error:
        refuse(f"{where} is not valid JSON: {error}")


def _to_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _merge_user_turns(turns: Sequence[_Turn]) -> list[_Turn]:
    """Neighbouring user messages and tool results become one turn, their blocks a blank line apart."""
    merged: list[_Turn] = []
    call_order: dict[str | None, int] = {}
    i = 0
    while i < len(turns):
        if turns[i].calls:
            call_order = {call.call_id: k for k, call in enumerate(turns[i].calls) if call.call_id}
        run = i
        while run < len(turns) and turns[run].role in ("user", "tool"):
            run += 1
        if run == i:
            merged.append(turns[i])
            i += 1
        else:
            blocks = _in_call_order(turns[i:run], call_order)
            merged.append(_Turn("user", "\n\n".join(block.content for block in blocks)))
            i = run
    return merged


def _in_call_order(blocks: Sequence[_Turn], call_order: Mapping[str | None, int]) -> list[_Turn]:
    """Tool results take the order of the calls they answer, in the places that tool results have."""
    results = [block for block in blocks if block.role == "tool"]
    queue = iter(sorted(results, key=lambda block: call_order.get(block.call_id, 0)))
    return [next(queue) if block.role == "tool" else block for block in blocks]


def _opens_reply(index: int, turn: _Turn) -> bool:
    """A reply follows a user turn, and a system turn in mid-conversation."""
    return turn.role == "user" or (turn.role == "system" and index > 0)


def _render_calls(calls: Sequence[_Call]) -> str:
    if not calls:
        return ""
    return f"\n\n<{DSML} calls>\n" + "\n".join(map(_render_call, calls)) + f"\n</{DSML} calls>"


def _render_call(call: _Call) -> str:
    parameters = []
    for key, value in call.arguments.items():
        is_string = isinstance(value, str)
        text = value if isinstance(value, str) else _to_json(value)
        opening = f'<{DSML} parameter name="{key}" string="{str(is_string).lower()}">'
        parameters.append(f"{opening}{text}</{DSML} parameter>")
    return f'<{DSML} invoke name="{call.name}">\n' + "\n".join(parameters) + f"\n</{DSML} invoke>"


def read_tools_prose(model_path: Path) -> str | None:
    """The release's text around declared tools, from a string constant of a file that is parsed, never run.

    The tools' place in it is marked with a NUL. None where the folder has no such constant.
    """
    fields = {
        "tool_schemas": "\0",
        "dsml_token": DSML,
        "tc_block_name": " calls",
        "tool_call_tag_name": " invoke",
        "tool_parameter_tag_name": " parameter",
        "thinking_start_token": THINK,
        "thinking_end_token": END_THINK,
    }
    for path in sorted((model_path / "encoding").glob("*.py")):
        try:
            constants = _string_constants(path.read_text(encoding="utf-8"))
            if "TOOLS_TEMPLATE" in constants:
                return constants["TOOLS_TEMPLATE"].format_map(fields)
        except (SyntaxError, UnicodeDecodeError, LookupError, ValueError) as error:
            raise ConfigError(f"cannot read the text that declares tools in {path}: {error!r}") from error
    return None


def _string_constants(source: str) -> dict[str, str]:
    """Module-level names bound to a plain string."""
    constants = {}
    for node in ast.parse(source).body:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or not isinstance(node.value, ast.Constant):
            continue
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            if isinstance(target, ast.Name) and isinstance(node.value.value, str):
                constants[target.id] = node.value.value
    return constants

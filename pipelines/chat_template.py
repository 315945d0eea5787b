"""Messages to text by a Jinja chat template: the job's own, or one that the model folder holds.

Owns where a template is found and what it may see; it runs in a sandbox, without a clock or files. It
knows nothing of the release's encoding, token ids or rows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine import ConfigError
from pipelines.chat import ChatOptions, Message, refuse


class TemplateEncoder:
    """A Jinja chat template, run in a sandbox with what the usual templates expect."""

    def __init__(self, source: str, bos: str, eos: str) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = _raise_template_error
        environment.filters["tojson"] = _template_json
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigError(f"the chat template is not valid Jinja: {error}") from error
        self._values = {"bos_token": bos, "eos_token": eos, "add_generation_prompt": True}

    def encode(self, messages: Sequence[Message], options: ChatOptions) -> str:
        """What the template makes of the messages; what it refuses is a row's failure."""
        for i, message in enumerate(messages):
            if not isinstance(message, Mapping):
                refuse(f"messages[{i}] must be a mapping, got {type(message).__name__}")
        present = [{k: v for k, v in message.items() if v is not None} for message in messages]
        chosen = {
            "thinking": options.thinking,
            "enable_thinking": options.thinking,
            "reasoning_effort": options.reasoning_effort,
            "drop_thinking": options.drop_thinking,
        }
        try:
            return self._template.render(messages=present, **self._values, **chosen)
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
            refuse(f"the chat template refused the messages: {error}")


def _raise_template_error(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _template_json(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def read_template(path: Path) -> str:
    """The template file's text. Raises ``ConfigError``."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the chat template {path}: {error}") from error


def find_template(model_path: Path) -> str | None:
    """``chat_template.jinja``, or ``chat_template`` of ``tokenizer_config.json``."""
    if (model_path / "chat_template.jinja").is_file():
        return read_template(model_path / "chat_template.jinja")
    config_path = model_path / "tokenizer_config.json"
    if not config_path.is_file():
        return None
    try:
        template = json.loads(read_template(config_path)).get("chat_template")
    except ValueError as error:
        raise ConfigError(f"{config_path} is not valid JSON: {error}") from error
    if template is not None and not isinstance(template, str):
        raise ConfigError(f"{config_path}: chat_template must be one template, as text")
    return template

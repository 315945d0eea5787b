"""A row to a Request: which column is the prompt, its token ids, and the row's own sampling parameters.

Owns the reasons for which a row is refused before the engine sees it. It knows nothing of Parquet,
shards or output columns, and of the model only its config and tokenizer files.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from tokenizers import Tokenizer

from engine import ConfigError, Request, RequestRejected, SamplingParams
from engine.api import SAMPLING_FIELDS
from pipelines.chat import (
    ASSISTANT,
    BOS,
    EOS,
    USER,
    ChatEncoder,
    ChatOptions,
    ReleaseEncoder,
    override_options,
    read_tools_prose,
)
from pipelines.chat_template import TemplateEncoder, find_template, read_template
from pipelines.openai_batch import REQUEST_COLUMNS, request_values
from pipelines.reasoning import ReasoningSplitter

PROMPT_COLUMNS = ("prompt", "messages", "prompt_token_ids")
"""A dataset has exactly one of them."""

_TYPES = get_type_hints(SamplingParams)


class PromptRenderer:
    """Renders rows of one job; ``build_renderer`` makes one.

    A text prompt is encoded as the model's tokenizer does it, special tokens recognised, and starts
    with exactly one beginning-of-sentence token. Token ids are taken as they are.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        chat: ChatEncoder | None,
        sampling: SamplingParams,
        *,
        options: ChatOptions,
        vocab_size: int,
        max_model_len: int,
        bos_token_id: int | None,
    ) -> None:
        self._tokenizer = tokenizer
        self._chat = chat
        self._options = options
        self._sampling = sampling
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._bos_token_id = bos_token_id

    def render(self, row: Mapping[str, object], row_id: str) -> Request:
        """Turn a row into the engine's request. Raises ``RequestRejected`` for a row that is no prompt.

        ``row`` maps column names to Python values and holds one prompt column; a column named like a
        sampling parameter, or with ``messages`` like a chat option, overrides the job's value where it is
        not null; other columns are ignored. A row of ``REQUEST_COLUMNS`` holds these in its body.
        """
        if REQUEST_COLUMNS[-1] in row:
            with _row_boundary("bad_request"):
                row = request_values(row)
        present = [column for column in PROMPT_COLUMNS if column in row]
        if len(present) != 1:
            raise ValueError(f"a row needs exactly one of {', '.join(PROMPT_COLUMNS)}, got {present}")
        (column,) = present
        with _row_boundary("bad_messages" if column == "messages" else "bad_prompt_type"):
            token_ids = self._token_ids(column, row)
        if not token_ids:
            raise RequestRejected("empty_prompt", f"{column} has no tokens")
        if len(token_ids) >= self._max_model_len:
            raise RequestRejected(
                "prompt_too_long",
                f"the prompt has {len(token_ids)} tokens, the limit is {self._max_model_len - 1} "
                f"(model length {self._max_model_len}, one token for the answer)",
            )
        with _row_boundary("bad_sampling_param"):
            sampling = override_sampling(self._sampling, row)
        return Request(request_id=row_id, prompt_token_ids=token_ids, sampling=sampling)

    def check_column(self, column: str) -> None:
        """Refuse with ``ConfigError`` a prompt column that this model folder and job cannot encode."""
        if column == "messages" and self._chat is None:
            raise ConfigError(
                "the input has messages, but the model folder has no chat template and its tokenizer lacks "
                "the special tokens of the release's encoding: name a Jinja file with chat.template"
            )

    def build_splitter(self) -> ReasoningSplitter:
        """What tells reasoning from answers in this model's completions. Raises ``ConfigError``."""
        return ReasoningSplitter(self._tokenizer)

    def _token_ids(self, column: str, row: Mapping[str, object]) -> list[int]:
        value = row[column]
        if value is None:
            raise RequestRejected("null_prompt", f"{column} is null")
        if column == "prompt":
            return self._encode(_check_text(value), has_bos=False)
        if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
            raise RequestRejected("bad_prompt_type", f"{column} must be a list, got {type(value).__name__}")
        if not value:
            raise RequestRejected("empty_prompt", f"{column} is an empty list")
        if column == "messages":
            self.check_column(column)
            assert self._chat is not None
            text = self._chat.encode(value, override_options(self._options, row))
            return self._encode(_check_utf8(text), has_bos=True)
        for token_id in value:
            if type(token_id) is not int or not 0 <= token_id < self._vocab_size:
                raise RequestRejected(
                    "bad_token_id", f"token ids lie in [0, {self._vocab_size}), got {token_id!r}"
                )
        return list(value)

    def _encode(self, text: str, *, has_bos: bool) -> list[int]:
        """Encode, then see to the one bos: the tokenizer may or may not add it, the text may hold it."""
        token_ids: list[int] = self._tokenizer.encode(text, add_special_tokens=not has_bos).ids
        if self._bos_token_id is None:
            return token_ids
        num_bos = 0
        while num_bos < len(token_ids) and token_ids[num_bos] == self._bos_token_id:
            num_bos += 1
        return [self._bos_token_id, *token_ids[num_bos:]]


@contextlib.contextmanager
def _row_boundary(code: str) -> Iterator[None]:
    """Values come as deep and as odd as a file can hold them: what they break is their row's error."""
    try:
        yield
    except (RequestRejected, ConfigError):
        raise
    except RecursionError as error:
        raise RequestRejected(code, "the row holds a value that is nested too deeply") from error
    except (ValueError, TypeError, LookupError, ArithmeticError, AttributeError) as error:
        raise RequestRejected(code, f"the row cannot be rendered: {error}") from error


def _check_text(value: object) -> str:
    if isinstance(value, bytes):
        try:
            value = value.decode("utf-8")
        except UnicodeDecodeError as error:
            raise RequestRejected("not_utf8", f"prompt is not UTF-8: {error}") from error
    if not isinstance(value, str):
        raise RequestRejected("bad_prompt_type", f"prompt must be text, got {type(value).__name__}")
    if not value:
        raise RequestRejected("empty_prompt", "prompt is an empty text")
    return _check_utf8(value)


def _check_utf8(text: str) -> str:
    """Refuse lone surrogates, which Python allows in text and no encoding does."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestRejected("not_utf8", f"the prompt cannot be written as UTF-8: {error}") from error
    return text


def override_sampling(job: SamplingParams, row: Mapping[str, object]) -> SamplingParams:
    """The job's parameters with the row's own in place. Raises ``RequestRejected`` naming the column."""
    params = job
    for name in SAMPLING_FIELDS:
        value = row.get(name)
        if value is None:
            continue
        try:
            params = replace(params, **{name: _as_parameter(name, value)})
        except ValueError as error:
            raise RequestRejected("bad_sampling_param", f"column {name}: {error}") from error
    return params


def _as_parameter(name: str, value: Any) -> Any:
    """Bring a column's value to the parameter's type where nothing is lost; its own checks do the rest."""
    kinds = (_TYPES[name], *get_args(_TYPES[name]))
    if get_origin(_TYPES[name]) is tuple:
        if name == "stop" and isinstance(value, str):
            return (value,)
        if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
            raise ValueError(f"{name} must be a list, got {value!r}")
        return tuple(value)
    if int in kinds and isinstance(value, float) and value.is_integer():
        return int(value)  # nulls in a column of counts make it one of floats for some writers
    if float in kinds and type(value) is int and abs(value) <= 2**53:
        return float(value)
    return value


def build_renderer(
    model_path: str | Path,
    sampling: SamplingParams,
    chat: ChatOptions,
    *,
    template: str | None = None,
    max_model_len: int = 0,
) -> PromptRenderer:
    """Read the model folder's config, tokenizer and chat template. Raises ``ConfigError``.

    ``template`` is a Jinja file that replaces whatever the model folder says. ``max_model_len`` 0 is
    the model's own, which also bounds a larger one.
    """
    folder = Path(model_path)
    config = _read_json(folder / "config.json")
    text_config = config.get("text_config", config)
    vocab_size = _read_count(folder, text_config, "vocab_size")
    longest = _read_count(folder, text_config, "max_position_embeddings")
    tokenizer = _read_tokenizer(folder / "tokenizer.json")
    bos_token_id = config.get("bos_token_id", text_config.get("bos_token_id"))
    return PromptRenderer(
        tokenizer,
        _try_build_chat_encoder(folder, template, config, tokenizer),
        sampling,
        options=chat,
        vocab_size=vocab_size,
        max_model_len=min(max_model_len or longest, longest),
        bos_token_id=bos_token_id,
    )


def _try_build_chat_encoder(
    folder: Path, template: str | None, config: Mapping[str, Any], tokenizer: Tokenizer
) -> ChatEncoder | None:
    """The job's template if given, else the model folder's, else the release's encoding, else none."""
    source = read_template(Path(template)) if template is not None else find_template(folder)
    if source is None:
        # The release's turns are told apart by tokens of their own; spelt out in letters they mean nothing.
        if any(tokenizer.token_to_id(token) is None for token in (USER, ASSISTANT)):
            return None
        return ReleaseEncoder(read_tools_prose(folder))
    special = []
    for key, default in (("bos_token_id", BOS), ("eos_token_id", EOS)):
        token_id = config.get(key)
        token = tokenizer.id_to_token(token_id) if isinstance(token_id, int) else None
        special.append(default if token is None else token)
    return TemplateEncoder(source, *special)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"the model folder {path.parent} has no {path.name}") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


def _read_count(folder: Path, config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if type(value) is not int or value < 1:
        raise ConfigError(f"{folder / 'config.json'}: {key} must be a whole number above 0, got {value!r}")
    return value


def _read_tokenizer(path: Path) -> Tokenizer:
    _read_json(path)  # says what is wrong with a file that is missing or damaged
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise ConfigError(f"cannot read {path}: {error}") from error

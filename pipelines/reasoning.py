"""Where a completion's reasoning ends and its answer begins.

Owns the rule for one completion, by its token ids; it must not know rows, columns or how a prompt came
to end in an open thought.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tokenizers import Tokenizer

from engine import Completion, ConfigError, RequestOutput
from pipelines.chat import END_THINK, THINK

_TAIL = 32  # a template may put a few tokens after the one that opens a thought


class ReasoningSplitter:
    """Splits completions of prompts that end in an open thought.

    Raises ``ConfigError`` for a tokenizer that has no tokens around thoughts.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        think, end_think = tokenizer.token_to_id(THINK), tokenizer.token_to_id(END_THINK)
        if think is None or end_think is None:
            raise ConfigError(
                f"output.split_reasoning is set, but the tokenizer has no tokens {THINK} and {END_THINK}"
            )
        self._tokenizer, self._think, self._end_think = tokenizer, think, end_think

    def split(self, prompt_token_ids: Sequence[int], completion: Completion) -> tuple[str | None, str]:
        """(reasoning, answer). The reasoning is None where the prompt opened none.

        A thought that was never closed is all reasoning, and the answer empty.
        """
        if not self._is_open(prompt_token_ids):
            return None, completion.text
        if self._end_think not in completion.token_ids:
            return completion.text, ""
        thoughts = completion.token_ids[: completion.token_ids.index(self._end_think)]
        num_letters = len(self._tokenizer.decode(list(thoughts), skip_special_tokens=True))
        # The text may end earlier than the ids, before a stop string.
        reasoning, answer = completion.text[:num_letters], completion.text[num_letters:]
        return reasoning, answer.removeprefix(END_THINK)

    def _is_open(self, prompt_token_ids: Sequence[int]) -> bool:
        for token_id in reversed(prompt_token_ids[-_TAIL:]):
            if token_id in (self._think, self._end_think):
                return bool(token_id == self._think)
        return False


def split_output(
    splitter: ReasoningSplitter, prompt_token_ids: Sequence[int], output: RequestOutput
) -> tuple[RequestOutput, tuple[str | None, ...]]:
    """``output`` with the answers alone as its texts, and each sample's reasoning. Ids and digests stay."""
    pairs = [splitter.split(prompt_token_ids, completion) for completion in output.completions]
    completions = tuple(
        replace(completion, text=answer)
        for completion, (_, answer) in zip(output.completions, pairs, strict=True)
    )
    return replace(output, completions=completions), tuple(reasoning for reasoning, _ in pairs)

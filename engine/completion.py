"""A completion while it grows: ids, log-probabilities, text, and the rules that end it.

Knows a request's stop rules and the model's end token. It knows nothing of batches or caches.
"""

from __future__ import annotations

from engine.api import Completion, FinishReason, SamplingParams, TokenLogprobs
from engine.detokenizer import IncrementalDetokenizer, TokenBytes


class CompletionBuilder:
    """Collects one sample's tokens and says when it is complete."""

    def __init__(
        self, sampling: SamplingParams, *, index: int, eos_token_id: int, token_bytes: TokenBytes
    ) -> None:
        self._index = index
        self._end_ids = set(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            self._end_ids.add(eos_token_id)
        self._detokenizer = IncrementalDetokenizer(token_bytes, sampling.stop)
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._top_logprobs: list[TokenLogprobs] | None = None if sampling.logprobs is None else []

    def push(self, token_id: int, logprob: float, top: TokenLogprobs | None) -> bool:
        """Add a token; True when a stop rule ends the completion with it."""
        self._token_ids.append(token_id)
        self._logprobs.append(logprob)
        if self._top_logprobs is not None:
            assert top is not None, "the request asked for top log-probabilities"
            self._top_logprobs.append(top)
        if token_id in self._end_ids:
            return True
        self._detokenizer.push(token_id)
        return self._detokenizer.is_stopped

    def build(self, finish_reason: FinishReason) -> Completion:
        """The finished completion."""
        self._detokenizer.finish()
        return Completion(
            index=self._index,
            token_ids=tuple(self._token_ids),
            text=self._detokenizer.text,
            finish_reason=finish_reason,
            logprobs=tuple(self._logprobs),
            top_logprobs=None if self._top_logprobs is None else tuple(self._top_logprobs),
        )

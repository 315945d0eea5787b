"""The engine's public face: what it is asked, what it answers, and the protocol both sides hold to.

Pipelines and jobs speak to an engine through these types alone; only the rank actor builds a real
one. Nothing here may import torch or triton.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Collection
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Protocol

from engine.config import ResolvedConfig


class FinishReason(str, Enum):
    """Why a completion ended. ``STOP``: an end token, a stop id or a stop string; ``LENGTH``: a limit."""

    STOP = "stop"
    LENGTH = "length"


MIN_TEMPERATURE = 1e-5
"""Below it every draw is the greedy one, and logits divided by it are soon no numbers."""

MIN_REPETITION_PENALTY = 1e-3
"""Logits are divided by it in fp32, and must stay apart from each other there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request is sampled. ``temperature`` 0 is greedy and equals ``top_k`` 1; none lies between 0
    and ``MIN_TEMPERATURE``.

    ``max_tokens`` None means "as long as can be served". ``logprobs`` k returns the k most likely
    tokens of every position beside the chosen one. ``seed`` None takes the job's seed.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    max_tokens: int | None = 256
    n: int = 1
    logprobs: int | None = None

    def __post_init__(self) -> None:
        self._check_number("temperature", 0.0, 100.0)
        if 0.0 < self.temperature < MIN_TEMPERATURE:
            raise ValueError(
                f"temperature must be 0, for the most likely token, or at least {MIN_TEMPERATURE:g}, "
                f"got {self.temperature!r}"
            )
        self._check_number("top_p", 0.0, 1.0, low_open=True)
        self._check_number("min_p", 0.0, 1.0)
        self._check_number("repetition_penalty", MIN_REPETITION_PENALTY, 100.0)
        self._check_count("top_k", 0, 2**31 - 1)
        self._check_count("n", 1, 128)
        if self.max_tokens is not None:
            self._check_count("max_tokens", 1, 2**31 - 1)
        if self.logprobs is not None:
            self._check_count("logprobs", 0, 64)
        if self.seed is not None:
            self._check_count("seed", 0, 2**63 - 1)
        if not isinstance(self.ignore_eos, bool):
            raise ValueError(f"ignore_eos must be true or false, got {self.ignore_eos!r}")
        if isinstance(self.stop, str) or not all(isinstance(s, str) and s for s in self.stop):
            raise ValueError(f"stop must be a list of non-empty strings, got {self.stop!r}")
        is_text = isinstance(self.stop_token_ids, (str, bytes))  # whose items are numbers too
        if is_text or not all(type(i) is int and i >= 0 for i in self.stop_token_ids):
            raise ValueError(f"stop_token_ids must be a list of ids >= 0, got {self.stop_token_ids!r}")

    def _check_number(self, name: str, low: float, high: float, *, low_open: bool = False) -> None:
        value = getattr(self, name)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        # Neither NaN nor a whole number beyond the floats passes the comparison.
        if not is_number or not low <= value <= high or (low_open and value == low):
            bracket = "(" if low_open else "["
            raise ValueError(f"{name} must be a number in {bracket}{low:g}, {high:g}], got {value!r}")

    def _check_count(self, name: str, low: int, high: int) -> None:
        value = getattr(self, name)
        if type(value) is not int or not low <= value <= high:
            raise ValueError(f"{name} must be a whole number in [{low}, {high}], got {value!r}")


SAMPLING_FIELDS: tuple[str, ...] = tuple(f.name for f in fields(SamplingParams))


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One row as the engine sees it. ``request_id`` is the row id and keys the row's randomness.

    ``prefix_ends``: prompt positions where other rows are known to part from this one; a hint to the
    prefix cache, never a change of the answer.
    """

    request_id: str
    prompt_token_ids: SequenceOf[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    prefix_ends: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """The most likely tokens of one position, best first (ties by lowest id), from the raw logits."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One sample of a request.

    ``token_ids`` holds every generated id, the one that ended it included; ``text`` leaves out
    special tokens and ends before a stop string. ``logprobs`` are the chosen tokens' fp32
    log-probabilities from the raw logits; ``top_logprobs`` is None unless asked for.
    """

    index: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    logprobs: tuple[float, ...]
    top_logprobs: tuple[TokenLogprobs, ...] | None = None

    @property
    def output_digest(self) -> str:
        """Hash of ids and log-probability bits; equal digests prove equal answers."""
        return output_digest(self.token_ids, self.logprobs)


def output_digest(token_ids: SequenceOf[int], logprobs: SequenceOf[float]) -> str:
    """128-bit BLAKE2b, in hex, of the ids (int32) followed by the logprobs (fp32), little-endian."""
    if len(token_ids) != len(logprobs):
        raise ValueError(f"{len(token_ids)} token ids but {len(logprobs)} logprobs")
    count = len(token_ids)
    payload = struct.pack(f"<{count}i", *token_ids) + struct.pack(f"<{count}f", *logprobs)
    return hashlib.blake2b(payload, digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """A finished request: its ``n`` completions in sample order, and what it cost."""

    request_id: str
    completions: tuple[Completion, ...]
    num_prompt_tokens: int
    num_cached_tokens: int = 0
    num_preemptions: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Counters since the engine was built, and gauges of this moment.

    Recomputed rows (after a preemption) count as prefill or decode too, replayed ones (to refill rings behind
    a cached prefix) as neither. ``num_unfinished_tokens``: rows computed for requests that have not finished,
    which is what would be lost with the engine.
    """

    num_steps: int = 0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_cached_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_replayed_tokens: int = 0
    num_preemptions: int = 0
    num_unfinished_tokens: int = 0
    num_waiting: int = 0
    num_running: int = 0
    num_free_blocks: int = 0
    num_kv_blocks: int = 0


class Engine(Protocol):
    """What a rank drives. Not thread-safe: one loop owns it."""

    def add_request(self, request: Request) -> None:
        """Queue a request. Raises ``RequestRejected`` at once for what can never be served."""

    def abort(self, request_id: str) -> None:
        """Forget a request and free what it holds. An unknown id is ignored (it has finished)."""

    def step(self) -> list[RequestOutput]:
        """Run one batch; return the requests that finished in it. Raises ``EngineDead``."""

    def try_step_only(self, request_ids: Collection[str]) -> list[RequestOutput] | None:
        """The same of a batch of nothing but these requests; None when none of them has room now."""

    def await_device(self) -> None:
        """Until all that steps asked for is done. Raises ``EngineDead`` for what failed late.

        A step that samples nothing returns before the device has done it.
        """

    def has_unfinished(self) -> bool:
        """Whether a step would have work."""

    @property
    def is_shared(self) -> bool:
        """Whether other ranks step only together with this one: it then steps without work too."""

    @property
    def is_group_busy(self) -> bool:
        """Whether any rank of such a group had work when they last stepped."""

    def stats(self) -> EngineStats:
        """Counters and gauges."""

    def num_generated_tokens(self) -> dict[str, int]:
        """How many tokens each unfinished request has so far, all its samples together."""

    @property
    def resolved(self) -> ResolvedConfig:
        """What it runs with, after every "auto" was answered."""

    def restart(self, *, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        """Forget all cached prefixes and go on within these limits, none above the built ones.

        Only while nothing is unfinished. No answer depends on it; it serves to show that.
        """

"""An engine without a model, for tests of everything around one.

Answers are a pure function of a request's prompt ids, so a test knows every answer beforehand.
Prompts that hold certain ids misbehave, as scripted.
"""

from __future__ import annotations

import hashlib
import os
import signal
import time
from collections import deque
from collections.abc import Collection
from dataclasses import replace

from engine import (
    Completion,
    EngineConfig,
    EngineDead,
    EngineStats,
    FinishReason,
    Request,
    RequestOutput,
    RequestRejected,
    ResolvedConfig,
    TokenLogprobs,
)

POISON_ID = 113
"""A prompt with this id kills whatever process runs it, once it has as many tokens as ids behind this one."""

REFUSED_ID = 114
"""A prompt with this id is rejected by ``add_request``."""


def expected_token_ids(prompt_token_ids: list[int], sample: int = 0) -> list[int]:
    """What the fake answers."""
    digest = hashlib.blake2b(repr((list(prompt_token_ids), sample)).encode(), digest_size=8).digest()
    return [1 + byte % 100 for byte in digest[: 1 + digest[0] % 8]]


def expected_text(prompt_token_ids: list[int], sample: int = 0) -> str:
    """The fake's text of that."""
    return " ".join(map(str, expected_token_ids(prompt_token_ids, sample)))


class FakeEngine:
    """Runs up to ``max_num_seqs`` requests, one token each a step; ``step_s`` is a step's length."""

    def __init__(self, config: EngineConfig, *, step_s: float = 0.0, dies_at_step: int | None = None) -> None:
        self._config = config
        self._step_s = step_s
        self._dies_at_step = dies_at_step
        self._waiting: deque[Request] = deque()
        self._running: dict[str, tuple[Request, int]] = {}
        self.num_steps = 0
        self.max_num_waiting = 0
        self.num_running_at_steps: list[int] = []
        self.tokens_at_steps: list[dict[str, int]] = []
        self._num_prefill_tokens = self._num_decode_tokens = 0

    def add_request(self, request: Request) -> None:
        if REFUSED_ID in request.prompt_token_ids:
            raise RequestRejected("kv_too_small", "scripted")
        self._waiting.append(request)
        self.max_num_waiting = max(self.max_num_waiting, len(self._waiting))

    def abort(self, request_id: str) -> None:
        self._running.pop(request_id, None)
        self._waiting = deque(r for r in self._waiting if r.request_id != request_id)

    def step(self) -> list[RequestOutput]:
        return self._step([*self._running, *(request.request_id for request in self._waiting)])

    def try_step_only(self, request_ids: Collection[str]) -> list[RequestOutput] | None:
        has_room = len(self._running) < self._config.max_num_seqs
        if not any(
            request_id in self._running
            or (has_room and self._waiting and self._waiting[0].request_id == request_id)
            for request_id in request_ids
        ):
            return None
        return self._step(request_ids)

    def await_device(self) -> None:
        """Its steps leave nothing to be done later."""

    def _step(self, only: Collection[str]) -> list[RequestOutput]:
        self.num_steps += 1
        if self.num_steps == self._dies_at_step:
            raise EngineDead("scripted")
        while (
            self._waiting
            and self._waiting[0].request_id in only
            and len(self._running) < self._config.max_num_seqs
        ):
            request = self._waiting.popleft()
            self._running[request.request_id] = (request, 0)
            self._num_prefill_tokens += len(request.prompt_token_ids)
        self.num_running_at_steps.append(len(self._running))
        self.tokens_at_steps.append({name: n for name, (_, n) in self._running.items() if name in only})
        if self._step_s:
            time.sleep(self._step_s)
        outputs = []
        for request_id, (request, num_tokens) in list(self._running.items()):
            if request_id not in only:
                continue
            ids = list(request.prompt_token_ids)
            if POISON_ID in ids and num_tokens == len(ids) - 1 - ids.index(POISON_ID):
                self._die()
            longest = max(
                len(expected_token_ids(list(request.prompt_token_ids), s)) for s in range(request.sampling.n)
            )
            self._running[request_id] = (request, num_tokens + 1)
            self._num_decode_tokens += 1
            if num_tokens + 1 >= longest:
                del self._running[request_id]
                outputs.append(self._output(request))
        return outputs

    def _die(self) -> None:
        raise EngineDead("poison")

    def _output(self, request: Request) -> RequestOutput:
        completions = []
        for sample in range(request.sampling.n):
            ids = tuple(expected_token_ids(list(request.prompt_token_ids), sample))
            logprobs = tuple(-0.5 for _ in ids)
            k = request.sampling.logprobs
            top = TokenLogprobs(
                token_ids=tuple(range(k or 0)), logprobs=tuple(-1.0 - i for i in range(k or 0))
            )
            completions.append(
                Completion(
                    index=sample,
                    token_ids=ids,
                    text=" ".join(map(str, ids)),
                    finish_reason=FinishReason.STOP,
                    logprobs=logprobs,
                    top_logprobs=None if k is None else tuple(top for _ in ids),
                )
            )
        return RequestOutput(
            request_id=request.request_id,
            completions=tuple(completions),
            num_prompt_tokens=len(request.prompt_token_ids),
            num_cached_tokens=1,
            num_preemptions=len(request.prompt_token_ids) % 3,
        )

    def has_unfinished(self) -> bool:
        return bool(self._waiting or self._running)

    @property
    def is_shared(self) -> bool:
        return False

    @property
    def is_group_busy(self) -> bool:
        return False

    @property
    def resolved(self) -> ResolvedConfig:
        config = self._config
        return ResolvedConfig(
            model=config.model,
            dtype="float32",
            device="cpu",
            device_name="fake",
            kernel_impl="torch",
            activation_quantisation="none",
            cache_quantisation=config.cache_quantisation,
            max_model_len=config.max_model_len,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            num_kv_blocks=config.num_kv_blocks,
            num_host_kv_blocks=config.num_host_kv_blocks,
            num_host_states=config.num_host_states,
            enable_prefix_caching=config.enable_prefix_caching,
            decoder_prefill=config.decoder_prefill,
            preemption=config.preemption,
            max_num_preemptions=config.max_num_preemptions,
            seed=config.seed,
        )

    def restart(self, *, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self._config = replace(
            self._config, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens
        )

    def num_generated_tokens(self) -> dict[str, int]:
        running = {request_id: num_tokens for request_id, (_, num_tokens) in self._running.items()}
        return {request.request_id: 0 for request in self._waiting} | running

    def stats(self) -> EngineStats:
        running = self._running.values()
        return EngineStats(
            num_steps=self.num_steps,
            num_prefill_tokens=self._num_prefill_tokens,
            num_decode_tokens=self._num_decode_tokens,
            num_unfinished_tokens=sum(len(request.prompt_token_ids) + done for request, done in running),
            num_waiting=len(self._waiting),
            num_running=len(running),
            num_free_blocks=self._config.max_num_seqs - len(running),
            num_kv_blocks=self._config.max_num_seqs,
        )


class HangingEngine(FakeEngine):
    """Poison makes a step last for ever, as a collective does whose peer is gone."""

    def _die(self) -> None:
        time.sleep(3600)


class KilledEngine(FakeEngine):
    """Poison ends the whole process, as a fault in a kernel's driver does."""

    def _die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def build_fast(config: EngineConfig) -> FakeEngine:
    """For jobs that should be over soon."""
    return FakeEngine(config)


def build_slow(config: EngineConfig) -> FakeEngine:
    """For jobs that a test means to interrupt."""
    return FakeEngine(config, step_s=0.02)


def build_killed(config: EngineConfig) -> FakeEngine:
    """For jobs with a poison row."""
    return KilledEngine(config)


def build_hanging(config: EngineConfig) -> FakeEngine:
    """For jobs with a row that a rank never comes back from."""
    return HangingEngine(config)

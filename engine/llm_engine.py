"""LLMEngine: add_request / step / abort. One loop owns it; schedule, run, sample, update.

It joins the scheduler (counts), the runner (tensors), the sampler and the completions; each of them
knows only its own part.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from tokenizers import Tokenizer

from engine.api import Completion, EngineStats, FinishReason, Request, RequestOutput
from engine.completion import CompletionBuilder
from engine.config import EngineConfig, ReplicaPlace, ResolvedConfig, most_total_tokens
from engine.detokenizer import TokenBytes
from engine.errors import ConfigError, EngineDead, PeerLost, RequestRejected
from engine.model_runner import ModelRunner
from engine.models.deepseek_v41_config import load_model_config
from engine.sampler import SampledTokens, Sampler, SamplingRow
from engine.scheduled_batch import ScheduledBatch
from engine.scheduler import Scheduler, SchedulerConfig
from engine.sequence import Sequence


@dataclass(slots=True)
class _RequestState:
    """A request's sequences, one a sample, and what has finished of them."""

    request: Request
    sequences: list[Sequence]
    builders: list[CompletionBuilder]
    completions: list[Completion] = field(default_factory=list)


class LLMEngine:
    """The ``Engine`` protocol on one rank, alone or among those that share the experts.

    Ranks of a group step together: each calls ``step`` whether or not it has work, until ``is_closed``.
    """

    def __init__(self, runner: ModelRunner, tokenizer: Tokenizer) -> None:
        resolved = runner.resolved
        self.resolved: ResolvedConfig = resolved
        self.runner = runner
        self._eos_token_id = runner.model_config.eos_token_id
        self._vocab_size = runner.model_config.vocab_size
        self._token_bytes = TokenBytes(tokenizer)
        self._sampler = Sampler(self._vocab_size, resolved.seed)
        self.scheduler = Scheduler(_scheduler_config(resolved), runner.shape)
        self._requests: dict[str, _RequestState] = {}
        self._next_seq_id = 0
        self._death: EngineDead | None = None

    @classmethod
    def build(cls, config: EngineConfig, place: ReplicaPlace | None = None) -> LLMEngine:
        """Load the model folder, size the caches, wait for the other ranks. Raises ``ConfigError``."""
        model_config = load_model_config(config.model)
        tokenizer_path = Path(config.model) / "tokenizer.json"
        if not tokenizer_path.is_file():
            raise ConfigError(f"model folder {config.model} has no tokenizer.json")
        tokenizer = Tokenizer.from_file(str(tokenizer_path))
        return cls(ModelRunner(config, model_config, tokenizer, place), tokenizer)

    def add_request(self, request: Request) -> None:
        """Queue a request, one sequence a sample. Raises ``RequestRejected`` and keeps nothing of it."""
        self._expect_alive()
        if request.request_id in self._requests:
            raise ValueError(f"request {request.request_id} is in the engine already")
        outside = next((t for t in request.prompt_token_ids if not 0 <= t < self._vocab_size), None)
        if outside is not None:
            raise RequestRejected("bad_token_id", f"token id {outside} is outside 0..{self._vocab_size - 1}")
        sampling = request.sampling
        most_tokens = most_total_tokens(
            len(request.prompt_token_ids),
            sampling.max_tokens,
            max_model_len=self.resolved.max_model_len,
            num_kv_blocks=self.resolved.num_kv_blocks,
        )
        sequences = []
        for index in range(sampling.n):
            seq = Sequence.build(
                request,
                sample_index=index,
                seq_id=self._next_seq_id,
                max_model_len=most_tokens,
            )
            self._next_seq_id += 1
            # All samples are alike to admission: either the first is refused, or none is.
            self.scheduler.add(seq, request.prefix_ends)
            sequences.append(seq)
        builders = [
            CompletionBuilder(
                sampling, index=i, eos_token_id=self._eos_token_id, token_bytes=self._token_bytes
            )
            for i in range(sampling.n)
        ]
        self._requests[request.request_id] = _RequestState(request, sequences, builders)

    def abort(self, request_id: str) -> None:
        """Forget a request; an unknown id has finished already."""
        state = self._requests.pop(request_id, None)
        if state is not None:
            done = {completion.index for completion in state.completions}
            for seq in state.sequences:
                if seq.sample_index not in done:
                    self.scheduler.abort(seq)

    def has_unfinished(self) -> bool:
        """Whether anything waits or runs."""
        return self.scheduler.has_unfinished()

    def step(self) -> list[RequestOutput]:
        """One batch. Raises ``PeerLost`` when another rank fails, ``EngineDead`` for all else that fails.

        The other ranks' step then ends, and whatever this engine is asked to do raises the same.
        """
        with self._until_death():
            return self._run_step(self.scheduler.schedule()) or []

    def try_step_only(self, request_ids: Collection[str]) -> list[RequestOutput] | None:
        """One batch of these requests alone; None when none of them has room now. Raises as ``step``."""
        only = {seq.seq_id for name in request_ids for seq in self._requests[name].sequences}
        with self._until_death():
            outputs = self._run_step(self.scheduler.schedule(only))
        self.await_device()
        return outputs

    def await_device(self) -> None:
        """Until all that steps asked for is done. Raises as ``step``, for what failed late."""
        with self._until_death():
            self.runner.await_device()

    def _run_step(self, batch: ScheduledBatch | None) -> list[RequestOutput] | None:
        if batch is None:
            group = self.runner.group
            if group is not None:
                self.runner.join()
                if group.is_over:
                    group.disconnect()
            return None
        logits = self.runner.run(batch)
        if self.runner.is_read_ahead:
            spans = self.scheduler.upcoming()
            self.runner.look_ahead([(seq.token_ids, start, end) for seq, start, end in spans])
        sampled = self._sampler.sample(logits, self._sampling_rows(batch))
        self.scheduler.finish_step(batch)
        return self._update(batch, sampled)

    @contextmanager
    def _until_death(self) -> Iterator[None]:
        """What fails in here is this engine's end: neither its device nor its own books are trusted again.

        Of our own mistakes, too: a rank that only fell out of a step would leave the others waiting for it.
        """
        self._expect_alive()
        try:
            yield
        except Exception as error:
            self._death = self._failed(error)
            raise self._death from error

    def _expect_alive(self) -> None:
        if self._death is not None:
            raise type(self._death)(str(self._death))

    def _failed(self, error: Exception) -> EngineDead:
        has_lost_peer, group = isinstance(error, PeerLost), self.runner.group
        if group is not None:
            # Only a device fails for having waited; a mistake on the host is one however long the step took.
            has_lost_peer |= isinstance(error, RuntimeError) and group.has_waited_in_vain
            group.abandon()
        kind = PeerLost if has_lost_peer else EngineDead
        reason = error if isinstance(error, EngineDead) else f"{type(error).__name__}: {error}"
        return kind(f"the step failed: {reason}")

    @property
    def is_shared(self) -> bool:
        """Whether other ranks step only together with this one."""
        return self.runner.group is not None

    @property
    def is_group_busy(self) -> bool:
        """Whether any rank of the group had work when they last stepped."""
        return self.runner.group is not None and self.runner.group.is_busy

    def close(self) -> None:
        """No request will follow. Among others, step on until ``is_closed``: they may need these experts."""
        if self.runner.group is not None:
            self.runner.group.wants_stop = True

    @property
    def is_closed(self) -> bool:
        """Whether every rank of the group was closed and has finished."""
        group = self.runner.group
        return not self.has_unfinished() if group is None else group.is_over

    def restart(self, *, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        """Forget all cached prefixes and go on within other limits; the loaded model and its memory stay."""
        self._expect_alive()
        if self.has_unfinished():
            raise ValueError("an engine is restarted only when nothing is unfinished")
        built = self.runner.resolved
        for name, asked in (
            ("max_num_seqs", max_num_seqs),
            ("max_num_batched_tokens", max_num_batched_tokens),
        ):
            if not 1 <= asked <= getattr(built, name):
                raise ValueError(f"{name} must lie in 1..{getattr(built, name)}, got {asked}")
        self.resolved = replace(
            built, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens
        )
        self.scheduler = Scheduler(_scheduler_config(self.resolved), self.runner.shape)

    def stats(self) -> EngineStats:
        """Counters since the engine was built, and gauges of this moment."""
        counters = self.scheduler.stats
        return EngineStats(
            num_steps=counters.num_steps,
            num_prefill_tokens=counters.num_prefill_tokens,
            num_decode_tokens=counters.num_decode_tokens,
            num_cached_tokens=counters.num_cached_tokens,
            num_recomputed_tokens=counters.num_recomputed_tokens,
            num_replayed_tokens=counters.num_replayed_tokens,
            num_preemptions=counters.num_preemptions,
            num_unfinished_tokens=self.scheduler.num_unfinished_tokens,
            num_waiting=self.scheduler.num_waiting,
            num_running=self.scheduler.num_running,
            num_free_blocks=self.scheduler.blocks.num_available_blocks,
            num_kv_blocks=self.resolved.num_kv_blocks,
        )

    def num_generated_tokens(self) -> dict[str, int]:
        """How many tokens each unfinished request has so far, all its samples together."""
        return {
            request_id: sum([len(seq.token_ids) - seq.num_prompt_tokens for seq in state.sequences])
            for request_id, state in self._requests.items()
        }

    def _sampling_rows(self, batch: ScheduledBatch) -> list[SamplingRow]:
        rows = []
        for chunk in batch.chunks:
            if chunk.samples:
                seq = chunk.seq
                sampling = seq.request.sampling
                rows.append(
                    SamplingRow(
                        params=sampling,
                        request_id=seq.request.request_id,
                        sample_index=seq.sample_index,
                        position=seq.num_tokens,
                        token_ids=None if sampling.repetition_penalty == 1.0 else seq.token_ids,
                    )
                )
        return rows

    def _update(self, batch: ScheduledBatch, sampled: SampledTokens) -> list[RequestOutput]:
        outputs = []
        sampling_chunks = [chunk for chunk in batch.chunks if chunk.samples]
        for chunk, token_id, logprob, top in zip(sampling_chunks, *sampled, strict=True):
            seq = chunk.seq
            state = self._requests[seq.request.request_id]
            builder = state.builders[seq.sample_index]
            seq.append_token(token_id)
            if builder.push(token_id, logprob, top):
                reason = FinishReason.STOP
            elif seq.num_tokens >= seq.max_total_tokens:
                reason = FinishReason.LENGTH
            else:
                continue
            self.scheduler.finish(seq)
            state.completions.append(builder.build(reason))
            if len(state.completions) == len(state.sequences):
                outputs.append(_output(state))
                del self._requests[seq.request.request_id]
        return outputs


def _scheduler_config(resolved: ResolvedConfig) -> SchedulerConfig:
    return SchedulerConfig(
        max_model_len=resolved.max_model_len,
        max_num_seqs=resolved.max_num_seqs,
        max_num_batched_tokens=resolved.max_num_batched_tokens,
        num_kv_blocks=resolved.num_kv_blocks,
        num_host_blocks=resolved.num_host_kv_blocks,
        num_host_states=resolved.num_host_states,
        enable_prefix_caching=resolved.enable_prefix_caching,
        decoder_prefill=resolved.decoder_prefill,
        preemption=resolved.preemption,
        max_num_preemptions=resolved.max_num_preemptions,
    )


def _output(state: _RequestState) -> RequestOutput:
    first = state.sequences[0]
    return RequestOutput(
        request_id=state.request.request_id,
        completions=tuple(sorted(state.completions, key=lambda completion: completion.index)),
        num_prompt_tokens=first.num_prompt_tokens,
        num_cached_tokens=first.num_cached_tokens,
        num_preemptions=sum(seq.num_preemptions for seq in state.sequences),
    )

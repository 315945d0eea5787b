"""The scheduler seen from outside: random traces on a simulated device, and the named cases."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from engine.api import Request, SamplingParams
from engine.config import KV_BLOCK_SIZE
from engine.errors import RequestRejected
from engine.layer_rows import ModelShape
from engine.scheduled_batch import ScheduledBatch
from engine.scheduler import Scheduler, SchedulerConfig
from engine.sequence import Sequence, SequenceStatus
from tests.engine.simulated_device import SimulatedDevice

SHAPES = (
    ModelShape(num_layers=4, window=5, decoder_start=2),
    ModelShape(num_layers=3, window=16, decoder_start=1),
    ModelShape(num_layers=2, window=3, decoder_start=0),
)


def build_sequence(seq_id: int, prompt: list[int], max_tokens: int | None, limit: int = 4096) -> Sequence:
    request = Request(
        request_id=f"r#{seq_id}",
        prompt_token_ids=prompt,
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0),
    )
    return Sequence.build(request, sample_index=0, seq_id=seq_id, max_model_len=limit)


class Harness:
    """A scheduler, its simulated device, and the loop that an engine would run."""

    def __init__(self, shape: ModelShape, **settings: object) -> None:
        defaults = {
            "max_model_len": 4096,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 64,
            "num_kv_blocks": 16,
            "num_host_blocks": 16,
            "num_host_states": 8,
        }
        self.config = SchedulerConfig(**{**defaults, **settings})  # type: ignore[arg-type]
        self.scheduler = Scheduler(self.config, shape)
        self.device = SimulatedDevice(shape, is_bounded=self.config.decoder_prefill == "bounded")
        self.live: list[Sequence] = []
        self.done: list[Sequence] = []

    def add(self, seq: Sequence, prefix_ends: Iterable[int] = ()) -> Sequence:
        self.scheduler.add(seq, prefix_ends)
        self.live.append(seq)
        return seq

    def step(self, stop_chance: float = 0.0, rng: random.Random | None = None) -> ScheduledBatch:
        running = {seq for seq in self.live if seq.status is SequenceStatus.RUNNING}
        batch = self.scheduler.schedule()
        assert batch is not None
        self._check_batch(batch)
        in_step = {chunk.seq for chunk in batch.chunks}
        assert running <= in_step or not in_step - running, "one joins while another lacks blocks"
        self.scheduler.check_integrity()
        self.device.run(batch)
        self.scheduler.finish_step(batch)
        for chunk in batch.chunks:
            if chunk.samples:
                seq = chunk.seq
                # The next token is a function of the whole prefix, as a model's is.
                seq.append_token(hash(tuple(seq.token_ids)) % 3)
                is_stopped = rng is not None and rng.random() < stop_chance
                if is_stopped or seq.num_tokens == seq.max_total_tokens:
                    self.scheduler.finish(seq)
                    self.live.remove(seq)
                    self.done.append(seq)
        self.scheduler.check_integrity()
        return batch

    def run(self, max_steps: int = 20_000) -> int:
        steps = 0
        while self.scheduler.has_unfinished():
            self.step()
            steps += 1
            assert steps <= max_steps, "no end in sight"
        assert self.scheduler.schedule() is None
        return steps

    def _check_batch(self, batch: ScheduledBatch) -> None:
        assert batch.chunks
        assert 0 < batch.num_tokens <= self.config.max_num_batched_tokens
        assert len({chunk.seq for chunk in batch.chunks}) == len(batch.chunks) <= self.config.max_num_seqs
        for chunk in batch.chunks:
            assert chunk.num_tokens > 0
            assert chunk.start == chunk.seq.num_computed_tokens
            assert chunk.end <= chunk.tail_end <= chunk.seq.num_tokens
            assert chunk.samples == (chunk.end == chunk.seq.num_tokens)
            assert chunk.seq.status is SequenceStatus.RUNNING


def random_settings(rng: random.Random) -> dict[str, object]:
    return {
        "max_num_seqs": rng.choice([2, 6, 6, 12]),
        "max_num_batched_tokens": rng.choice([5, 16, 64, 100, 256]),
        "num_kv_blocks": rng.choice([6, 8, 12]),
        "num_host_blocks": rng.choice([0, 4, 16, 40]),
        "num_host_states": rng.choice([0, 2, 6]),
        "enable_prefix_caching": rng.random() < 0.8,
        "decoder_prefill": rng.choice(["exact", "exact", "full", "bounded"]),
        "preemption": rng.choice(["offload", "offload", "recompute"]),
        "max_num_preemptions": rng.choice([0, 1, 3]),
        "max_num_bypasses": rng.choice([0, 2, 8]),
    }


@pytest.mark.parametrize("seed", range(25))
def test_random_traces_read_only_the_right_rows(seed: int) -> None:
    """Mixed arrivals, shared prefixes, aborts and stops: every read is right. The test's id is its seed."""
    rng = random.Random(seed)
    harness = Harness(rng.choice(SHAPES), **random_settings(rng))
    limit = harness.config.num_kv_blocks * KV_BLOCK_SIZE
    prefixes = [[rng.randrange(3) for _ in range(rng.choice([30, 64, 70, 130]))] for _ in range(3)]
    num_added = 0
    for _ in range(150):
        if num_added < 30 and rng.random() < 0.6:
            shared = rng.choice(prefixes)
            prompt = shared[: rng.randrange(1, len(shared) + 1)] if rng.random() < 0.2 else list(shared)
            prompt += [rng.randrange(3) for _ in range(rng.choice([0, 1, 10, 60]))]
            seq = build_sequence(num_added, prompt, min(rng.choice([1, 20, 70, 130]), limit - len(prompt)))
            harness.add(seq, [len(shared)] if rng.random() < 0.3 else ())
            num_added += 1
        if harness.live and rng.random() < 0.02:
            seq = harness.live.pop(rng.randrange(len(harness.live)))
            harness.scheduler.abort(seq)
            harness.scheduler.check_integrity()
        if harness.scheduler.has_unfinished():
            harness.step(stop_chance=0.002, rng=rng)
    harness.run()
    assert all(seq.num_preemptions <= harness.config.max_num_preemptions for seq in harness.done)
    stats = harness.scheduler.stats
    assert stats.num_preemptions >= sum(seq.num_preemptions for seq in harness.done)


def sequential(start: int, count: int) -> list[int]:
    return list(range(start, start + count))


@pytest.mark.parametrize("count", [0, 64, 65, 4096])
def test_a_prompt_that_can_never_be_served_is_refused_at_once(count: int) -> None:
    harness = Harness(SHAPES[0], max_model_len=64, num_kv_blocks=64)
    with pytest.raises(RequestRejected) as refusal:
        harness.add(build_sequence(0, [1] * count, 5, limit=64))
    assert refusal.value.code == ("prompt_too_long" if count else "empty_prompt")
    assert count == 0 or (str(count) in refusal.value.message and "63" in refusal.value.message)
    assert not harness.scheduler.has_unfinished()


def test_c05_a_row_larger_than_the_pool_is_refused_and_the_others_finish() -> None:
    harness = Harness(SHAPES[0], num_kv_blocks=16)
    with pytest.raises(RequestRejected, match="1024") as refusal:
        harness.add(build_sequence(0, [1] * 1100, 20))
    assert refusal.value.code == "kv_too_small"
    for seq_id in (1, 2):
        harness.add(build_sequence(seq_id, [seq_id] * 50, 20))
    harness.run()
    assert [seq.num_tokens - seq.num_prompt_tokens for seq in harness.done] == [20, 20]


def test_a_sequence_may_fill_the_pool_to_its_last_token() -> None:
    harness = Harness(SHAPES[0], num_kv_blocks=2, max_num_batched_tokens=256)
    harness.add(build_sequence(0, [1] * 100, 29))
    harness.run()
    assert harness.done[0].num_tokens == 129
    with pytest.raises(RequestRejected):
        harness.add(build_sequence(1, [1] * 100, 30))


@pytest.mark.parametrize(
    ("is_caching", "preemption", "max_num_preemptions"),
    [
        (False, "offload", 3),
        (True, "offload", 1),
        (False, "recompute", 1),
        (True, "recompute", 3),
        (True, "offload", 0),
    ],
)
def test_c06_preemptions_are_bounded_and_change_no_token(
    is_caching: bool, preemption: str, max_num_preemptions: int
) -> None:
    """Pool 1024, 8 rows of 60 + 300 tokens, chunk 64: all finish, as they do in a pool of 8192."""
    answers = []
    for num_blocks in (16, 128):
        harness = Harness(
            SHAPES[0],
            num_kv_blocks=num_blocks,
            enable_prefix_caching=is_caching,
            preemption=preemption,
            max_num_preemptions=max_num_preemptions,
            num_host_blocks=64,
        )
        for seq_id in range(8):
            harness.add(build_sequence(seq_id, [seq_id] * 60, 300))
        harness.run(max_steps=8 * 360)
        assert len(harness.done) == 8
        counts = [seq.num_preemptions for seq in harness.done]
        assert max(counts) <= max_num_preemptions
        assert sum(counts) == harness.scheduler.stats.num_preemptions
        assert (sum(counts) > 0) == (num_blocks == 16 and max_num_preemptions > 0)
        if preemption == "offload":
            assert harness.scheduler.stats.num_offloads == sum(counts)
            assert harness.scheduler.stats.num_recomputed_tokens == 0
        answers.append({seq.seq_id: seq.token_ids[seq.num_prompt_tokens :] for seq in harness.done})
    assert answers[0] == answers[1]


def test_preemption_recomputes_once_the_host_budget_is_spent() -> None:
    harness = Harness(SHAPES[0], num_kv_blocks=16, num_host_blocks=3, enable_prefix_caching=False)
    for seq_id in range(8):
        harness.add(build_sequence(seq_id, [seq_id] * 60, 300))
    harness.run()
    stats = harness.scheduler.stats
    assert 0 < stats.num_offloads < stats.num_preemptions
    assert stats.num_recomputed_tokens == sum(seq.num_recomputed_tokens for seq in harness.done) > 0


@pytest.mark.parametrize("chunk", [16, 64, 256])
def test_c07_prompts_around_a_multiple_of_the_chunk(chunk: int) -> None:
    harness = Harness(SHAPES[1], max_num_batched_tokens=chunk, num_kv_blocks=128, max_num_seqs=12)
    for seq_id, count in enumerate(k * chunk + d for k in range(1, 5) for d in (-1, 0, 1)):
        harness.add(build_sequence(seq_id, [seq_id, *[1] * (count - 1)], 9))
    harness.run()
    assert len(harness.done) == 12


def test_steps_are_full_while_prompts_wait() -> None:
    """Decodes go first, the running prefills next, and waiting prompts fill what is left of the budget."""
    harness = Harness(SHAPES[0], num_kv_blocks=128, max_num_batched_tokens=100, enable_prefix_caching=False)
    total = 0
    for seq_id, count in enumerate((30, 250, 10, 70, 130, 64, 1)):
        harness.add(build_sequence(seq_id, [seq_id] * count, 50))
        total += count
    num_prefilled = 0
    while num_prefilled < total:
        batch = harness.step()
        num_prefilled = harness.scheduler.stats.num_prefill_tokens
        assert batch.num_tokens == 100 or num_prefilled == total
        is_decode = [chunk.seq.num_tokens > chunk.seq.num_prompt_tokens + 1 for chunk in batch.chunks]
        assert is_decode == sorted(is_decode, reverse=True)


def test_a_head_that_does_not_fit_is_passed_a_bounded_number_of_times() -> None:
    harness = Harness(
        SHAPES[0],
        num_kv_blocks=16,
        max_num_batched_tokens=1024,
        max_num_bypasses=2,
        enable_prefix_caching=False,
    )
    holder = harness.add(build_sequence(0, [0] * 500, 100))
    harness.step()
    head = harness.add(build_sequence(1, [1] * 900, 10))
    for seq_id in range(2, 7):
        harness.add(build_sequence(seq_id, [seq_id] * 20, 1))
    while head.status is SequenceStatus.WAITING:
        harness.step()
    assert {seq.seq_id for seq in harness.done} == {0, 2, 3}
    assert holder.status is SequenceStatus.FINISHED
    harness.run()
    assert len(harness.done) == 7


@pytest.mark.parametrize("is_colliding", [False, True])
@pytest.mark.parametrize("mode", ["exact", "full", "bounded"])
def test_c08_prompts_sharing_2000_tokens(mode: str, is_colliding: bool) -> None:
    """Cold, warm and evicted; the hash may even be the same for every block."""
    shape = ModelShape(num_layers=3, window=16, decoder_start=1)
    harness = Harness(
        shape,
        decoder_prefill=mode,
        num_kv_blocks=80,
        max_num_batched_tokens=512,
        num_host_blocks=8,
    )
    if is_colliding:
        harness.scheduler = Scheduler(harness.config, shape, hash_function=lambda parent, tokens: 7)
    shared = sequential(0, 2000)
    for seq_id in range(16):
        harness.add(build_sequence(seq_id, shared + [3000 + seq_id] * 10, 4))
    harness.run()
    reach = 1984 - 1 - (shape.window - 1) * shape.num_layers
    hits = sorted(seq.num_cached_tokens for seq in harness.done)
    assert hits[0] == 0
    assert all(hit >= reach for hit in hits[1:])
    assert harness.scheduler.stats.num_cached_tokens == sum(hits)

    for seq_id in range(16, 20):
        harness.add(build_sequence(seq_id, shared + [3000 + seq_id - 16] * 10, 4))
    harness.run()
    assert all(seq.num_cached_tokens >= reach for seq in harness.done[16:])

    harness.add(build_sequence(20, sequential(5000, 4000), 4))
    harness.run()
    harness.add(build_sequence(21, shared + [1] * 10, 4))
    harness.run()
    assert harness.done[-1].num_cached_tokens < reach


def prefill(harness: Harness, prompt: list[int], prefix_ends: Iterable[int] = ()) -> Sequence:
    """Run one more prompt to its end and return its sequence."""
    harness.add(build_sequence(len(harness.done), prompt, 1), prefix_ends)
    harness.run()
    return harness.done[-1]


def test_a_hit_replays_until_it_was_seen_twice_and_then_restores_a_snapshot() -> None:
    shape = ModelShape(num_layers=4, window=5, decoder_start=2)
    harness = Harness(shape, num_kv_blocks=40, max_num_batched_tokens=512)
    shared = sequential(0, 320)
    starts = [prefill(harness, shared + [1000 + i] * 100).num_cached_tokens for i in range(4)]
    # The first computes; the second replays the encoder's tail; the third the whole tail, for a snapshot.
    assert starts == [0, 320 - 4 * 2, 320 - 1 - 4 * 4, 320]
    assert harness.scheduler.stats.num_snapshots == 1
    assert harness.scheduler.stats.num_replayed_tokens == 8 + 17


def test_a_known_prefix_end_is_kept_by_the_first_that_passes_it() -> None:
    harness = Harness(SHAPES[0], num_kv_blocks=40, max_num_batched_tokens=512)
    shared = sequential(0, 333)
    first = prefill(harness, shared + [7] * 90, prefix_ends=[333])
    second = prefill(harness, shared + [8] * 90)
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 320)
    assert harness.scheduler.stats.num_replayed_tokens == 0


def test_a_dear_snapshot_gives_way_to_a_replay() -> None:
    harness = Harness(SHAPES[0], num_kv_blocks=40, max_num_batched_tokens=512, snapshot_cost_tokens=1000)
    prefill(harness, sequential(0, 320) + [7] * 90, prefix_ends=[320])
    assert prefill(harness, sequential(0, 320) + [8] * 90).num_cached_tokens == 320 - 4 * 2


def test_without_host_memory_every_hit_is_replayed() -> None:
    harness = Harness(
        SHAPES[0], num_kv_blocks=40, max_num_batched_tokens=512, num_host_blocks=0, num_host_states=0
    )
    starts = [prefill(harness, sequential(0, 320) + [i] * 90, [320]).num_cached_tokens for i in range(4)]
    assert starts == [0, 312, 312, 312]
    assert harness.scheduler.stats.num_snapshots == 0


def test_evicted_blocks_come_back_from_host_memory() -> None:
    harness = Harness(SHAPES[0], num_kv_blocks=10, max_num_batched_tokens=512, num_host_blocks=20)
    prefill(harness, sequential(0, 400))
    prefill(harness, sequential(1000, 600))
    batch_moves = []
    harness.add(build_sequence(2, sequential(0, 400), 1))
    while harness.scheduler.has_unfinished():
        batch_moves += harness.step().moves_before
    assert harness.done[-1].num_cached_tokens > 300
    assert sum(m.kind == "block" and m.source_place == "host" for m in batch_moves) >= 5


def test_the_decoder_half_runs_on_the_tail_only() -> None:
    """One long prompt: ``exact`` cuts the rows that nothing reads, ``full`` none, ``bounded`` the most."""
    shape = ModelShape(num_layers=10, window=8, decoder_start=4)
    counts = {}
    for mode in ("full", "exact", "bounded"):
        harness = Harness(shape, decoder_prefill=mode, num_kv_blocks=40, max_num_batched_tokens=100)
        prefill(harness, sequential(0, 2000))
        counts[mode] = harness.device.num_row_layers
    assert counts["full"] == 20_000
    tail = sum(1 + 7 * (9 - layer) for layer in range(4, 10))
    assert counts["exact"] == 4 * 2000 + tail
    assert counts["bounded"] == 4 * 2000 + 6 * 8


def test_abort_frees_everything_waiting_running_or_offloaded() -> None:
    harness = Harness(SHAPES[0], num_kv_blocks=16, num_host_blocks=40)
    for seq_id in range(12):
        harness.add(build_sequence(seq_id, [seq_id] * 60, 300))
    while not any(seq.is_offloaded for seq in harness.live):
        harness.step()
    while harness.live:
        harness.scheduler.abort(harness.live.pop())
        harness.scheduler.check_integrity()
    assert not harness.scheduler.has_unfinished()
    assert harness.scheduler.blocks.num_available_blocks == 16


def test_samples_of_one_prompt_share_its_blocks() -> None:
    harness = Harness(SHAPES[0], num_kv_blocks=16, max_num_batched_tokens=640)
    for seq_id in range(8):
        harness.add(build_sequence(seq_id, sequential(0, 600), 20))
    while harness.scheduler.num_running < 8:
        harness.step()
    shared = {tuple(seq.block_table[:9]) for seq in harness.live}
    assert len(shared) == 1
    harness.run()
    stats = harness.scheduler.stats
    assert stats.num_preemptions == 0
    # All are added at once, and yet only one computes the prompt: the others wait for it for one step.
    assert stats.num_prefill_tokens == 600 + 7 * (600 - 576)


def test_upcoming_rows_are_those_of_the_next_step() -> None:
    """Prompts alone, with room for all: what is hinted at while a step runs is what the next one does."""
    rng = random.Random(11)
    harness = Harness(SHAPES[0], num_kv_blocks=200, max_num_batched_tokens=50, enable_prefix_caching=False)
    for seq_id in range(7):
        harness.add(build_sequence(seq_id, [rng.randrange(3) for _ in range(rng.randrange(1, 200))], 1))
    hinted = harness.scheduler.upcoming()
    while harness.scheduler.has_unfinished():
        batch = harness.scheduler.schedule()
        assert batch is not None
        assert [(chunk.seq, chunk.start, chunk.end) for chunk in batch.chunks] == hinted
        hinted = harness.scheduler.upcoming()
        harness.scheduler.finish_step(batch)
        for chunk in batch.chunks:
            if chunk.samples:
                harness.scheduler.finish(chunk.seq)
    assert hinted == []


def test_nothing_is_hinted_at_that_cannot_be_next() -> None:
    harness = Harness(SHAPES[0], max_num_seqs=2, max_num_batched_tokens=64)
    for seq_id in range(3):
        harness.add(build_sequence(seq_id, [1] * 10, 5))
    harness.step()
    assert harness.scheduler.upcoming() == [], "two decode, and the third has no place"

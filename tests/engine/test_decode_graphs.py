"""Decode steps that run in rooms: the same bits as any other step, whatever else a room has space for.

On a CPU they are run as a room's first step is, which is what a GPU captures; ``test_gpu_exactness.py`` replays.
"""

from __future__ import annotations

import gc
import random
import weakref
from array import array
from pathlib import Path

import numpy as np
import pytest
import torch

from engine import Request, SamplingParams
from engine.batch import upload
from engine.config import KV_BLOCK_SIZE
from engine.decode_graphs import DecodeGraphs, without_collector
from engine.decode_inputs import DecodeBuffers, DecodeInputs
from engine.decode_rooms import room_rows
from engine.layer_rows import ModelShape
from engine.llm_engine import LLMEngine
from engine.scheduled_batch import ScheduledChunk
from engine.sequence import Sequence
from tests.engine.engine_harness import build_engine, digests, run, undisturbed

DATA = Path(__file__).parents[1] / "data"
MODELS = {
    "tiny": DATA / "tiny",
    "tiny-quant": DATA / "tiny-quant",
    "bard": Path(__file__).parents[2] / "examples" / "bard" / "model",
}


def with_rooms(engine: LLMEngine) -> DecodeGraphs:
    """Have an engine run decode steps as a GPU's does."""
    runner = engine.runner
    rooms = DecodeGraphs(
        runner.model,
        runner.cache,
        runner.shape,
        runner._tables,
        runner.device,
        max_num_rows=runner.resolved.max_num_batched_tokens,
    )
    runner.decode_graphs = rooms
    return rooms


def requests(rng: random.Random, num_rows: int) -> list[Request]:
    """Prompts of one to some three hundred tokens, a few of which begin alike; answers of 2 to 24, the last of 24."""
    shared = [rng.randrange(10, 256) for _ in range(130)]
    found = []
    for index in range(num_rows):
        ids = shared[: rng.choice((0, 64, 130))] + [
            rng.randrange(10, 256) for _ in range(rng.randint(1, 180))
        ]
        max_tokens = 24 if index == num_rows - 1 else rng.randint(2, 24)
        sampling = SamplingParams(temperature=rng.choice((0.0, 0.8)), max_tokens=max_tokens, ignore_eos=True)
        found.append(Request(request_id=f"row {index}", prompt_token_ids=ids, sampling=sampling))
    return found


@pytest.mark.parametrize("mode", ["exact", "bounded", "full"])
@pytest.mark.parametrize("model", MODELS)
def test_a_row_decoded_in_a_room_has_the_bits_of_one_that_is_packed(model: str, mode: str) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rows = requests(random.Random(seed), 5)
    settings = {"decoder_prefill": mode, "num_kv_blocks": 40, "max_num_batched_tokens": 64}
    packed, in_rooms = build_engine(MODELS[model], **settings), build_engine(MODELS[model], **settings)
    rooms = with_rooms(in_rooms)
    assert digests(run(in_rooms, rows, per_step=2)) == digests(run(packed, rows, per_step=2))
    assert rooms.num_steps > 10, "no decode step ran in a room"


@pytest.mark.parametrize("preemption", ["offload", "recompute"])
def test_preempted_and_resumed_rows_decode_in_rooms_with_the_bits_that_they_have_alone(
    preemption: str,
) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    sampling = SamplingParams(temperature=0.8, max_tokens=24, ignore_eos=True)
    # A block each at first, and two later: more than there are.
    rows = [
        Request(
            request_id=f"row {i}",
            prompt_token_ids=[rng.randrange(10, 256) for _ in range(50)],
            sampling=sampling,
        )
        for i in range(6)
    ]
    alone = undisturbed(MODELS["tiny-quant"], rows)
    engine = build_engine(MODELS["tiny-quant"], num_kv_blocks=8, preemption=preemption)
    rooms = with_rooms(engine)
    assert digests(run(engine, rows)) == alone
    assert rooms.num_steps > 10
    assert engine.stats().num_preemptions > 0


def test_only_steps_of_sampled_single_rows_run_in_rooms() -> None:
    engine = build_engine(MODELS["tiny"], max_num_batched_tokens=8)
    rooms = with_rooms(engine)
    engine.add_request(Request(request_id="row", prompt_token_ids=list(range(10, 27)), sampling=SamplingParams(
        temperature=0.0, max_tokens=4, ignore_eos=True
    )))  # fmt: skip
    counts = []
    while engine.has_unfinished():
        engine.step()
        counts.append(rooms.num_steps)
    # Chunks of 8 and 8 tokens, the one that is left (a row of a prompt, and sampled), three of decode.
    assert counts == [0, 0, 1, 2, 3, 4]


def test_a_room_is_no_larger_than_the_largest_step() -> None:
    """Staging memory, and what ranks write into each other's memory, have room for that and no more."""
    engine = build_engine(
        MODELS["tiny"], max_num_seqs=140, max_num_batched_tokens=140, enable_prefix_caching=False
    )
    rooms = with_rooms(engine)
    sampling = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    rows = [Request(request_id=f"row {i}", prompt_token_ids=[10 + i], sampling=sampling) for i in range(140)]
    some = rows[::20]
    assert digests(run(engine, rows)).items() >= undisturbed(MODELS["tiny"], some).items()
    assert rooms.num_steps > 0


def decode_chunk(rng: random.Random, slot: int, length: int) -> ScheduledChunk:
    """A row at the end of so many tokens, with blocks of a pool of 40,000: now and then more than it needs."""
    request = Request(request_id=str(slot), prompt_token_ids=[rng.randrange(256)] * length)
    seq = Sequence.build(request, sample_index=0, seq_id=slot, max_model_len=length)
    num_blocks = -(-length // KV_BLOCK_SIZE) + rng.choice((0, 0, 3))
    seq.state_slot, seq.block_table = slot, array("q", rng.sample(range(1, 40_000), num_blocks))
    return ScheduledChunk(
        seq=seq, start=length - 1, num_tokens=1, tail_end=length, cached_until=0,
        mode="full", samples=True,
    )  # fmt: skip


def decode_chunks(rng: random.Random, num_rows: int, most_tokens: int) -> list[ScheduledChunk]:
    """Rows at any position up to there."""
    lengths = [rng.choice((1, 2, 64, 65, rng.randint(1, most_tokens), most_tokens)) for _ in range(num_rows)]
    slots = rng.sample(range(64), num_rows)
    return [decode_chunk(rng, *each) for each in zip(slots, lengths, strict=True)]


@pytest.mark.parametrize("ratio", [1, 2])
def test_nothing_is_read_of_what_steps_of_other_sizes_left(ratio: int) -> None:
    """Index tensors behind a dozen steps of any size are those of a step in buffers that are new."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng, shape, device = random.Random(seed), ModelShape(num_layers=2, window=16), torch.device("cpu")
    used = DecodeBuffers(64, device)
    for _ in range(12):
        num_tokens = rng.choice((1024, 4096))
        chunks = decode_chunks(rng, rng.randint(1, 64), num_tokens)
        room = room_rows(len(chunks), 64), num_tokens
        rows = used.load(chunks, *room)
        found, wanted = (
            DecodeInputs(loaded, shape, num_states=64)
            for loaded in (rows, DecodeBuffers(64, device).load(chunks, *room))
        )
        assert torch.equal(found.token_ids, wanted.token_ids)
        for name in ("rows", "ring_sources", "ring_targets"):
            assert torch.equal(*(getattr(each.window_inputs(0), name) for each in (found, wanted))), name
        groups = [each.compress_inputs(0, ratio) for each in (found, wanted)]
        for name in ("group_rows", "group_positions", "entry_slots", "open_sources", "open_targets"):
            assert torch.equal(*(getattr(each, name) for each in groups)), name
        assert (groups[0].entry_slots[len(chunks) :] == -1).all()
        select = found.select_inputs(0, ratio)
        assert select.num_visible.tolist() == [c.end // ratio for c in chunks] + [0] * (room[0] - len(chunks))
        assert select.block_tables.shape == (room[0], num_tokens // KV_BLOCK_SIZE)
        for table, chunk in zip(select.block_tables.tolist(), chunks, strict=False):
            needed = -(-chunk.end // KV_BLOCK_SIZE)
            assert table[:needed] == list(chunk.seq.block_table[:needed])
        # Kernels may look into blocks that they then mask: these have to be there.
        assert 0 <= int(select.block_tables.min()) <= int(select.block_tables.max()) < 40_000


def test_a_step_sends_the_blocks_that_its_rows_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """One context of a million tokens among 64 rows: not the room's 8 MiB."""
    rng, sizes = random.Random(0), []
    chunks = [*decode_chunks(rng, 63, 1024), decode_chunk(rng, 63, 2**20)]

    def noted(array: np.ndarray, device: torch.device | str) -> torch.Tensor:
        sizes.append(array.nbytes)
        return upload(array, device)

    monkeypatch.setattr("engine.decode_inputs.upload", noted)
    DecodeBuffers(64, torch.device("cpu")).load(chunks, 64, 2**20)
    num_blocks = sum(-(-chunk.end // KV_BLOCK_SIZE) for chunk in chunks)
    assert len(sizes) == 1, "one transfer a step"
    assert 8 * num_blocks < sizes[0] <= 8 * (num_blocks + 5 * 64)


def test_no_finalizer_runs_in_the_middle_of_a_capture() -> None:
    class Cycle:
        def __init__(self) -> None:
            self.own = self

    ended: list[str] = []
    weakref.finalize(Cycle(), ended.append, "before")
    with without_collector():
        assert ended == ["before"]
        weakref.finalize(Cycle(), ended.append, "during")
        _ = [[] for _ in range(10 * gc.get_threshold()[0])]
        assert ended == ["before"]
    assert gc.isenabled()
    gc.collect()
    assert ended == ["before", "during"]

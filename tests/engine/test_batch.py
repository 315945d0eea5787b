"""The index tensors of a step against what each row, by its position alone, has to read and write."""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from engine.api import Request
from engine.batch import BatchInputs
from engine.config import KV_BLOCK_SIZE, ROW_PADDING
from engine.layer_rows import ModelShape, replay_start
from engine.layers.ngrams import NgramTables
from engine.scheduled_batch import ScheduledBatch, ScheduledChunk
from engine.sequence import Sequence

CPU = torch.device("cpu")
SHAPE = ModelShape(num_layers=5, window=7, decoder_start=2)
NUM_STATES = 12
TABLES = NgramTables(
    token_classes=np.arange(1000, dtype=np.int64) * 3,
    pad_class=-7,
    multipliers=np.ones((1, 4), dtype=np.int64),
    primes=np.ones((1, 3, 1), dtype=np.int64),
    offsets=np.zeros((1, 3, 1), dtype=np.int64),
)


@dataclass(frozen=True, slots=True)
class Step:
    chunks: list[ScheduledChunk]
    inputs: BatchInputs


def random_step(seed: int, mode: str) -> Step:
    """Chunks of several sequences: first ones, later ones, decodes, and one that replays a cached prefix."""
    rng = random.Random(seed)
    blocks = rng.sample(range(100), 100)
    slots = rng.sample(range(12), 12)
    chunks = []
    for index in range(rng.choice([1, 2, 5])):
        length = rng.choice([1, 2, 40, 64, 65, 150])
        cached = KV_BLOCK_SIZE if length > KV_BLOCK_SIZE and rng.random() < 0.4 else 0
        if cached:
            start = replay_start(SHAPE, mode, tail_end=length, cached_until=cached)
        else:
            start = rng.choice([0, 0, length // 2, length - 1])
        count = rng.randint(1, length - start)
        request = Request(
            request_id=str(index), prompt_token_ids=[rng.randrange(1000) for _ in range(length)]
        )
        seq = Sequence.build(request, sample_index=0, seq_id=index, max_model_len=4096)
        seq.state_slot = slots.pop()
        seq.block_table = array("q", (blocks.pop() for _ in range(-(-length // KV_BLOCK_SIZE))))
        chunks.append(
            ScheduledChunk(
                seq=seq,
                start=start,
                num_tokens=count,
                tail_end=length,
                cached_until=cached,
                mode=mode,
                samples=start + count == length,
            )
        )
    return Step(chunks, BatchInputs(ScheduledBatch(chunks=chunks), SHAPE, TABLES, CPU, num_states=NUM_STATES))


def input_rows(step: Step, layer: int) -> list[tuple[int, int]]:
    """(chunk, position) of every row that enters a layer, in packed order."""
    rows = []
    for index, chunk in enumerate(step.chunks):
        first = max(chunk.start, chunk.layer_rows(SHAPE).first_input[layer])
        rows += [(index, position) for position in range(first, chunk.end)]
    return rows


def output_rows(step: Step, layer: int) -> list[tuple[int, int]]:
    rows = []
    for index, chunk in enumerate(step.chunks):
        first = max(chunk.start, chunk.layer_rows(SHAPE).first_output[layer])
        rows += [(index, position) for position in range(first, chunk.end)]
    return rows


SEEDS = pytest.mark.parametrize(
    ("seed", "mode"), [(seed, mode) for seed in range(12) for mode in ("exact", "full")]
)


@SEEDS
def test_rows_are_packed_in_chunk_order_and_padded(seed: int, mode: str) -> None:
    step = random_step(seed, mode)
    for layer in range(SHAPE.num_layers):
        inputs = step.inputs.layers[layer]
        for rows, wanted in (
            (inputs.rows, input_rows(step, layer)),
            (inputs.output_rows, output_rows(step, layer)),
        ):
            assert rows.num_rows == len(wanted)
            assert rows.num_padded % ROW_PADDING == 0
            assert rows.num_padded - rows.num_rows < ROW_PADDING
            assert (
                list(zip(rows.chunks.tolist(), rows.positions.tolist(), strict=True))[: len(wanted)] == wanted
            )
        entering = input_rows(step, layer)
        keep = range(len(entering)) if inputs.keep is None else inputs.keep.tolist()
        kept = [entering[row] for row in keep][: inputs.output_rows.num_rows]
        assert kept == output_rows(step, layer)
        if layer:
            # A layer's output is what enters the next.
            assert step.inputs.layers[layer - 1].output_rows.num_rows == inputs.rows.num_rows
    first = input_rows(step, 0)
    ids = [step.chunks[index].seq.token_ids[position] for index, position in first]
    assert step.inputs.token_ids.tolist()[: len(first)] == ids


@SEEDS
def test_a_row_reads_its_window_and_the_ring_keeps_the_newest(seed: int, mode: str) -> None:
    step = random_step(seed, mode)
    for layer in range(SHAPE.num_layers):
        if not step.inputs.has_window_rows(layer) or not output_rows(step, layer):
            continue
        window, entering = step.inputs.window_inputs(layer), input_rows(step, layer)
        num_ring = NUM_STATES * SHAPE.window
        firsts = dict(reversed(entering))
        for row, (index, position) in enumerate(output_rows(step, layer)):
            slot = step.chunks[index].seq.state_slot
            for key in range(SHAPE.window):
                wanted = position - SHAPE.window + 1 + key
                source = int(window.rows[row, key])
                if wanted < 0:
                    assert source == -1
                elif wanted >= firsts[index]:
                    assert entering[source - num_ring] == (index, wanted)
                else:
                    assert source == slot * SHAPE.window + wanted % SHAPE.window
        assert (window.rows[len(output_rows(step, layer)) :] == -1).all()
        kept = {}
        for source, target in zip(window.ring_sources.tolist(), window.ring_targets.tolist(), strict=True):
            assert target not in kept
            kept[target] = entering[source]
        wanted_ring = {
            step.chunks[index].seq.state_slot * SHAPE.window + position % SHAPE.window: (index, position)
            for index, position in entering
            if position >= step.chunks[index].end - SHAPE.window
        }
        assert kept == wanted_ring


@pytest.mark.parametrize("ratio", [1, 2, 4])
@SEEDS
def test_groups_complete_once_and_open_tokens_are_kept(seed: int, mode: str, ratio: int) -> None:
    step = random_step(seed, mode)
    layer = SHAPE.decoder_start
    inputs, entering = step.inputs.compress_inputs(layer, ratio), input_rows(step, layer)
    wanted = [
        (index, group)
        for index, chunk in enumerate(step.chunks)
        for group in range(chunk.end // ratio)
        if (group + 1) * ratio > max(chunk.start, chunk.cached_until)
    ]
    assert len(inputs.entry_slots) % ROW_PADDING == 0
    assert (inputs.entry_slots[len(wanted) :] == -1).all()
    stored = ratio - 1
    num_open = NUM_STATES * stored
    for row, (index, group) in enumerate(wanted):
        seq, chunk = step.chunks[index].seq, step.chunks[index]
        per_block = KV_BLOCK_SIZE // ratio
        assert inputs.entry_slots[row] == seq.block_table[group // per_block] * per_block + group % per_block
        assert inputs.group_positions[row] == group * ratio
        for place in range(ratio):
            source, position = int(inputs.group_rows[row, place]), group * ratio + place
            if position >= chunk.start and source >= num_open:
                assert entering[source - num_open] == (index, position)
            else:
                assert source == seq.state_slot * stored + place
    kept = {
        int(target): entering[source]
        for source, target in zip(inputs.open_sources.tolist(), inputs.open_targets.tolist(), strict=True)
    }
    assert kept == {
        step.chunks[index].seq.state_slot * stored + position % ratio: (index, position)
        for index, position in entering
        if position // ratio == step.chunks[index].end // ratio
    }


@pytest.mark.parametrize("ratio", [1, 2])
@SEEDS
def test_visible_entries_and_their_blocks(seed: int, mode: str, ratio: int) -> None:
    step = random_step(seed, mode)
    select = step.inputs.select_inputs(3, ratio)
    rows = output_rows(step, 3)
    assert select.num_visible[: len(rows)].tolist() == [(position + 1) // ratio for _, position in rows]
    assert (select.num_visible[len(rows) :] == 0).all()
    assert select.max_visible == max([(position + 1) // ratio for _, position in rows], default=1) or 1
    assert select.entries_per_block == KV_BLOCK_SIZE // ratio
    for row, (index, _) in enumerate(rows):
        table = step.chunks[index].seq.block_table
        assert select.block_tables[select.chunks[row]].tolist()[: len(table)] == list(table)


@SEEDS
def test_ngrams_look_back_over_the_chunks_start(seed: int, mode: str) -> None:
    step = random_step(seed, mode)
    for layer in (0, 3):
        classes = step.inputs.ngram_classes(layer).tolist()
        for row, (index, position) in enumerate(input_rows(step, layer)):
            ids = step.chunks[index].seq.token_ids
            assert classes[row] == [3 * ids[position - i] if position >= i else -7 for i in range(4)]


@SEEDS
def test_the_last_row_of_a_sampling_chunk_is_sampled(seed: int, mode: str) -> None:
    step = random_step(seed, mode)
    last = output_rows(step, SHAPE.num_layers - 1)
    sampled = [last[row] for row in step.inputs.sample_rows.tolist()[: len(step.inputs.sample_chunks)]]
    assert sampled == [(i, chunk.end - 1) for i, chunk in enumerate(step.chunks) if chunk.samples]
    assert step.inputs.sample_chunks == [chunk for chunk in step.chunks if chunk.samples]

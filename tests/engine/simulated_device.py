"""A device for scheduler tests: it stores what each block and ring slot would hold, and checks every read.

A row's content is the identity of the whole token prefix up to it, so that a row of another sequence,
or a stale one, is noticed wherever it is read.
"""

from __future__ import annotations

from itertools import groupby

from engine.block_manager import Move
from engine.config import KV_BLOCK_SIZE
from engine.layer_rows import ModelShape
from engine.scheduled_batch import ScheduledBatch, ScheduledChunk
from engine.sequence import Sequence

Content = tuple[int, int]
"""What a row is a function of: the identity of its prefix and, in the layers that a ``bounded`` prefill
approximates, where the prompt ended (0 elsewhere)."""

Ring = dict[tuple[int, int], tuple[int, Content]]
"""(layer, slot) -> (row, content)."""


class SimulatedDevice:
    """Carries out moves and chunks of plain Python content."""

    def __init__(self, shape: ModelShape, *, is_bounded: bool = False) -> None:
        self.shape = shape
        self.is_bounded = is_bounded
        self._prefix_ids: dict[tuple[int, int], int] = {}
        self._known: dict[Sequence, list[int]] = {}
        self.blocks: dict[str, dict[int, dict[int, int]]] = {"device": {}, "host": {}}
        self.states: dict[str, dict[int, Ring]] = {"device": {}, "host": {}}
        self._owners: dict[int, Sequence | None] = {}  # whose each state slot is; None: restored, not yet run
        self.num_row_layers = 0

    def run(self, batch: ScheduledBatch) -> None:
        """One step: moves, rows, moves."""
        self._move(batch.moves_before)
        slots = [chunk.seq.state_slot for chunk in batch.chunks]
        assert None not in slots
        assert len(set(slots)) == len(slots)
        for chunk in batch.chunks:
            self._check_prefix_before(chunk)
        for chunk in batch.chunks:
            self._run_chunk(chunk)
        self._move(batch.moves_after)

    def prefix_ids(self, seq: Sequence, end: int) -> list[int]:
        """For each row below ``end``, the identity of the tokens up to it."""
        ids = self._known.setdefault(seq, [])
        for token in seq.token_ids[len(ids) : end]:
            key = (ids[-1] if ids else 0, token)
            ids.append(self._prefix_ids.setdefault(key, len(self._prefix_ids) + 1))
        return ids[:end]

    def _move(self, moves: list[Move]) -> None:
        for (kind, place), group in groupby(moves, key=lambda move: (move.kind, move.source_place)):
            run = list(group)
            assert len({move.target for move in run}) == len(run), f"{run} has one target twice"
            store = self.blocks if kind == "block" else self.states
            for move in run:
                assert move.source in store[place], f"{move} copies what was never written"
                store[move.target_place][move.target] = dict(store[place][move.source])
                if kind == "state" and move.target_place == "device":
                    self._owners[move.target] = None

    def _check_prefix_before(self, chunk: ScheduledChunk) -> None:
        """All rows that exist already are in the table's blocks, before anything of this step is written."""
        ids = self.prefix_ids(chunk.seq, max(chunk.start, chunk.cached_until))
        for start in range(0, len(ids), KV_BLOCK_SIZE):
            expected = dict(enumerate(ids[start : start + KV_BLOCK_SIZE]))
            block = self.blocks["device"].get(chunk.seq.block_table[start // KV_BLOCK_SIZE], {})
            assert expected.items() <= block.items(), f"rows from {start} on are not in their block"

    def _run_chunk(self, chunk: ScheduledChunk) -> None:
        seq, shape, end = chunk.seq, self.shape, chunk.end
        assert seq.state_slot is not None
        ids = self.prefix_ids(seq, end)
        slot = seq.state_slot
        is_own = slot in self._owners and self._owners[slot] in (seq, None)
        ring = self.states["device"][slot] if is_own else {}  # nothing of another's may be read
        self.states["device"][slot] = ring
        self._owners[slot] = seq
        rows = chunk.layer_rows(shape)
        for row in range(max(chunk.start, chunk.cached_until), end):
            assert row >= rows.first_input[shape.decoder_start], "a row to compress has no input"
            assert row // KV_BLOCK_SIZE >= len(seq.nodes), "a shared block is written"
            block = self.blocks["device"].setdefault(seq.block_table[row // KV_BLOCK_SIZE], {})
            if row % KV_BLOCK_SIZE == 0:
                block.clear()
            block[row % KV_BLOCK_SIZE] = ids[row]
        for layer in range(shape.num_layers):
            is_approximate = self.is_bounded and layer > shape.decoder_start
            prompt_end = seq.num_prompt_tokens if is_approximate else 0
            content = [(prefix_id, prompt_end) for prefix_id in ids]
            # Before the prompt's end, a bounded row's window is cut; behind it, every row reads all of it.
            floor = rows.first_window[layer] if is_approximate and end <= seq.num_prompt_tokens else 0
            available = {row: found for (at, _), (row, found) in ring.items() if at == layer}
            own = range(max(chunk.start, rows.first_window[layer]), end)
            available |= {row: content[row] for row in own}
            for row in range(max(chunk.start, rows.first_output[layer]), end):
                self.num_row_layers += 1
                is_cut = self.is_bounded and layer >= shape.decoder_start
                assert not is_cut or row >= seq.num_prompt_tokens - shape.window, "a bounded row too many"
                for read in range(max(0, floor, row - shape.window + 1), row + 1):
                    assert available.get(read) == content[read], f"layer {layer}, row {row} misses row {read}"
            for row in own[-shape.window :]:
                ring[layer, row % shape.window] = (row, content[row])

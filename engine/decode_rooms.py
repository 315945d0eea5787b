"""How large the rooms of decode steps are, what they and their graphs take, and which steps have a graph.

Numbers only.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable
from enum import Enum, auto

from engine.config import KV_BLOCK_SIZE, padded

logger = logging.getLogger(__name__)

MAX_ROWS = 512
"""Steps of more rows are launched. A guess: at 256, the most measured, a replay takes 0.4 of that time."""

MAX_GRAPHS = 32
"""A rank keeps no more: a further one takes the place of one that has not been replayed for long."""

PATIENCE = 1024
"""For so many steps. A guess: 32 captures take as long as some hundreds of launched steps."""

GRAPH_BYTES_A_LAYER = 1 << 19
"""Device memory of one layer's launches in a graph; measured: 4 MiB for five layers, scratch included."""

_LEAST_TOKENS = 16 * KV_BLOCK_SIZE


def room_rows(num_rows: int, most: int) -> int:
    """Rows of the smallest room for so many: few sizes, so that few graphs serve a job.

    ``most``: of the largest room.
    """
    unit = 32 if num_rows <= 128 else 128
    return min(-(-num_rows // unit) * unit, most)


def most_room_rows(max_num_seqs: int, max_num_rows: int) -> int:
    """Rows of the largest room, where a step has so many sequences at most, and so many rows of any kind.

    Whatever is sized by a step holds its rows and their padding, and no more.
    """
    return room_rows(min(max_num_seqs, max_num_rows, MAX_ROWS), padded(max_num_rows))


def room_tokens(num_tokens: int) -> int:
    """Tokens of the smallest room for a context of so many: a power of two."""
    return max(_LEAST_TOKENS, 1 << (num_tokens - 1).bit_length())


def room_bytes(most_rows: int, max_tokens: int) -> int:
    """What ``DecodeBuffers`` can come to take: the largest room's facts, and block tables by context."""
    # A context's sizes are the least one, and each twice the one before.
    num_blocks = (2 * room_tokens(max_tokens) - _LEAST_TOKENS) // KV_BLOCK_SIZE
    return most_rows * (3 + num_blocks) * 8


class StepKind(Enum):
    """How a step is run: as any other, captured and replayed, or replayed."""

    LAUNCH = auto()
    CAPTURE = auto()
    REPLAY = auto()


class GraphPlaces:
    """Which sizes of steps have a graph: those that came again, no more than there are places.

    With all places taken the one that was longest not replayed gives way, unless that was within the last
    ``patience`` steps: a job that goes round among more sizes than there are places launches what has none,
    and does not capture at every step.
    """

    def __init__(self, num_places: int = MAX_GRAPHS, patience: int = PATIENCE) -> None:
        self._num_places, self._patience = num_places, patience
        self._num_steps = 0
        self._came: set[Hashable] = set()
        self._last_steps: dict[Hashable, int] = {}  # of each place, the longest not replayed first
        self._was_told = False

    def __contains__(self, size: Hashable) -> bool:
        """Whether steps of this size have a place."""
        return size in self._last_steps

    def next_step(self, size: Hashable) -> StepKind:
        """Count a step and say how it is run. On CAPTURE it has a place, and whoever gave way has none."""
        self._num_steps += 1
        if size in self._last_steps:
            del self._last_steps[size]
            self._last_steps[size] = self._num_steps
            return StepKind.REPLAY
        if size not in self._came:
            self._came.add(size)
            return StepKind.LAUNCH
        if len(self._last_steps) == self._num_places and not self._made_room():
            return StepKind.LAUNCH
        self._last_steps[size] = self._num_steps
        return StepKind.CAPTURE

    def _made_room(self) -> bool:
        if not self._was_told:
            self._was_told = True
            logger.info("decode steps have more sizes than the %d kept as graphs", self._num_places)
        oldest = next(iter(self._last_steps))
        if self._num_steps - self._last_steps[oldest] <= self._patience:
            return False
        del self._last_steps[oldest]
        return True

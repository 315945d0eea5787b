"""What the driver knows of its ranks, slot by slot: which of them live, what each said last, since when.

Owns that knowledge. It must not know rows, nor speak to a rank or decide what becomes of one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from engine.errors import ConfigError
from pipelines.rank_protocol import RankReport

_PLACE_PATIENCE_S = 10.0


@dataclass(slots=True)
class Slot:
    """A place for a rank, and the rank that is there or was last.

    ``capacity`` is 0 until its engine is built. ``moved_at``: when its loop was first seen where it stands.
    ``heard_at``: when its process last answered.
    ``has_finished_rows``: since it was started. ``is_preparing``: it was told to build its engine.
    ``publishing``: the shards whose parts it assembles.
    """

    is_given_up: bool = False
    is_live: bool = False
    lost_at: float = -math.inf
    capacity: int = 0
    num_turns: int = -1
    moved_at: float = 0.0
    heard_at: float = 0.0
    has_finished_rows: bool = False
    is_preparing: bool = False
    is_drained: bool = False
    is_stopped: bool = False
    publishing: set[int] = field(default_factory=set)
    node: str = ""
    device: str = ""

    def begin(self, now_s: float) -> None:
        """A rank is started here."""
        self.is_live, self.capacity, self.num_turns = True, 0, -1
        self.moved_at = self.heard_at = now_s
        self.has_finished_rows = self.is_preparing = self.is_drained = self.is_stopped = False
        self.node = self.device = ""

    def take(self, report: RankReport, now_s: float) -> None:
        """Its rank has said something."""
        self.heard_at = now_s
        is_ready_now = report.capacity > 0 and not self.capacity  # an engine is built within one turn
        if report.num_turns != self.num_turns or is_ready_now:
            self.num_turns, self.moved_at = report.num_turns, now_s
        self.capacity, self.node, self.device = report.capacity, report.node, report.device
        self.is_drained, self.is_stopped = report.is_drained, report.is_stopped
        self.has_finished_rows |= any(lease.num_ok + lease.num_error for lease in report.leases)

    def lose(self, now_s: float) -> None:
        """Its rank is dead."""
        self.is_live, self.capacity, self.device, self.lost_at = False, 0, "", now_s


class Slots:
    """All of them, by number."""

    def __init__(self, num_slots: int) -> None:
        self._slots = [Slot() for _ in range(num_slots)]

    def __len__(self) -> int:
        return len(self._slots)

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._slots)

    def __getitem__(self, number: int) -> Slot:
        return self._slots[number]

    @property
    def live(self) -> list[Slot]:
        """Those with a rank."""
        return [slot for slot in self._slots if slot.is_live]

    def excuse(self, absent_s: float, now_s: float) -> None:
        """Nobody looked for so long, until now: no rank stood still in that time, as far as is known."""
        for slot in self._slots:
            slot.moved_at = min(now_s, slot.moved_at + absent_s)
            slot.heard_at = min(now_s, slot.heard_at + absent_s)

    def capacities(self) -> dict[int, int]:
        """How many rows at once each rank runs that is ready."""
        return {i: slot.capacity for i, slot in enumerate(self._slots) if slot.is_live and slot.capacity}

    def starting(self, now_s: float) -> list[int]:
        """Those whose rank is not ready yet. One that died lately will be followed by another."""
        return [
            number
            for number, slot in enumerate(self._slots)
            if not slot.is_given_up
            and (not slot.capacity if slot.is_live else now_s - slot.lost_at < _PLACE_PATIENCE_S)
        ]

    def check_device(self, number: int, device: str) -> None:
        """One rank a GPU: two on one would each believe that its memory is theirs. Raises ``ConfigError``."""
        for other, slot in enumerate(self._slots):
            if device and other != number and slot.is_live and slot.device == device:
                raise ConfigError(f"ranks {other} and {number} were both given the GPU {device}")

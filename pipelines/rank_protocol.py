"""What the driver and its ranks say to each other, and what the driver asks of who keeps them.

Owns these words alone; it must not know what follows from them on either side.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from engine.api import EngineStats
from pipelines.manifest import Tally


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """Rows of one shard, as half-open ranges, for one rank.

    ``tokens_at_deaths``: of suspects, how many tokens each had when ranks died. ``is_solo``: suspects of
    which one runs at a time, with nothing beside it.
    """

    lease_id: int
    shard_index: int
    ranges: tuple[tuple[int, int], ...]
    tokens_at_deaths: Mapping[int, frozenset[int]] = field(default_factory=dict)
    is_solo: bool = False

    @property
    def is_of_suspects(self) -> bool:
        """Whether its rows were in flight when a rank died."""
        return bool(self.tokens_at_deaths)

    @property
    def num_rows(self) -> int:
        """How many rows are leased."""
        return sum(stop - start for start, stop in self.ranges)

    @property
    def rows(self) -> list[int]:
        """The rows themselves."""
        return [row for start, stop in self.ranges for row in range(start, stop)]


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseReport:
    """How far a rank is with a lease. ``is_done``: every row is journaled and the journal is closed."""

    lease_id: int
    num_read: int
    num_ok: int
    num_error: int
    is_done: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """What the driver asks of a rank, one exchange's worth.

    ``prepare``: build the engine. ``drain``: finish what is in flight, start no other row.
    ``stop``: see every journal to the disk now and work no more.
    """

    prepare: bool = False
    leases: tuple[Lease, ...] = ()
    publish: tuple[int, ...] = ()
    drain: bool = False
    stop: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """What a rank says, one exchange's worth. ``num_turns`` is pushed by its step loop alone.

    ``refused`` says why the job cannot run at all, ``broken`` why its output cannot be written.
    ``capacity`` is how many rows the engine runs at once; 0 until the engine is built. ``environment`` and
    ``engine_settings`` say what a built engine's answers depend on besides the plan. ``stats`` are the
    engine's own, the token counts before it those of its answers. ``node`` is the machine it is on,
    ``device`` tells its GPU apart from every other; both may be unknown yet.
    """

    num_turns: int
    capacity: int = 0
    leases: tuple[LeaseReport, ...] = ()
    published: tuple[tuple[int, Tally], ...] = ()
    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0
    num_cached_tokens: int = 0
    stats: EngineStats = field(default_factory=EngineStats)
    environment: Mapping[str, str] = field(default_factory=dict)
    engine_settings: Mapping[str, Any] = field(default_factory=dict)
    is_drained: bool = False
    is_stopped: bool = False
    refused: str | None = None
    broken: str | None = None
    node: str = ""
    device: str = ""


@dataclass(frozen=True, slots=True)
class RankDied:
    """A rank is gone, or its engine is dead; ``has_lost_peer``: only because another of its replica is."""

    reason: str
    has_lost_peer: bool = False


class Fleet(Protocol):
    """The ranks, by slot. One exchange is under way with a started rank at any time, or none.

    Ranks of a replica (``pipelines.replicas``) are started one after the other, the first first.
    """

    num_slots: int
    ranks_per_replica: int

    def has_place(self, slot: int) -> bool:
        """Whether there is room for the replica of a slot now; once asked, room is looked for."""

    def start(self, slot: int) -> None:
        """Start the rank of a slot, which has a place, and its first exchange, which carries no orders."""

    def exchange(self, slot: int, orders: Orders) -> None:
        """Begin the next exchange with a rank whose last one came back."""

    def wait(self, timeout_s: float) -> list[tuple[int, RankReport | RankDied]]:
        """The exchanges that came back, waiting up to ``timeout_s`` for one."""

    def kill(self, slot: int) -> None:
        """End the rank of a slot at once, dead or alive."""


class NoRanks:
    """The fleet of a run in which every shard is committed: there is no slot to ask for."""

    num_slots = 0
    ranks_per_replica = 1

    def has_place(self, slot: int) -> bool:
        raise AssertionError("there is no slot")

    def start(self, slot: int) -> None:
        raise AssertionError("there is no slot")

    def exchange(self, slot: int, orders: Orders) -> None:
        raise AssertionError("there is no slot")

    def wait(self, timeout_s: float) -> list[tuple[int, RankReport | RankDied]]:
        return []

    def kill(self, slot: int) -> None:
        raise AssertionError("there is no slot")

    def close(self) -> None:
        pass

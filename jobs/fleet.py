"""The ranks of a run as Ray actors, each replica in a placement group of its own.

Owns where ranks are put and how they are reached and ended; it must not know what they are asked, nor when
one counts as dead: ``pipelines.driver`` does. Called in a process that has joined Ray.
"""

from __future__ import annotations

import importlib.metadata
import os
import textwrap
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from engine import PeerLost
from jobs.rank import RankActor, RankSpec
from pipelines.rank_protocol import Orders, RankDied, RankReport

_LOOK_INTERVAL_S = 0.5
_RAY_PATIENCE_S = 0.25
_LONGEST_LINE = 240


class RayFleet:
    """Rank actors, by slot; what ``pipelines.rank_protocol.Fleet`` asks for.

    The placement group of a replica holds the resources of its ranks. A group that finds no room waits in Ray
    until a node joins or comes back.

    Questions to the head are asked in threads of their own, and waited for no longer than a moment: a head
    that is gone or frozen answers none, and who is told to stop has two seconds.
    """

    def __init__(self, spec: RankSpec, num_slots: int, *, has_gpus: bool) -> None:
        cluster = spec.job.cluster
        self.num_slots, self.ranks_per_replica = num_slots, cluster.ranks_per_replica
        self._strategy = "PACK" if cluster.replica_spans_nodes else "STRICT_PACK"
        self._spec = replace(spec, has_gpu=has_gpus)
        self._bundle = {"CPU": 1.0, **({"GPU": 1.0} if has_gpus else {})}
        # Liveness is the driver's business: an actor is never restarted behind its back.
        options: dict[str, Any] = {"num_cpus": 1, "num_gpus": int(has_gpus), "max_restarts": 0}
        variables: dict[str, str] = {}
        if not _is_importable_elsewhere():
            root = str(Path(__file__).resolve().parent.parent)
            paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
            variables["PYTHONPATH"] = os.pathsep.join(paths)
        if has_gpus and cluster.ranks_per_replica > 1:
            # A rank that shall write into the others' GPUs has to see them; it chooses its own.
            variables["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] = "1"
        if variables:
            options["runtime_env"] = {"env_vars": variables}
        self._actor_class = ray.remote(RankActor)
        self._options = options
        self._groups: dict[int, Any] = {}  # by replica
        self._meetings: dict[int, Any] = {}
        self._placed: set[str] = set()
        self._looked_at = 0.0
        self._actors: dict[int, Any] = {}
        self._exchanges: dict[Any, int] = {}
        self._last_question: threading.Thread | None = None

    def has_place(self, slot: int) -> bool:
        """Whether its replica's placement group stands; one that there is not is asked for."""
        if self._is_unanswered:
            return False
        replica = slot // self.ranks_per_replica
        if replica not in self._groups:
            self._ask(lambda: self._ask_for_place(replica))
        now = time.monotonic()
        if now - self._looked_at > _LOOK_INTERVAL_S and not self._is_unanswered:  # one question for all slots
            self._looked_at = now
            self._ask(self._look)
        group = self._groups.get(replica)
        return group is not None and group.id.hex() in self._placed

    def _ask_for_place(self, replica: int) -> None:
        bundles = [self._bundle] * self.ranks_per_replica
        self._groups[replica] = placement_group(bundles, strategy=self._strategy)

    def _look(self) -> None:
        table = placement_group_table()
        self._placed = {name for name, group in table.items() if group["state"] == "CREATED"}

    @property
    def _is_unanswered(self) -> bool:
        return self._last_question is not None and self._last_question.is_alive()

    def _ask(self, question: Callable[[], None]) -> None:
        """Ask the head something, and wait a moment; not at all where it owes an answer already."""
        is_waited_for = not self._is_unanswered
        self._last_question = threading.Thread(target=question, daemon=True)
        self._last_question.start()
        if is_waited_for:
            self._last_question.join(_RAY_PATIENCE_S)

    def start(self, slot: int) -> None:
        """Start the rank of a slot and its first exchange."""
        replica, rank = divmod(slot, self.ranks_per_replica)
        strategy = PlacementGroupSchedulingStrategy(
            placement_group=self._groups[replica], placement_group_bundle_index=rank
        )
        options = {**self._options, "scheduling_strategy": strategy}
        actor_class = self._actor_class.options(**options)
        if rank == 0:
            self._actors[slot] = actor_class.remote(self._spec)
            self._meetings[replica] = (
                self._actors[slot].meeting.remote() if self.ranks_per_replica > 1 else None
            )
        else:
            self._actors[slot] = actor_class.remote(self._spec, rank, self._meetings[replica])
        self.exchange(slot, Orders())

    def exchange(self, slot: int, orders: Orders) -> None:
        """Begin the next exchange with a rank."""
        self._exchanges[self._actors[slot].exchange.remote(orders)] = slot

    def wait(self, timeout_s: float) -> list[tuple[int, RankReport | RankDied]]:
        """The exchanges that came back."""
        if not self._exchanges:
            time.sleep(timeout_s)  # every slot waits for a place
            return []
        ready, _ = ray.wait(list(self._exchanges), num_returns=1, timeout=timeout_s)
        also, _ = ray.wait(list(self._exchanges), num_returns=len(self._exchanges), timeout=0)
        events: list[tuple[int, RankReport | RankDied]] = []
        for reference in dict.fromkeys([*ready, *also]):
            slot = self._exchanges.pop(reference)
            try:
                events.append((slot, ray.get(reference)))
            except RayError as error:
                has_lost_peer = isinstance(error, RayTaskError) and isinstance(error.cause, PeerLost)
                events.append((slot, RankDied(describe_death(error), has_lost_peer)))
        return events

    def kill(self, slot: int) -> None:
        """End the rank of a slot at once; with the last rank of a replica its place is given back."""
        actor = self._actors.pop(slot, None)
        self._exchanges = {ref: other for ref, other in self._exchanges.items() if other != slot}
        if actor is not None:
            self._ask(lambda: ray.kill(actor))
        replica = slot // self.ranks_per_replica
        if replica in self._groups and not any(
            slot // self.ranks_per_replica == replica for slot in self._actors
        ):
            group = self._groups.pop(replica)
            self._ask(lambda: remove_placement_group(group))

    def close(self) -> None:
        """End every rank."""
        for slot in range(self.num_slots):
            self.kill(slot)


def describe_death(error: RayError) -> str:
    """What Ray says of a rank's end, without its advice: the engine's words, or the first and last line."""
    if isinstance(error, RayTaskError):
        return str(error.cause or error).strip()
    lines = [" ".join(line.split()) for line in str(error).splitlines() if line.strip()]
    ends = dict.fromkeys(textwrap.shorten(line, _LONGEST_LINE) for line in (lines[:1] + lines[-1:]))
    return " ".join(ends) or type(error).__name__


def _is_importable_elsewhere() -> bool:
    """Whether a rank's process finds our packages by itself: installed, or uploaded with a Ray job."""
    if "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ:
        return True
    try:
        importlib.metadata.distribution("overnight")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True

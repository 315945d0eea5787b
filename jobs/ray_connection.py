"""Joining the Ray cluster that is named, or starting a Ray for one job and ending it, and how many ranks fit.

Owns the life of Ray in the driver's process. It must not know ranks but by number, nor what they do.
``jobs.cluster`` imports it when it has decided between the two: Ray reads some of its environment only then.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import ray

from engine import ConfigError
from jobs.config import ClusterSection, JobConfig
from jobs.reaper import Reaper
from jobs.stop_signals import StopSignals
from pipelines.driver import JobFailed, StopRequest

LOCAL = "local"
"""Ray's own word for a Ray that is started and not joined."""

_OBJECT_STORE_BYTES = 100 << 20  # Ray's smallest: no row goes through it


@dataclass(frozen=True, slots=True)
class Places:
    """How many ranks a run has at most and at least, and whether each has a GPU."""

    num_slots: int
    min_ranks: int
    has_gpus: bool


@contextlib.contextmanager
def connected(address: str, job: JobConfig, signals: StopSignals) -> Iterator[Places]:
    """Join the cluster at ``address``, or start a Ray and end it."""
    if address != LOCAL:
        try:
            _init_ray(signals, address)
            yield _count_places(job)
        finally:
            _leave(signals)
        return
    cluster = job.cluster
    wanted = max(cluster.num_ranks, cluster.max_ranks or 0, cluster.ranks_per_replica)
    reaper = Reaper()
    os.environ |= reaper.environment
    try:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        own = {"object_store_memory": _OBJECT_STORE_BYTES, "include_dashboard": False}
        _init_ray(signals, address, num_cpus=max(wanted, os.cpu_count() or 1), **own)
        yield _count_places(job)
    finally:
        _leave(signals)
        if signals.requested is not StopRequest.NOW:
            reaper.close()
        for name in reaper.environment:
            os.environ.pop(name, None)


def _leave(signals: StopSignals) -> None:
    """A stop has two seconds in all, and Ray's farewell takes as many: see ``leave_at_once``."""
    if signals.requested is not StopRequest.NOW:
        ray.shutdown()


def _init_ray(signals: StopSignals, address: str, **options: Any) -> None:
    """Start or join Ray. ``KeyboardInterrupt`` when a signal made that impossible."""
    try:
        try:
            ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False, **options)
        finally:
            signals.install()
    except SystemExit as error:  # from Ray's own handler of SIGTERM, while it stood in the place of ours
        raise KeyboardInterrupt from error
    except Exception as error:  # Ray raises nothing narrower for a node that does not come up
        if signals.requested:  # a signal to the whole group ends Ray's processes too
            raise KeyboardInterrupt from error
        reason = " ".join(str(error).split())
        if address == LOCAL:
            raise JobFailed(f"Ray did not start: {reason}") from error
        raise ConfigError(f"cannot join the Ray cluster at {address!r}: {reason}") from error


def _count_places(job: JobConfig) -> Places:
    cluster = job.cluster
    num_gpus = 0 if job.engine.device == "cpu" else _count("GPU")
    if job.engine.device == "cuda" and not num_gpus:
        raise ConfigError("engine.device is cuda, but the cluster has no GPU")
    size = cluster.ranks_per_replica
    room = _count_for_replicas("GPU" if num_gpus else "CPU", cluster)
    num_slots = cluster.max_ranks or cluster.num_ranks or (room // size * size if num_gpus else 0) or size
    needed = cluster.min_ranks or (1 if cluster.max_ranks else num_slots)
    if size > 1 and needed > room:
        where = "" if cluster.replica_spans_nodes else " on one node"
        raise ConfigError(
            f"each replica needs {size} {'GPUs' if num_gpus else 'CPUs'}{where}, and the cluster has "
            f"room for {room // size} of {-(-needed // size)}"
        )
    key = "num_ranks" if needed == cluster.num_ranks else "min_ranks"
    if num_gpus and needed > num_gpus:
        raise ConfigError(f"cluster.{key} is {needed}, but the cluster has {num_gpus} GPUs")
    num_cpus = _count("CPU")
    if needed > num_cpus:
        raise ConfigError(f"{needed} ranks need a CPU each, but the cluster has {num_cpus}")
    return Places(num_slots=num_slots, min_ranks=cluster.min_ranks or 1, has_gpus=num_gpus > 0)


def _count_for_replicas(resource: str, cluster: ClusterSection) -> int:
    """What the cluster has of it that ranks can use: of a node, as much as whole replicas need."""
    size = cluster.ranks_per_replica
    if size == 1 or cluster.replica_spans_nodes:
        return _count(resource)
    nodes = (node["Resources"] for node in ray.nodes() if node["Alive"])  # type: ignore[no-untyped-call]
    return sum(int(found.get(resource, 0)) // size * size for found in nodes)


def _count(resource: str) -> int:
    resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    return int(resources.get(resource, 0))

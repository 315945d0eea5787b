"""Joining the Ray cluster that is named, or starting a Ray for one job and ending it, and how many ranks fit.

Owns the life of Ray in the driver's process. It must not know ranks but by number, nor what they do.
``jobs.cluster`` imports it when it has decided between the two: Ray reads some of its environment only then.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import ray

from engine import ConfigError
from jobs.config import ClusterSection, JobConfig
from jobs.reaper import Reaper
from jobs.stop_signals import StopSignals
from pipelines.counted import counted
from pipelines.driver import JobFailed, StopRequest

LOCAL = "local"
"""Ray's own word for a Ray that is started and not joined."""

_OBJECT_STORE_BYTES = 100 << 20  # Ray's smallest: no row goes through it
_LOOK_INTERVAL_S = 0.02
_ANSWER_S = 10.0

_THREAD = ThreadPoolExecutor(1, thread_name_prefix="ray")
"""What starts Ray. Linux ends the processes that Ray starts with the thread that started them, so this one
has to live as long as they do, idle."""


@dataclass(frozen=True, slots=True)
class Places:
    """How many ranks a run has at most and at least, and whether each has a GPU."""

    num_slots: int
    min_ranks: int
    has_gpus: bool


@contextlib.contextmanager
def connected(address: str, job: JobConfig, signals: StopSignals) -> Iterator[Places]:
    """Join the cluster at ``address``, or start a Ray and end it.

    ``KeyboardInterrupt`` when a stop came first: Ray's start is then left to the end of this process.
    """
    if address != LOCAL:
        with _started(signals, address):
            yield _count_places(job)
        return
    cluster = job.cluster
    wanted = max(cluster.num_ranks, cluster.max_ranks or 0, cluster.ranks_per_replica)
    own = {"object_store_memory": _OBJECT_STORE_BYTES, "include_dashboard": False}
    with _watched(signals), _started(signals, address, num_cpus=max(wanted, os.cpu_count() or 1), **own):
        yield _count_places(job)


@contextlib.contextmanager
def _watched(signals: StopSignals) -> Iterator[None]:
    """A Ray that is started in here ends with it, or after a stop with this process."""
    reaper = Reaper()
    os.environ |= reaper.environment
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        yield
    finally:
        if signals.requested is not StopRequest.NOW:
            reaper.close()
            for name in reaper.environment:
                os.environ.pop(name, None)


@contextlib.contextmanager
def _started(signals: StopSignals, address: str, **options: Any) -> Iterator[None]:
    _start_ray(signals, address, **options)
    try:
        yield
    finally:
        # A stop has two seconds in all, and Ray's farewell takes as many: see ``leave_if_stopped``.
        if signals.requested is not StopRequest.NOW:
            ray.shutdown()


def _start_ray(signals: StopSignals, address: str, **options: Any) -> None:
    """Start or join Ray, beside this thread: it takes seconds, for which a stop does not wait."""
    start = _THREAD.submit(_init_ray, address, **options)
    while not start.done() and not signals.requested:
        wait([start], _LOOK_INTERVAL_S)
        signals.install()  # some versions of Ray put a handler of their own in its place
    if signals.requested and (not start.done() or start.exception() is not None):
        # A signal to the whole group ends Ray's processes too. Nothing is in flight: a drain is no different.
        signals.requested = StopRequest.NOW
        raise KeyboardInterrupt
    try:
        start.result()
    except Exception as error:  # Ray raises nothing narrower for a node that does not come up
        reason = " ".join(str(error).split())
        if address == LOCAL:
            raise JobFailed(f"Ray did not start: {reason}") from error
        raise ConfigError(f"cannot join the Ray cluster at {address!r}: {reason}") from error


def _init_ray(address: str, **options: Any) -> None:
    host, _, port = address.rpartition(":")
    if port.isdigit() and "/" not in host:
        # Where nothing listens Ray looks for 20 s, then ends this process without a word of the address.
        socket.create_connection((host, int(port)), _ANSWER_S).close()
    ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False, **options)


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
        raise ConfigError(f"cluster.{key} is {needed}, but the cluster has {counted(num_gpus, 'GPU')}")
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

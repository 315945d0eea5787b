"""The same measurement on all ranks of a group at once, each a process with a device of its own."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from typing import Any, TypeVar

from engine.config import ReplicaPlace
from engine.parallel import host_rendezvous

T = TypeVar("T")


def on_ranks(num_ranks: int, measure: Callable[..., T], *arguments: Any, **waits: float) -> T:
    """``measure(*arguments, place)`` on every rank, of which this process is the first: what that returns.

    ``measure`` must be a function that other processes can import. ``waits`` are those of ``ReplicaPlace``.
    """
    os.environ |= dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), "lo")
    rendezvous = host_rendezvous("127.0.0.1")
    places = [
        ReplicaPlace(rank=rank, num_ranks=num_ranks, host="127.0.0.1", port=rendezvous.port, **waits)
        for rank in range(num_ranks)
    ]
    spawn = multiprocessing.get_context("spawn")
    others = [spawn.Process(target=measure, args=(*arguments, place), daemon=True) for place in places[1:]]
    try:
        for process in others:
            process.start()
        return measure(*arguments, places[0])
    finally:
        for process in others:
            process.kill()
            process.join()

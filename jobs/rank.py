"""One rank as a Ray actor: a step loop in a process of its own, with an engine built in it.

Owns how a job becomes an engine and a renderer, and nothing of what they then do: that is the worker's.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine import Engine, EngineConfig, ReplicaPlace
from jobs.config import JobConfig, engine_config, sampling_params
from jobs.worker import RankWorker, Serving
from pipelines.chat import ChatOptions
from pipelines.manifest import OutputFolder, load_plan
from pipelines.prompt import PromptRenderer, build_renderer
from pipelines.rank_protocol import Orders, RankReport

EngineBuilder = Callable[..., Engine]
"""Takes an ``EngineConfig`` and, for a rank of a replica of several, a ``ReplicaPlace``."""

Meeting = tuple[str, int]
"""The host and the port where the ranks of a replica find each other."""

_EXCHANGE_WAIT_S = 0.2


@dataclass(frozen=True, kw_only=True)
class RankSpec:
    """All that the ranks' processes are told. ``build_engine`` None: the real one."""

    job: JobConfig
    run: int
    has_gpu: bool = False
    build_engine: EngineBuilder | None = None


def rank_capacity(job: JobConfig) -> int:
    """How many rows a rank runs at once."""
    return max(1, engine_config(job).max_num_seqs // sampling_params(job).n)


def build_job_renderer(job: JobConfig) -> PromptRenderer:
    """The renderer of a job's rows. Raises ``ConfigError``."""
    chat = ChatOptions(
        thinking=job.chat.thinking,
        reasoning_effort=job.chat.reasoning_effort,
        drop_thinking=job.chat.drop_thinking,
    )
    return build_renderer(
        job.model.path,
        sampling_params(job),
        chat,
        template=job.chat.template,
        max_model_len=job.engine.max_model_len,
    )


def build_rank_engine(
    config: EngineConfig, build_engine: EngineBuilder | None, place: ReplicaPlace | None = None
) -> Engine:
    """One rank's engine. The only place where the real one is imported."""
    if build_engine is None:
        from engine.llm_engine import LLMEngine

        build_engine = LLMEngine.build
    return build_engine(config) if place is None else build_engine(config, place)


def host_meeting(host: str) -> tuple[Any, Meeting]:
    """Where the ranks of a replica will find each other, as long as the first of what is returned lives."""
    from engine.parallel import host_rendezvous

    rendezvous = host_rendezvous(host)
    return rendezvous, (host, rendezvous.port)


def choose_own_device() -> None:
    """Have this thread compute on the GPU that Ray gave to this actor, which sees other ranks' GPUs too."""
    import ray

    from engine.device import choose_device

    (name,) = ray.get_gpu_ids()
    choose_device(str(name))


def find_device() -> str:
    """What tells this process's GPU apart from every other."""
    from engine.device import device_uuid

    return device_uuid()


def build_serving(spec: RankSpec, place: ReplicaPlace | None = None) -> Serving:
    """Build the engine and what goes with it."""
    config = engine_config(spec.job)
    renderer = build_job_renderer(spec.job)
    return Serving(
        engine=build_rank_engine(config, spec.build_engine, place),
        renderer=renderer,
        capacity=rank_capacity(spec.job),
        max_num_batched_tokens=config.max_num_batched_tokens,
        splitter=renderer.build_splitter() if spec.job.output.split_reasoning else None,
    )


class RankActor:
    """The rank as a Ray actor: a worker, and the thread of its loop.

    ``rank`` counts within its replica. Of one with several ranks the first says where they meet.
    """

    def __init__(self, spec: RankSpec, rank: int = 0, meeting: Meeting | None = None) -> None:
        # To the process's stderr, which Ray keeps in the rank's log.
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # for the driver, where a whole group is told
        folder = OutputFolder(Path(spec.job.output.state_dir or spec.job.output.path))
        self._node, self._device = socket.gethostname(), ""
        self._rank, self._meeting = rank, meeting
        if spec.job.cluster.ranks_per_replica > 1:
            self._listen(spec)
        self._worker = RankWorker(
            folder,
            load_plan(folder),
            spec.run,
            lambda: self._build(spec),
            publisher=ThreadPoolExecutor(1, "publisher"),
            syncer=ThreadPoolExecutor(1, "syncer"),
            renderer=ThreadPoolExecutor(1, "renderer"),
        )
        threading.Thread(target=self._worker.run, name="step-loop", daemon=True).start()

    def _build(self, spec: RankSpec) -> Serving:
        if spec.has_gpu and spec.job.cluster.ranks_per_replica > 1:
            choose_own_device()
        # Known before the model is read, so that two ranks on one GPU are refused and do not fill it.
        self._device = find_device() if spec.has_gpu else ""
        return build_serving(spec, self._place(spec))

    def _listen(self, spec: RankSpec) -> None:
        host = "127.0.0.1"
        if spec.job.cluster.replica_spans_nodes:
            from ray.util import get_node_ip_address

            host = get_node_ip_address()  # type: ignore[no-untyped-call]
        else:
            # What ranks of one node say to each other is nobody else's to hear.
            for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
                os.environ[name] = "lo"
        if self._meeting is None:
            self._rendezvous, self._meeting = host_meeting(host)

    def _place(self, spec: RankSpec) -> ReplicaPlace | None:
        cluster = spec.job.cluster
        if self._meeting is None:
            return None
        host, port = self._meeting
        # Shorter than the driver's patience: who waits in vain says so before it counts as hanging itself.
        timeout_s = cluster.stall_timeout_s / 2
        return ReplicaPlace(
            rank=self._rank, num_ranks=cluster.ranks_per_replica, host=host, port=port, timeout_s=timeout_s
        )

    def meeting(self) -> Meeting | None:
        """Where the ranks of this one's replica find each other."""
        return self._meeting

    def exchange(self, orders: Orders) -> RankReport:
        """One exchange with the driver."""
        report = self._worker.exchange(orders, _EXCHANGE_WAIT_S)
        return replace(report, node=self._node, device=self._device)

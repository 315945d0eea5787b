"""A job's real processes without Ray: drivers and ranks that start in milliseconds and can be killed.

A nursery, forked before anything has threads, forks every driver and every rank. A rank talks to its
driver over the socket it was asked for by; it runs the real step loop, journals and publishing over the fake
engine.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import Any

from engine import ConfigError, EngineConfig, EngineDead
from jobs.worker import RankWorker, Serving
from pipelines.driver import Driver, JobFailed, Outcome, StopRequest
from pipelines.manifest import DriverLock, OutputFolder, check_folder, claim_run, load_plan, write_plan
from pipelines.rank_protocol import Orders, RankDied, RankReport
from tests.fake_engine import FakeEngine, KilledEngine
from tests.small_jobs import TokenRenderer, make_plan
from tests.torture.harm import send_signal


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """One small job. ``grace_s``: for how long a rank may go on once its driver is gone.

    With ``is_partitioned`` a rank that the driver gives up cannot be reached any more: it is not killed.
    """

    input: Path
    output: Path
    rows_per_shard: int
    num_ranks: int
    capacity: int
    step_s: float
    grace_s: float
    stall_timeout_s: float
    is_partitioned: bool


class Nursery:
    """Forks processes on request; ``close`` ends it and everything it forked. They all write to ``output``."""

    def __init__(self, socket: Path, output: Path) -> None:
        self._socket = str(socket)
        listener = Listener(self._socket, "AF_UNIX", backlog=64)
        self._pid = os.fork()
        if self._pid == 0:
            os.setpgid(0, 0)
            os.dup2(os.open(output, os.O_CREAT | os.O_APPEND | os.O_WRONLY), sys.stderr.fileno())
            _serve(listener, self._socket)
        # The listener is the nursery's now; closing it here would take its name away.
        self._listener = listener

    def start_driver(self, spec: JobSpec) -> DriverProcess:
        """A driver at work on the job."""
        connection = Client(self._socket)
        connection.send(("driver", spec))
        return DriverProcess(connection)

    def close(self) -> None:
        """End the nursery and what it forked, stopped or not."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        self._listener.close()


class DriverProcess:
    """One driver, and what it said last: its ranks' pids, its exit code."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.pid: int = connection.recv()
        self.ranks: list[int] = []
        self.exit_code: int | None = None
        self._is_over = False

    def poll(self, timeout_s: float = 0.0) -> bool:
        """Whether it is over, waiting up to ``timeout_s`` for that."""
        deadline = time.monotonic() + timeout_s
        while not self._is_over:
            if not self._connection.poll(max(0.0, deadline - time.monotonic())):
                return False
            try:
                kind, value = self._connection.recv()
            except (EOFError, ConnectionResetError):
                self._is_over = True
                break
            if kind == "rank":
                self.ranks.append(value)
            else:
                self.exit_code = value
        return True


def _serve(listener: Listener, socket: str) -> None:
    with contextlib.suppress(ImportError):
        import pandas  # noqa: F401 (pyarrow looks for it at its first conversion: once here, not in each fork)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children are reaped by the system
    while True:
        try:
            connection = listener.accept()
            role, argument = connection.recv()
        except (EOFError, ConnectionError):
            continue  # it was killed while it asked
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            code = 1
            try:
                connection.send(os.getpid())
                if role == "driver":
                    code = _run_driver(connection, socket, argument)
                else:
                    code = _run_rank(connection, *argument)
            except (BrokenPipeError, ConnectionResetError, EOFError):
                pass
            except BaseException:
                sys.excepthook(*sys.exc_info())
            finally:
                sys.stderr.flush()
                os._exit(code)
        connection.close()


# A driver


class _Fleet:
    """Ranks in processes, as ``pipelines.rank_protocol.Fleet`` asks for."""

    def __init__(self, spec: JobSpec, run: int, socket: str, parent: Connection) -> None:
        self.num_slots, self.ranks_per_replica = spec.num_ranks, 1
        self._spec, self._run, self._socket, self._parent = spec, run, socket, parent
        self._ranks: dict[int, tuple[Connection, int]] = {}
        self._lost: list[int] = []

    def has_place(self, slot: int) -> bool:
        return True

    def start(self, slot: int) -> None:
        connection = Client(self._socket)
        connection.send(("rank", (self._spec, self._run)))
        pid = connection.recv()
        self._ranks[slot] = (connection, pid)
        self._parent.send(("rank", pid))
        self.exchange(slot, Orders())

    def exchange(self, slot: int, orders: Orders) -> None:
        try:
            self._ranks[slot][0].send(orders)
        except (BrokenPipeError, ConnectionResetError):
            self._lost.append(slot)

    def wait(self, timeout_s: float) -> list[tuple[int, RankReport | RankDied]]:
        lost, self._lost = self._lost, []
        events: list[tuple[int, RankReport | RankDied]] = [(slot, RankDied("killed")) for slot in lost]
        slots = {connection: slot for slot, (connection, _) in self._ranks.items() if slot not in lost}
        for connection in wait(list(slots), 0 if lost else timeout_s):
            assert isinstance(connection, Connection)
            try:
                events.append((slots[connection], connection.recv()))
            except (EOFError, ConnectionResetError):
                events.append((slots[connection], RankDied("killed")))
        return events

    def kill(self, slot: int) -> None:
        if slot not in self._ranks:
            return
        connection, pid = self._ranks.pop(slot)
        self._lost = [other for other in self._lost if other != slot]
        if not self._spec.is_partitioned:
            send_signal(pid, signal.SIGKILL)
        connection.close()


def _run_driver(parent: Connection, socket: str, spec: JobSpec) -> int:
    folder = OutputFolder(spec.output)
    code = 0
    try:
        plan = make_plan(spec.input, spec.rows_per_shard)
        check_folder(folder, plan)
        write_plan(folder, plan)
        with DriverLock(folder):
            run = claim_run(folder)
            fleet = _Fleet(spec, run, socket, parent)
            driver = Driver(folder, plan, fleet, run=run, stall_timeout_s=spec.stall_timeout_s)
            signal.signal(signal.SIGTERM, lambda *_: driver.request_stop(StopRequest.NOW))
            signal.signal(signal.SIGUSR1, lambda *_: driver.request_stop(StopRequest.DRAIN))
            code = 75 if driver.run() is Outcome.STOPPED else 0
            for slot in list(fleet._ranks):
                fleet.kill(slot)
    except ConfigError as error:
        print(f"refused: {error}", file=sys.stderr)
        code = 2
    except JobFailed as error:
        print(f"failed: {error}", file=sys.stderr)
        code = 1
    parent.send(("exit", code))
    return code


# A rank


def _run_rank(driver: Connection, spec: JobSpec, run: int) -> int:
    folder = OutputFolder(spec.output)
    config = EngineConfig(model="fake", max_num_seqs=spec.capacity)
    random_ = random.Random(os.getpid())

    def build() -> Serving:
        time.sleep(random_.uniform(0, 0.05))
        engine: Any = (KilledEngine if random_.random() < 0.5 else FakeEngine)(config, step_s=spec.step_s)
        return Serving(
            engine=engine, renderer=TokenRenderer(), capacity=spec.capacity, max_num_batched_tokens=64
        )

    worker = RankWorker(
        folder,
        load_plan(folder),
        run,
        build,
        publisher=ThreadPoolExecutor(1),
        syncer=ThreadPoolExecutor(1),
        renderer=ThreadPoolExecutor(1),
    )
    threading.Thread(target=worker.run, daemon=True).start()
    while True:
        try:
            orders = driver.recv()
        except (EOFError, ConnectionResetError):
            # Nobody ends it at once when its driver is gone: it goes on for a while, as it would elsewhere.
            time.sleep(random_.uniform(0, spec.grace_s))
            return 0
        try:
            driver.send(worker.exchange(orders, 0.05))
        except EngineDead as error:
            driver.send(RankDied(str(error)))
            return 1

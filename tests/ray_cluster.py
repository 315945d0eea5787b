"""A Ray cluster for tests: a head and further nodes on this machine, on free ports, all told apart by a mark."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from jobs.reaper import KEEPS_ENVIRONMENT, MARK, reap
from tests.conftest import ROOT
from tests.marked_processes import marked_processes

RAY = str(Path(sys.executable).with_name("ray"))
_PATIENCE_S = 120.0


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


class RayCluster:
    """Started with ``add_node``, the first of which is the head; ``environment`` is what its users need."""

    def __init__(self, temporary: Path) -> None:
        self._temporary = temporary
        self.mark = uuid.uuid4().hex
        self._nodes: list[tuple[subprocess.Popen[bytes], str]] = []
        dropped = ("RAY_ADDRESS", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", MARK)
        self.environment = {k: v for k, v in os.environ.items() if k not in dropped}
        self.environment |= {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        self.address = self.dashboard = ""

    def add_node(self, num_cpus: int = 2) -> int:
        """Start the head or another node; its number."""
        node_mark = f"{self.mark}-{len(self._nodes)}"
        command = [RAY, "start", "--block", f"--num-cpus={num_cpus}", "--object-store-memory=104857600"]
        if self._nodes:
            command += [f"--address={self.address}"]
        else:
            port, dashboard, client, agent = free_ports(4)
            self.dashboard = f"http://127.0.0.1:{dashboard}"
            command += [
                *("--head", f"--port={port}", f"--temp-dir={self._temporary}"),
                *("--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}"),
                *(f"--ray-client-server-port={client}", f"--dashboard-agent-listen-port={agent}"),
            ]
        log = open(self._temporary / f"node-{len(self._nodes)}.log", "wb")  # noqa: SIM115 (the node's)
        with log:
            environment = {**self.environment, MARK: node_mark, **KEEPS_ENVIRONMENT}
            node = subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=self._temporary)
        self._nodes.append((node, node_mark))
        self._wait(lambda: b"Ray runtime started" in Path(log.name).read_bytes())
        if not self.address:
            self.address = (self._temporary / "ray_current_cluster").read_text().strip()
        return len(self._nodes) - 1

    def _wait(self, is_so) -> None:  # type: ignore[no-untyped-def]
        deadline = time.monotonic() + _PATIENCE_S
        while not is_so():
            assert time.monotonic() < deadline, "the Ray node did not start"
            assert self._nodes[-1][0].poll() is None, "the Ray node ended"
            time.sleep(0.1)

    def kill_node(self, number: int) -> None:
        """All of a node at once, as when its machine goes away."""
        process, mark = self._nodes[number]
        reap(mark)
        process.wait()

    def processes(self, title: bytes) -> list[int]:
        """Live processes on any node whose title holds ``title``."""
        return marked_processes(f"{MARK}={self.mark}-", title)

    def ray(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """A ray command of a user of this cluster."""
        return subprocess.run(
            [RAY, *arguments],
            env={**self.environment, **environment, "RAY_API_SERVER_ADDRESS": self.dashboard},
            cwd=self._temporary,
            capture_output=True,
            text=True,
            timeout=300,
        )

    def run(self, *command: str, environment: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        """A driver that joins from this machine."""
        joined = {
            **self.environment,
            "RAY_ADDRESS": self.address,
            "PYTHONPATH": str(ROOT),
            **(environment or {}),
        }
        return subprocess.Popen([sys.executable, *command], env=joined, cwd=ROOT)

    def close(self) -> None:
        """End every process of the cluster."""
        for process, mark in self._nodes:
            reap(mark)
            process.wait()


@contextmanager
def open_cluster() -> Iterator[RayCluster]:
    """A cluster without a node; all that is started is ended."""
    # Ray's sockets lie below this folder, and their paths may not be long.
    temporary = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
    cluster = RayCluster(temporary)
    try:
        yield cluster
    finally:
        cluster.close()
        shutil.rmtree(temporary, ignore_errors=True)

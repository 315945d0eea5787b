"""One node of a Ray that lives as long as this process: the head, or a node that joins it.

``python -m jobs.ray_node --head FILE`` writes the cluster's address to FILE once it is up; ``--address A``
joins. Owns the choice of ports, so that neighbours on a shared machine do not meet, and that nothing is left
however this process ends. It must not know who else is in the cluster, nor what runs on it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType

from jobs.reaper import Reaper

_OBJECT_STORE_BYTES = 100 << 20  # Ray's smallest: no row goes through it
_PATIENCE_S = 300.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Start the node and wait for its end, or for a signal."""
    parser = argparse.ArgumentParser(prog="python -m jobs.ray_node", allow_abbrev=False)
    kind = parser.add_mutually_exclusive_group(required=True)
    kind.add_argument("--head", type=Path, metavar="FILE")
    kind.add_argument("--address", metavar="HOST:PORT")
    parser.add_argument("--num-cpus", type=int, required=True)
    parser.add_argument("--num-gpus", type=int, required=True)
    parsed = parser.parse_args(arguments)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # for the driver, where a whole group is told
    command = [str(Path(sys.executable).with_name("ray")), "start", "--block", "--disable-usage-stats"]
    command += [f"--num-cpus={parsed.num_cpus}", f"--num-gpus={parsed.num_gpus}"]
    command += [f"--object-store-memory={_OBJECT_STORE_BYTES}", "--min-worker-port=0", "--max-worker-port=0"]
    if parsed.head is None:
        return _run([*command, f"--address={parsed.address}"], None)
    port, client, agent = _free_ports(3)
    scratch = parsed.head.parent / "ray"
    command += ["--head", f"--port={port}", f"--temp-dir={scratch}", "--include-dashboard=false"]
    command += [f"--ray-client-server-port={client}", f"--dashboard-agent-listen-port={agent}"]
    try:
        return _run(command, parsed.head)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _run(command: Sequence[str], address_file: Path | None) -> int:
    reaper = Reaper()
    try:
        # Ray's own words of welcome tell how to join and to stop by hand, which is not how this one is used.
        environment = {**os.environ, **reaper.environment}
        node = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, start_new_session=True)
        if address_file is not None:
            _write_address(node, address_file)
        return node.wait()
    except KeyboardInterrupt:
        return 0
    finally:
        reaper.close()


def _write_address(node: subprocess.Popen[bytes], address_file: Path) -> None:
    """Ray writes it when the head is up; ours appears whole."""
    found = address_file.parent / "ray" / "ray_current_cluster"
    deadline = time.monotonic() + _PATIENCE_S
    while not (found.is_file() and found.read_text().strip()):
        if node.poll() is not None or time.monotonic() > deadline:
            raise SystemExit("the head of the Ray cluster did not start")
        time.sleep(0.1)
    temporary = address_file.with_suffix(".new")
    temporary.write_text(found.read_text().strip())
    temporary.rename(address_file)


def _free_ports(count: int) -> list[int]:
    """Ports that nobody on this machine listens on."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("", 0))
        return [one.getsockname()[1] for one in sockets]


def _leave(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())

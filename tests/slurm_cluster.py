"""A real Slurm for tests: munged, slurmctld and two slurmd on this machine, below one folder, on free ports.

It needs Debian's slurm-wlm and munge, and root. Nothing outside its folder is touched.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.conftest import ROOT
from tests.marked_processes import marked_processes
from tests.ray_cluster import free_ports

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scancel", "scontrol", "squeue")
_MARK = "TEST_SLURM"
_PATIENCE_S = 60.0

_CONFIG = """\
ClusterName=overnight
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={state}/munge.sock,cred_expire=5
StateSaveLocation={state}/ctld
SlurmdSpoolDir={state}/%n
SlurmctldLogFile={state}/ctld.log
SlurmdLogFile={state}/%n.log
SlurmctldPidFile={state}/ctld.pid
SlurmdPidFile={state}/%n.pid
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=5
MailProg=/bin/true
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={port1} CPUs=4 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={port2} CPUs=4 State=UNKNOWN
PartitionName=main Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP PreemptMode=REQUEUE
"""


def why_not() -> str | None:
    """Why no Slurm can be started here; None where one can."""
    missing = [name for name in PROGRAMS if _find(name) is None]
    if missing:
        return f"a real Slurm is needed (Debian: slurm-wlm and munge): there is no {', '.join(missing)}"
    if os.geteuid() != 0:
        return "a real Slurm is started by root only"
    return None


def _find(program: str) -> str | None:
    return shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


class SlurmCluster:
    """Two nodes of four CPUs, both this machine."""

    def __init__(self, state: Path) -> None:
        self._state = state
        self.mark = uuid.uuid4().hex
        (state / "bin").mkdir()
        command = state / "bin" / "batch-generate"  # for an environment in which it is not installed
        command.write_text(f'#!/bin/sh\nexec {sys.executable} -m jobs.cli "$@"\n')
        command.chmod(0o755)
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "SLURM_"))}
        self.environment |= {
            "SLURM_CONF": str(state / "slurm.conf"),
            "PYTHONPATH": str(ROOT),
            "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin:{state / 'bin'}",
            "RAY_worker_niceness": "0",  # as in conftest.py
            _MARK: self.mark,
        }

    def start(self) -> None:
        """Start the daemons, and wait until both nodes are there."""
        state = self._state
        for name in ("ctld", "n1", "n2"):
            (state / name).mkdir()
        key = state / "munge.key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o600)
        ports = dict(zip(("controller_port", "port1", "port2"), free_ports(3), strict=True))
        host = socket.gethostname().partition(".")[0]
        (state / "slurm.conf").write_text(_CONFIG.format(host=host, state=state, **ports))
        self._daemon(
            "munged",
            "--force",
            f"--key-file={key}",
            *(
                f"--{kind}={state}/munge.{kind.partition('-')[0]}"
                for kind in ("pid-file", "log-file", "seed-file")
            ),
            f"--socket={state}/munge.sock",
        )
        self._daemon("slurmctld")
        for node in ("n1", "n2"):
            self._daemon("slurmd", "-N", node)
        deadline = time.monotonic() + _PATIENCE_S
        while self.command("sinfo", "-h", "-N", "-o", "%T").split() != ["idle", "idle"]:
            assert time.monotonic() < deadline, (state / "ctld.log").read_text()
            time.sleep(0.2)

    def _daemon(self, program: str, *arguments: str) -> None:
        found = _find(program)
        assert found is not None
        environment = {k: v for k, v in self.environment.items() if k != _MARK}
        subprocess.run([found, *arguments], env=environment, check=True, timeout=60)

    def command(self, *command: str) -> str:
        """What a command of Slurm, or one of ours, prints."""
        done = subprocess.run(
            command, env=self.environment, cwd=self._state, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout

    def submit(self, *arguments: object) -> str:
        """``batch-generate slurm ... --submit``; the job's number."""
        return self.script(*arguments, "--submit").strip()

    def script(self, *arguments: object) -> str:
        """``batch-generate slurm ...``: the script."""
        log = f"--sbatch=--output={self._state}/%A_%a.log"
        return self.command(*(sys.executable, "-m", "jobs.cli", "slurm", *map(str, arguments), log))

    def state_of(self, job: str) -> set[str]:
        """The states of a job, or of the tasks of its array."""
        return set(self.command("squeue", "-h", "-t", "all", "-j", job, "-o", "%T").split())

    def wait_for(self, job: str, *states: str, timeout_s: float = 300.0) -> None:
        """Until a job, or every task of its array, is in one of ``states``."""
        deadline = time.monotonic() + timeout_s
        while not self.state_of(job) <= set(states):
            assert time.monotonic() < deadline, (self.state_of(job), self.logs())
            time.sleep(0.3)

    def logs(self) -> str:
        """What the jobs said, and Slurm of them."""
        return "\n".join(f"{path}:\n{path.read_text()}" for path in sorted(self._state.glob("*.log")))

    def processes(self, title: bytes = b"") -> list[int]:
        """Live processes of any job."""
        return marked_processes(f"{_MARK}={self.mark}", title)

    def close(self) -> None:
        """End the jobs and the daemons, and what is left of jobs then."""
        if (self._state / "n2.pid").exists():
            self.command("scancel", "--partition=main")
            deadline = time.monotonic() + _PATIENCE_S
            while self.command("squeue", "-h", "-o", "%i").strip() and time.monotonic() < deadline:
                time.sleep(0.2)  # the watchers of their steps end with them
        for name in ("n1", "n2", "ctld", "munge"):
            pid_file = self._state / f"{name}.pid"
            if pid_file.exists():
                _end(int(pid_file.read_text()), signal.SIGTERM)
        for pid in self.processes():
            _end(pid, signal.SIGKILL)


def _end(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


@contextmanager
def open_slurm() -> Iterator[SlurmCluster]:
    """A Slurm that is gone afterwards."""
    state = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    state.chmod(0o755)  # munged refuses a folder that it cannot trust
    cluster = SlurmCluster(state)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.close()
        shutil.rmtree(state, ignore_errors=True)

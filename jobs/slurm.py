"""A job as a Slurm batch script: one that a person can read, change and submit.

Owns the script's text and its submission. It must not know how a job is run: the script calls the same
commands that a person would.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engine import ConfigError
from jobs.config import JobConfig
from jobs.time_limit import moments_to_stop

MAX_NUM_RESTARTS = 100
"""A job that gets nowhere in its time must not be started for ever."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmRequest:
    """What is asked of Slurm. ``num_slices`` above 1: an array of jobs, each on its slice of the shards.

    ``extra`` are further options of sbatch, as they stand.
    """

    nodes: int
    gpus_per_node: int
    cpus_per_node: int
    time_s: float
    num_slices: int = 1
    extra: tuple[str, ...] = ()


def render_script(job: JobConfig, run_arguments: Sequence[str], request: SlurmRequest) -> str:
    """The script that runs ``batch-generate run`` with ``run_arguments``, which give ``job``."""
    drain_s, _ = moments_to_stop(request.time_s)
    is_array = request.num_slices > 1
    options = [
        f"--job-name={_name(job)}",
        f"--nodes={request.nodes}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={request.cpus_per_node}",
        *([f"--gpus-per-node={request.gpus_per_node}"] if request.gpus_per_node else []),
        f"--time={_slurm_time(request.time_s)}",
        f"--signal=B:USR1@{round(request.time_s - drain_s)}",
        "--requeue",
        "--open-mode=append",
        f"--output=%x-{'%A_%a' if is_array else '%j'}.log",
        *([f"--array=0-{request.num_slices - 1}"] if is_array else []),
        *request.extra,
    ]
    run = ["batch-generate", "run", *run_arguments]
    if request.nodes > 1:
        run += _elastic(job, request)
    command = " ".join(map(shlex.quote, run))
    if is_array:
        command += f' --slice "$SLURM_ARRAY_TASK_ID/{request.num_slices}"'
    pieces = [
        "#!/bin/bash",
        *(f"#SBATCH {option}" for option in options),
        _BEGINNING.format(folder=shlex.quote(os.getcwd()), bin=shlex.quote(str(Path(sys.executable).parent))),
    ]
    if request.nodes > 1:
        pieces.append(_CLUSTER.format(gpus=request.gpus_per_node))
    pieces.append(_DRIVER.format(command=command))
    if request.nodes > 1:
        pieces.append(_CLUSTER_ENDS)
    pieces.append(_END.format(max_num_restarts=MAX_NUM_RESTARTS))
    return "\n".join(pieces)


def submit_script(script: str) -> str:
    """Hand a script to sbatch and return the job's number. Raises ``ConfigError`` with what Slurm says."""
    try:
        done = subprocess.run(["sbatch", "--parsable"], input=script, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise ConfigError(
            "there is no sbatch here: submit the script on a machine of the Slurm cluster"
        ) from error
    if done.returncode:
        raise ConfigError(f"sbatch refused the script: {' '.join(done.stderr.split())}")
    return done.stdout.strip()


def _name(job: JobConfig) -> str:
    last = (job.output.state_dir or job.output.path).rstrip("/").rpartition("/")[2]
    return "".join(char if char.isalnum() or char in "-._" else "_" for char in last) or "overnight"


def _elastic(job: JobConfig, request: SlurmRequest) -> list[str]:
    """Nodes come up one after the other, and one may go: ranks follow them."""
    cluster = job.cluster
    size, per_node = cluster.ranks_per_replica, request.gpus_per_node
    num_places = request.nodes * (per_node or size)
    if per_node and not cluster.replica_spans_nodes:
        num_places = request.nodes * (per_node // size * size)
    most = cluster.max_ranks or cluster.num_ranks or num_places // size * size
    if not most:
        raise ConfigError(f"a replica of {size} ranks has no room: --gpus-per-node is {per_node}")
    return ["--set", "cluster.num_ranks=0", "--set", f"cluster.max_ranks={most}"]


def _slurm_time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"{days}-{hours:02}:{minutes:02}:{rest:02}"


_BEGINNING = """
cd {folder} || exit 1
export PATH={bin}:"$PATH"

unset RAY_ADDRESS  # this job has a Ray of its own

# Slurm sends SIGUSR1 to this script some minutes before the time is up: the driver then begins no other
# row and ends by itself, with exit code 75. SIGTERM means that somebody ended the job.
driver=
is_ended=
trap '[ -z "$driver" ] || kill -USR1 "$driver"' USR1
trap 'is_ended=1; [ -z "$driver" ] || kill -TERM "$driver"' TERM

# Should rows take longer than that, the driver leaves them in time for this job to be queued again.
job=${{SLURM_ARRAY_JOB_ID:+${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID}}
job=${{job:-$SLURM_JOB_ID}}
end=$(squeue --noheader --jobs="$job" --format=%e)
case $end in *T*:*) until=(--until "$end") ;; *) until=() ;; esac
"""

_CLUSTER = """# A Ray across the allocation, on ports that are free, which only this job has the token for.
RAY_AUTH_TOKEN=$(python -c 'import secrets; print(secrets.token_hex(32))')
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN
scratch=$(mktemp -d /tmp/overnight-XXXXXX)
python -m jobs.ray_node --head "$scratch/address" --num-cpus "$SLURM_CPUS_PER_TASK" --num-gpus {gpus} &
head=$!
while [ ! -f "$scratch/address" ]; do
  if [ -n "$is_ended" ] || ! kill -0 "$head"; then kill "$head"; wait "$head"; exit 1; fi
  sleep 0.5
done
RAY_ADDRESS=$(cat "$scratch/address")
export RAY_ADDRESS
others=$((SLURM_NNODES - 1))
srun --relative=1 --nodes=$others --ntasks=$others --cpus-per-task="$SLURM_CPUS_PER_TASK" \\
  python -m jobs.ray_node --address "$RAY_ADDRESS" --num-cpus "$SLURM_CPUS_PER_TASK" --num-gpus {gpus} &
workers=$!
"""

_DRIVER = """{command} "${{until[@]}}" &
driver=$!
while true; do
  wait "$driver"
  code=$?
  kill -0 "$driver" 2> /dev/null || break  # else a signal ended the waiting, and the driver goes on
done
wait "$driver" 2> /dev/null
last=$?
[ "$last" -eq 127 ] || code=$last
driver=
"""

_CLUSTER_ENDS = """kill "$workers" "$head" 2> /dev/null
wait "$workers" "$head"
rm -rf "$scratch"
"""

_END = """# Stopped in time and not done: once more, from where it is now.
if [ "$code" -eq 75 ] && [ -z "$is_ended" ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {max_num_restarts} ]; then
  scontrol requeue "$job"
fi
exit "$code"
"""

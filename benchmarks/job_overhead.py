"""What does the job layer cost? The same rows through a bare engine and through a whole job on one rank.

Both sides drive an engine that notes each of its steps. Between a rank's first request and its last step
the job layer can cost three things, told apart here:

  more steps           for the same rows: batches that were not full. Exact on any machine.
  time between steps   feeding and journaling. Nearly exact.
  slower steps         its other threads and processes want the same cores and the same interpreter lock.
                       Drowned by other work on a machine, so of each step the least disturbed run counts, and
                       half of the bare engine's runs are held against the other half: what that says is
                       noise.

Starting Ray, loading the model and publishing the last part do not grow with the job and are printed apart.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.environment import describe
from benchmarks.noted_engine import NOTE, NOTES, build_noted
from engine import EngineConfig, SamplingParams
from jobs.cluster import run_job
from jobs.config import load_job
from pipelines.chat import ChatOptions
from pipelines.prompt import build_renderer


@dataclass(frozen=True, slots=True)
class Measured:
    """One side once, from the first request to the end of the last step. ``apart_s``: what else it took.

    ``steps_s`` and ``cpu_s`` are each step's, the latter of its thread; ``gaps_s`` lie before the steps.
    """

    num_tokens: int
    steps_s: list[float]
    cpu_s: list[float]
    gaps_s: list[float]
    apart_s: float

    @property
    def seconds(self) -> float:
        return sum(self.steps_s) + sum(self.gaps_s)

    @property
    def waits_s(self) -> float:
        """For how long the thread of the steps was in one and did not run."""
        return sum(self.steps_s) - sum(self.cpu_s)


def measure(run: Callable[[], None]) -> Measured:
    """Run one side, and read the notes of its engine."""
    with tempfile.NamedTemporaryFile() as notes:
        os.environ[NOTES] = notes.name
        started = time.perf_counter()
        run()
        whole_s = time.perf_counter() - started
        found = list(NOTE.iter_unpack(Path(notes.name).read_bytes()))
    steps = found[1:]
    return Measured(
        num_tokens=steps[-1][3],
        steps_s=[ended - began for began, ended, _, _ in steps],
        cpu_s=[cpu_s for _, _, cpu_s, _ in steps],
        gaps_s=[step[0] - before[1] for before, step in pairwise(found)],
        apart_s=whole_s - (steps[-1][1] - found[0][0]),
    )


def run_bare(model: str, prompts: list[str], max_tokens: int) -> None:
    """All rows at once into one engine in this process."""
    engine = build_noted(EngineConfig(model=model, dtype="float32"))
    sampling = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=max_tokens, ignore_eos=True)
    renderer = build_renderer(model, sampling, ChatOptions())
    for index, prompt in enumerate(prompts):
        engine.add_request(renderer.render({"prompt": prompt}, f"rows.parquet#{index}"))
    num_done = 0
    while engine.has_unfinished():
        num_done += len(engine.step())
    assert num_done == len(prompts), f"only {num_done} of {len(prompts)} rows were answered"


def run_whole(model: str, prompts: list[str], max_tokens: int) -> None:
    """A whole job on one rank."""
    sampling = {"temperature": 0.8, "top_p": 0.95, "max_tokens": max_tokens, "ignore_eos": True}
    with tempfile.TemporaryDirectory() as folder:
        pq.write_table(pa.table({"prompt": prompts}), f"{folder}/rows.parquet")
        flags = {
            "model.path": model,
            "input.path": f"{folder}/rows.parquet",
            "output.path": f"{folder}/out",
            "output.max_error_rate": 0.0,
            "engine.dtype": "float32",
            "cluster.num_ranks": 1,
            **{f"sampling.{name}": value for name, value in sampling.items()},
        }
        code = run_job(load_job(None, [], flags), build_engine=build_noted)
        assert code == 0, f"the job ended with exit code {code}"


def show(name: str, found: list[Measured]) -> None:
    """Print one side's runs."""
    for one in found:
        print(
            f"{name}: {len(one.steps_s)} steps of {one.num_tokens / len(one.steps_s):.1f} tokens, "
            f"{sum(one.steps_s):.2f} s in steps ({sum(one.cpu_s):.2f} s CPU), "
            f"{sum(one.gaps_s):.3f} s between; {one.num_tokens / one.seconds:.1f} tok/s; "
            f"apart {one.apart_s:.1f} s"
        )


def least_disturbed(found: list[Measured]) -> Measured:
    """The least of every step, gap and rest among one side's runs that have its usual number of steps."""
    usual = statistics.median_low(len(one.steps_s) for one in found)
    same = [one for one in found if len(one.steps_s) == usual]
    return Measured(
        num_tokens=same[0].num_tokens,
        steps_s=[min(step) for step in zip(*(one.steps_s for one in same), strict=True)],
        cpu_s=[min(step) for step in zip(*(one.cpu_s for one in same), strict=True)],
        gaps_s=[min(gap) for gap in zip(*(one.gaps_s for one in same), strict=True)],
        apart_s=min(one.apart_s for one in found),
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.job_overhead",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--model", default="examples/bard/model")
    parser.add_argument("--prompts", default="examples/bard/prompts.parquet")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args(arguments)
    os.environ.pop("RAY_ADDRESS", None)
    os.environ["PYTHONPATH"] = str(Path(__file__).resolve().parents[1])
    print(describe())
    known = pq.read_table(args.prompts)["prompt"].to_pylist()
    prompts = [known[i % len(known)] for i in range(args.rows)]
    model = str(Path(args.model).resolve())
    runs: dict[str, list[Measured]] = {"bare engine": [], "whole job": []}
    for _ in range(args.repeats):
        runs["bare engine"].append(measure(lambda: run_bare(model, prompts, args.max_tokens)))
        runs["whole job"].append(measure(lambda: run_whole(model, prompts, args.max_tokens)))
    for name, found in runs.items():
        show(name, found)
    bare, whole = (least_disturbed(found) for found in runs.values())
    print_costs(bare, whole)
    waits = [statistics.median(one.waits_s for one in found) for found in runs.values()]
    print(f"in steps, waiting for a core or the lock: {(waits[1] - waits[0]) / bare.seconds:+.2%}")
    if args.repeats > 1:
        halves = [least_disturbed(runs["bare engine"][at::2]) for at in range(2)]
        wall, cpu = costs_of_steps(*halves)
        print(f"noise, the bare engine against itself: {wall:+.2%} of wall, {cpu:+.2%} of CPU time")


def costs_of_steps(one: Measured, other: Measured) -> tuple[float, float]:
    """How much longer all steps of the other take, by the clock and in CPU time."""
    return sum(other.steps_s) / sum(one.steps_s) - 1, sum(other.cpu_s) / sum(one.cpu_s) - 1


def print_costs(bare: Measured, whole: Measured) -> None:
    """What the job layer costs, by kind, of the bare engine's time."""
    more_steps = len(whole.steps_s) / len(bare.steps_s) - 1
    slower, slower_cpu = costs_of_steps(bare, whole)
    between = (sum(whole.gaps_s) - sum(bare.gaps_s)) / bare.seconds
    print(
        f"of the bare engine's time: number of steps {more_steps:+.2%}, between steps {between:+.2%}, "
        f"all steps {slower:+.2%} (their CPU time {slower_cpu:+.2%})"
    )
    print(
        f"the job layer costs {slower + between:+.2%} of wall time, {slower_cpu + between:+.2%} by CPU time"
    )


if __name__ == "__main__":
    main()

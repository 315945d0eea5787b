"""``python -m tests.torture``: harm jobs at random, resume them, and check that nothing is lost or doubled."""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from tests.torture.harm import Log
from tests.torture.processes import Nursery
from tests.torture.scripted import ScriptedJob

_LEAST_HARMS_PER_JOB = 2
"""Jobs that take fewer on the average are over too soon: no more of them are tried."""


@dataclass(frozen=True, kw_only=True)
class Measure:
    """How many harms a part of the run must do, how many of them (from, below) a job is to take at most, and
    which share of them must hit ranks with rows in flight."""

    num_harms: int
    harms_per_job: tuple[int, int]
    least_share_of_ranks: float


class Job(Protocol):
    """A job that can be harmed."""

    def run(self, num_harms: int) -> None: ...


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.torture", description=__doc__)
    parser.add_argument("--scripted", type=int, default=0, metavar="N", help="harms over the fake engine")
    parser.add_argument("--real", type=int, default=0, metavar="N", help="harms on Ray with the real engine")
    parser.add_argument("--seed", type=int, help="of the first job; the others count up from it")
    parsed = parser.parse_args(arguments)
    seed = parsed.seed if parsed.seed is not None else random.SystemRandom().randrange(1 << 30)
    with tempfile.TemporaryDirectory(prefix="torture-", ignore_cleanup_errors=True) as name:
        folder, output = Path(name), Path(name) / "output.log"
        try:
            if parsed.scripted:
                nursery = Nursery(folder / "nursery", output)  # before this process has threads
                try:
                    # A few harms in a test must not fail it by chance.
                    measure = Measure(
                        num_harms=parsed.scripted, harms_per_job=(3, 12), least_share_of_ranks=0.1
                    )
                    seed = _run_jobs(partial(ScriptedJob, nursery), folder, seed, measure)
                finally:
                    nursery.close()
            if parsed.real:
                from tests.torture.real import RealJob, open_cluster  # Ray and torch: seconds, and threads

                measure = Measure(num_harms=parsed.real, harms_per_job=(6, 14), least_share_of_ranks=0.2)
                with open_cluster(output) as cluster:
                    _run_jobs(partial(RealJob, cluster), folder, seed, measure)
        except BaseException:
            print(output.read_text()[-6000:])
            raise
    return 0


def _run_jobs(make_job: Callable[[Path, int, Log], Job], folder: Path, seed: int, measure: Measure) -> int:
    """Jobs until there were enough harms; returns the next seed. Raises ``TooMild``."""
    started, log = time.monotonic(), Log()
    wanted = measure.num_harms
    while log.num_harms < wanted and _LEAST_HARMS_PER_JOB * log.num_jobs < wanted:
        before = log.num_harms
        (folder / str(seed)).mkdir()
        print(f"seed {seed}:", flush=True)
        make_job(folder / str(seed), seed, log).run(random.Random(seed).randrange(*measure.harms_per_job))
        print(f"  as it must be after {log.num_harms - before} harms, {log.num_harms} so far", flush=True)
        seed += 1
    print(f"in {time.monotonic() - started:.0f} s:", flush=True)
    for line in log.lines():
        print(f"  {line}", flush=True)
    log.check_harms(wanted, measure.least_share_of_ranks)
    return seed


if __name__ == "__main__":
    sys.exit(main())

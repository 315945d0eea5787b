"""Does host memory stay flat over a long job? The resident size of driver and rank while rows go through.

The engine is the tests' scripted one, so that all memory seen is the job layer's. Samples are taken from
outside, by the share of parts that are on disk. Three questions, one each:

  rows     a job of many small rows: from 10 % to 100 % of it, does memory grow?
  wide     one row group with a fat column that the output leaves out: peak memory against its decoded size
  resume   a job of many committed shards: how long until a driver that is started again is at work?
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.environment import describe

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "examples" / "bard" / "model"
MIB = 1 << 20


@dataclass
class Sample:
    """Resident bytes at one moment: the driver's, and the largest rank's."""

    share: float
    driver: int
    rank: int


class MeasuredJob:
    """A whole job in processes of its own, watched through /proc."""

    def __init__(self, input_path: Path, output: Path, *overrides: str) -> None:
        self.output = output
        self._mark = uuid.uuid4().hex
        environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
        environment |= {"PYTHONPATH": str(ROOT), "BENCHMARK_MARK": self._mark}
        command = [sys.executable, "-m", "tests.end_to_end.run_fake_job", "build_fast", str(MODEL)]
        command += [str(input_path), str(output), "1", "engine.max_num_seqs=256", *overrides]
        log = open(output.parent / "log", "ab")  # noqa: SIM115 (lives as long as the job)
        self.process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
        self.peaks = {"driver": 0, "rank": 0}

    def sample(self, num_parts: int) -> Sample | None:
        """Where the job is and what it holds now; None before its rank is there."""
        driver, ranks = resident_bytes(self.process.pid), [resident_bytes(pid) for pid in self._ranks()]
        if not driver or not ranks:
            return None
        self.peaks = {
            "driver": max(self.peaks["driver"], driver),
            "rank": max(self.peaks["rank"], *ranks),
        }
        done = sum(1 for name in os.listdir(self.output) if name.startswith("part-"))
        return Sample(done / num_parts, driver, max(ranks))

    def _ranks(self) -> list[int]:
        mark, found = f"BENCHMARK_MARK={self._mark}".encode(), []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                is_rank = b"RankActor" in (entry / "cmdline").read_bytes()
                if is_rank and mark in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
        return found


def resident_bytes(pid: int) -> int:
    """What the process holds that no other does: without mapped files, which the system may take back."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def measure_rows(folder: Path, num_rows: int) -> None:
    """Memory against progress."""
    ids = np.random.default_rng(0).integers(1, 100, size=(num_rows, 64), dtype=np.int32)
    prompts = pa.FixedSizeListArray.from_arrays(pa.array(ids.reshape(-1)), 64).cast(pa.list_(pa.int32()))
    pq.write_table(pa.table({"prompt_token_ids": prompts}), folder / "in.parquet")
    del ids, prompts
    num_parts = -(-num_rows // 1000)
    job = MeasuredJob(folder / "in.parquet", folder / "out")
    samples: list[Sample] = []
    started = time.monotonic()
    while job.process.poll() is None:
        time.sleep(0.5)
        found = job.sample(num_parts) if (folder / "out").is_dir() else None
        if found is not None:
            samples.append(found)
    seconds = time.monotonic() - started
    assert job.process.returncode == 0, (folder / "log").read_text()[-2000:]
    print(f"{num_rows} rows in {seconds:.0f} s; resident MiB by share of the job that is committed:")
    for tenth in range(1, 11):
        near = [s for s in samples if (tenth - 0.5) / 10 <= s.share < (tenth + 0.5) / 10]
        if near:
            driver, rank = (np.median([getattr(s, name) for s in near]) / MIB for name in ("driver", "rank"))
            print(f"  {tenth * 10:3d} %: driver {driver:.1f}, rank {rank:.1f}")
    late = [s for s in samples if s.share >= 0.1]
    for name in ("driver", "rank"):
        slope = np.polyfit([s.share for s in late], [getattr(s, name) / MIB for s in late], 1)[0]
        print(f"  {name}: {slope:+.1f} MiB over the whole job")


def measure_wide(folder: Path, num_bytes: int) -> None:
    """Peak memory of a job over one row group, most of which is not passed on."""
    num_rows, block = 4000, num_bytes // 4000
    noise = np.random.default_rng(0)
    ids = pa.array([[1 + i % 99, 7] for i in range(num_rows)], pa.list_(pa.int32()))
    fat = pa.array([noise.bytes(block) for _ in range(num_rows)], pa.large_binary())
    pq.write_table(
        pa.table({"prompt_token_ids": ids, "fat": fat}),
        folder / "in.parquet",
        row_group_size=num_rows,
        use_dictionary=False,
    )
    del fat
    options = ["output.columns=[prompt_token_ids]"]
    job = MeasuredJob(folder / "in.parquet", folder / "out", *options)
    while job.process.poll() is None:
        time.sleep(0.1)
        if (folder / "out").is_dir():
            job.sample(4)
    assert job.process.returncode == 0, (folder / "log").read_text()[-2000:]
    decoded, peaks = num_rows * block / MIB, job.peaks
    print(f"one row group of {decoded:.0f} MiB decoded, its fat column not passed on:")
    print(f"  peak MiB: driver {peaks['driver'] / MIB:.0f}, rank {peaks['rank'] / MIB:.0f}")


def measure_resume(folder: Path, num_shards: int) -> None:
    """Time until a driver that is started again knows what is done."""
    rows = pa.array([[1 + i % 99] for i in range(num_shards)], pa.list_(pa.int32()))
    pq.write_table(pa.table({"prompt_token_ids": rows}), folder / "in.parquet")
    for name in ("first run", "run again, all committed"):
        started = time.monotonic()
        job = MeasuredJob(folder / "in.parquet", folder / "out", "input.rows_per_shard=1")
        assert job.process.wait() == 0, (folder / "log").read_text()[-2000:]
        print(f"{num_shards} shards, {name}: {time.monotonic() - started:.1f} s with the start of Ray")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.host_memory",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("question", choices=["rows", "wide", "resume"])
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--mib", type=int, default=2048)
    parser.add_argument("--shards", type=int, default=5000)
    args = parser.parse_args(arguments)
    print(describe())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if args.question == "rows":
            measure_rows(folder, args.rows)
        elif args.question == "wide":
            measure_wide(folder, args.mib * MIB)
        else:
            measure_resume(folder, args.shards)


if __name__ == "__main__":
    main()

"""Torture of small jobs on a real Ray with the real engine: every answer's digest is compared too.

One cluster serves all jobs, so that a kill costs no start of Ray; drivers are the command that a user
types. What the answers must be is learned once for all jobs, from an engine in this process, one row at a time:
an answer depends on its row's name and prompt alone.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import ray

from engine import EngineConfig, Request, SamplingParams
from engine.llm_engine import LLMEngine
from tests.conftest import ROOT
from tests.marked_processes import marked_processes
from tests.small_jobs import random_prompts, write_prompts
from tests.torture.harm import Aim, Log, check_at_rest, check_finished, check_quarantined, send_signal

MODEL = ROOT / "tests" / "data" / "tiny"
_MARK = "TORTURE_CLUSTER"
_MAX_TOKENS = 12
_NUM_ROWS = range(40, 76)
_PROMPTS = random_prompts(random.Random(0), max(_NUM_ROWS))
"""A job's rows are the first of these: its own draws say how many, and which of them are no prompts."""
_PATIENCE_S = 300.0


class Cluster:
    """A Ray of our own, whose processes carry a mark, and ``digests``: what its jobs must answer, by row."""

    def __init__(self, output: IO[bytes]) -> None:
        self.output = output
        self.digests = _learn_digests()
        self._mark = uuid.uuid4().hex
        os.environ |= {_MARK: self._mark, "PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"}
        os.environ.pop("RAY_ADDRESS", None)
        context = ray.init(
            address="local",
            num_cpus=4,
            include_dashboard=False,
            object_store_memory=100 << 20,
            log_to_driver=False,
        )
        self.address: str = context.address_info["gcs_address"]

    def ranks(self) -> list[int]:
        """Live rank processes of this cluster, told apart by its mark."""
        return marked_processes(f"{_MARK}={self._mark}", b"RankActor")


@contextmanager
def open_cluster(output: Path) -> Iterator[Cluster]:
    """A cluster that is gone afterwards; everything in it writes to ``output``."""
    with open(output, "ab") as file:
        try:
            yield Cluster(file)
        finally:
            ray.shutdown()


def _learn_digests() -> dict[str, str]:
    engine = LLMEngine.build(EngineConfig(model=str(MODEL), device="cpu", max_num_seqs=1, max_model_len=64))
    sampling = SamplingParams(max_tokens=_MAX_TOKENS)
    for index, prompt in enumerate(_PROMPTS):
        assert prompt is not None
        engine.add_request(
            Request(request_id=f"in.parquet#{index}", prompt_token_ids=prompt, sampling=sampling)
        )
    digests = {}
    while engine.has_unfinished():
        digests |= {out.request_id: out.completions[0].output_digest for out in engine.step()}
    return digests


class RealJob:
    """One job of the tiny model, in a folder of its own, drawn from ``seed``."""

    def __init__(self, cluster: Cluster, folder: Path, seed: int, log: Log) -> None:
        self._cluster, self._log, self._random = cluster, log, random.Random(seed)
        self._input, self._output = folder / "in", folder / "out"
        self._prompts = _PROMPTS[: self._random.choice(_NUM_ROWS)]
        for index in self._random.sample(range(len(self._prompts)), 2):
            self._prompts[index] = self._random.choice([None, []])
        write_prompts(self._input / "in.parquet", self._prompts)
        self._rows_per_shard = self._random.randrange(4, 20)
        self._num_ranks = self._random.choice([1, 2, 2])
        self._aim = Aim(self._output, len(self._prompts), log)
        self._old_ranks: set[int] = set()
        self._num_starts = 0

    def run(self, num_harms: int) -> None:
        """Harm the job ``num_harms`` times, or until it is finished, let it finish, and compare."""
        driver = self._start()
        last = self._log.num_harms + num_harms
        while self._log.num_harms < last and not self._aim.is_finished:
            driver = self._harm(driver)
        self._finish(driver)
        self._finish(self._start())  # cleans what ranks left that died late
        rows = check_finished(self._output, self._log).to_pylist()
        assert [row["prompt_token_ids"] for row in rows] == self._prompts
        check_quarantined(self._output, rows, self._log)
        for index, row in enumerate(rows):
            assert row["row_id"] == f"in.parquet#{index}"
            if row["error"] == "engine_crash":
                continue
            if not row["prompt_token_ids"]:
                assert row["error"] in ("null_prompt", "empty_prompt"), row
            else:
                assert row["output_digest"] == self._cluster.digests[row["row_id"]], row

    def _start(self) -> subprocess.Popen[bytes]:
        settings = {
            "cluster.address": self._cluster.address,
            "input.rows_per_shard": self._rows_per_shard,
            "engine.max_num_seqs": 3,
            "engine.max_model_len": 64,
            "output.max_error_rate": 1.0,
            "sampling.max_tokens": _MAX_TOKENS,
        }
        command = [
            "run",
            "--model",
            MODEL,
            "--input",
            self._input,
            "--output",
            self._output,
            "--num-ranks",
            self._num_ranks,
        ]
        for key, value in settings.items():
            command += ["--set", f"{key}={value}"]
        self._log.num_resumes += self._num_starts > 0
        self._num_starts += 1
        self._old_ranks = set(self._cluster.ranks())  # some live a moment longer than their driver
        return subprocess.Popen(
            [sys.executable, "-m", "jobs.cli", *map(str, command)],
            cwd=ROOT,
            stdout=self._cluster.output,
            stderr=self._cluster.output,
        )

    def _harm(self, driver: subprocess.Popen[bytes]) -> subprocess.Popen[bytes]:
        """One harm once the job got a random number of rows further; returns the driver then at work."""
        self._wait_for_progress(driver)
        if driver.poll() is not None:
            return driver if self._aim.is_finished else self._resume(driver)
        # What costs a start of a rank (torch, the model) comes less often than what costs nothing.
        harms = [self._end_driver, self._stop_driver, self._stop_driver]
        harms += [self._kill_rank, self._kill_rank, self._stop_rank, self._stop_rank]
        self._random.choice(harms)(driver)
        return driver if driver.poll() is None or self._aim.is_finished else self._resume(driver)

    def _wait_for_progress(self, driver: subprocess.Popen[bytes]) -> None:
        """Until some rows more are there, or at any moment of a start."""
        if self._random.random() < 0.2:
            time.sleep(self._random.uniform(0, 4))
            return
        wanted = self._aim.num_done + self._random.randrange(1, 5)
        deadline = time.monotonic() + _PATIENCE_S
        while driver.poll() is None and not self._aim.is_finished and self._aim.num_done < wanted:
            assert time.monotonic() < deadline, "no progress"
            time.sleep(0.05)

    def _resume(self, driver: subprocess.Popen[bytes]) -> subprocess.Popen[bytes]:
        if driver.returncode >= 0:
            self._log.exit_codes[driver.returncode] += 1
        status = check_at_rest(self._output, self._log)
        # Ranks that were ended too often before they did anything fail a run, not the job.
        was_failed = driver.returncode == 1 and status is not None and status.num_rank_deaths >= 3
        ends = (0, 75, -signal.SIGKILL, -signal.SIGTERM, -signal.SIGUSR1)
        assert was_failed or driver.returncode in ends, driver.returncode
        return self._start()

    def _finish(self, driver: subprocess.Popen[bytes]) -> None:
        for _ in range(4):
            if driver.wait(_PATIENCE_S) == 0:
                self._log.exit_codes[0] += 1
                return
            driver = self._resume(driver)
        raise AssertionError("the job does not come to its end, again and again")

    # Harms

    def _end_driver(self, driver: subprocess.Popen[bytes], *numbers: signal.Signals) -> None:
        number = self._random.choice(
            numbers or (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGUSR1)
        )
        self._aim.hit("driver", driver.pid, number, self._ranks())
        driver.wait(_PATIENCE_S)

    def _stop_driver(self, driver: subprocess.Popen[bytes]) -> None:
        self._aim.hit("driver", driver.pid, signal.SIGSTOP, self._ranks())
        time.sleep(self._random.uniform(0, 3))
        driver.send_signal(signal.SIGCONT)

    def _kill_rank(self, driver: subprocess.Popen[bytes]) -> None:
        pid = self._draw_rank(driver)
        if pid is not None:
            self._aim.hit("rank", pid, self._random.choice([signal.SIGKILL, signal.SIGTERM]), [pid])

    def _stop_rank(self, driver: subprocess.Popen[bytes]) -> None:
        """A rank stands still for a while; now and then its driver ends before it goes on."""
        pid = self._draw_rank(driver)
        if pid is None or not self._aim.hit("rank", pid, signal.SIGSTOP, [pid]):
            return
        time.sleep(self._random.uniform(0, 3))
        if self._random.random() < 0.3:
            # Not SIGUSR1: a drain waits for every rank, and this one cannot answer.
            self._end_driver(driver, signal.SIGKILL, signal.SIGTERM)
        send_signal(pid, signal.SIGCONT)

    def _draw_rank(self, driver: subprocess.Popen[bytes]) -> int | None:
        """One of the driver's ranks, maybe at its start; None when the driver ends without one."""
        deadline = time.monotonic() + _PATIENCE_S
        while driver.poll() is None and not (ranks := self._ranks()):
            assert time.monotonic() < deadline, "no rank"
            time.sleep(0.05)
        return self._random.choice(ranks) if driver.poll() is None else None

    def _ranks(self) -> list[int]:
        return sorted(set(self._cluster.ranks()) - self._old_ranks)

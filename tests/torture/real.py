"""Torture of small jobs on a real Ray with the real engine: every answer's digest is compared too.

One cluster serves all jobs, so that a kill costs no start of Ray; drivers are the command that a user
types. What the answers must be is learned from an engine in this process, one row at a time.
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
from pipelines.report import read_status
from tests.conftest import ROOT
from tests.marked_processes import marked_processes
from tests.small_jobs import random_prompts, write_prompts
from tests.torture.harm import Log, check_at_rest, check_finished
from tests.torture.processes import send_signal

MODEL = ROOT / "tests" / "data" / "tiny"
_MARK = "TORTURE_CLUSTER"
_MAX_TOKENS = 5
_PATIENCE_S = 300.0


class Cluster:
    """A Ray of our own, whose processes carry a mark."""

    def __init__(self, output: IO[bytes]) -> None:
        self.output = output
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


class RealJob:
    """One job of the tiny model, in a folder of its own, drawn from ``seed``."""

    def __init__(self, cluster: Cluster, folder: Path, seed: int, log: Log) -> None:
        self._cluster, self._log, self._random = cluster, log, random.Random(seed)
        self._input, self._output = folder / "in", folder / "out"
        self._prompts = random_prompts(self._random, self._random.randrange(24, 40))
        for index in self._random.sample(range(len(self._prompts)), 2):
            self._prompts[index] = self._random.choice([None, []])
        write_prompts(self._input / "in.parquet", self._prompts)
        self._rows_per_shard = self._random.randrange(4, 20)
        self._num_ranks = self._random.choice([1, 2])
        self._num_starts = 0

    def run(self, num_harms: int) -> None:
        """Learn the answers, then harm the job ``num_harms`` times, let it finish, and compare."""
        driver = self._start()
        digests = self._learn_digests()
        for _ in range(num_harms):
            driver = self._harm(driver)
        assert self._wait(driver) == 0
        assert self._wait(self._start()) == 0  # cleans what ranks left that died late
        rows = check_finished(self._output, self._log).to_pylist()
        assert [row["prompt_token_ids"] for row in rows] == self._prompts
        for index, row in enumerate(rows):
            assert row["row_id"] == f"in.parquet#{index}"
            if row["error"] == "engine_crash":
                assert read_status(self._output).num_rank_deaths >= 2
                self._log.num_quarantined += 1
            elif not row["prompt_token_ids"]:
                assert row["error"] in ("null_prompt", "empty_prompt"), row
            else:
                assert row["output_digest"] == digests[row["row_id"]], row

    def _learn_digests(self) -> dict[str, str]:
        engine = LLMEngine.build(
            EngineConfig(model=str(MODEL), device="cpu", max_num_seqs=1, max_model_len=64)
        )
        for index, prompt in enumerate(self._prompts):
            if prompt:
                engine.add_request(
                    Request(
                        request_id=f"in.parquet#{index}",
                        prompt_token_ids=prompt,
                        sampling=SamplingParams(max_tokens=_MAX_TOKENS),
                    )
                )
        digests = {}
        while engine.has_unfinished():
            digests |= {out.request_id: out.completions[0].output_digest for out in engine.step()}
        return digests

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
            "2",
        ]
        for key, value in settings.items():
            command += ["--set", f"{key}={value}"]
        self._log.num_resumes += self._num_starts > 0
        self._num_starts += 1
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
            driver = self._resume(driver)
        # What costs a start of a rank (torch, the model) comes less often than what costs nothing.
        harms = [self._end_driver, self._stop_driver, self._stop_driver]
        harms += [self._kill_rank, self._stop_rank, self._stop_rank]
        self._random.choice(harms)(driver)
        return driver if driver.poll() is None else self._resume(driver)

    def _wait_for_progress(self, driver: subprocess.Popen[bytes]) -> None:
        """Until some rows more are there, or at any moment of a start."""
        if self._random.random() < 0.25:
            time.sleep(self._random.uniform(0, 4))
            return
        started = self._num_done()
        wanted = self._random.randrange(1, 3)
        deadline = time.monotonic() + _PATIENCE_S
        while driver.poll() is None and self._num_done() < started + wanted:
            assert time.monotonic() < deadline, "no progress"
            time.sleep(0.1)

    def _num_done(self) -> int:
        if not (self._output / "_overnight" / "plan.json").exists():
            return 0
        status = read_status(self._output)
        return status.num_ok + status.num_error

    def _resume(self, driver: subprocess.Popen[bytes]) -> subprocess.Popen[bytes]:
        if driver.returncode >= 0:
            self._log.exit_codes[driver.returncode] += 1
        assert driver.returncode in (0, 75, -signal.SIGKILL, -signal.SIGTERM, -signal.SIGUSR1), (
            driver.returncode
        )
        check_at_rest(self._output, self._log)
        return self._start()

    def _wait(self, driver: subprocess.Popen[bytes]) -> int:
        code = driver.wait(_PATIENCE_S)
        self._log.exit_codes[code] += 1
        return code

    # Harms

    def _end_driver(self, driver: subprocess.Popen[bytes], *numbers: signal.Signals) -> None:
        number = self._random.choice(
            numbers or (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGUSR1)
        )
        self._log.harms[f"driver {number.name}"] += 1
        driver.send_signal(number)
        driver.wait(_PATIENCE_S)

    def _stop_driver(self, driver: subprocess.Popen[bytes]) -> None:
        self._log.harms["driver SIGSTOP, SIGCONT"] += 1
        driver.send_signal(signal.SIGSTOP)
        time.sleep(self._random.uniform(0, 3))
        driver.send_signal(signal.SIGCONT)

    def _kill_rank(self, driver: subprocess.Popen[bytes]) -> None:
        ranks = self._cluster.ranks()
        if ranks:
            number = self._random.choice([signal.SIGKILL, signal.SIGTERM])
            self._log.harms[f"rank {number.name}"] += send_signal(self._random.choice(ranks), number)

    def _stop_rank(self, driver: subprocess.Popen[bytes]) -> None:
        """A rank stands still for a while; now and then its driver ends before it goes on."""
        ranks = self._cluster.ranks()
        if not ranks:
            return
        pid = self._random.choice(ranks)
        self._log.harms["rank SIGSTOP, SIGCONT"] += send_signal(pid, signal.SIGSTOP)
        time.sleep(self._random.uniform(0, 3))
        if self._random.random() < 0.3:
            # Not SIGUSR1: a drain waits for every rank, and this one cannot answer.
            self._end_driver(driver, signal.SIGKILL, signal.SIGTERM)
        send_signal(pid, signal.SIGCONT)

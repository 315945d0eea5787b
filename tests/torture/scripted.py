"""Torture of small jobs without Ray: real processes, real signals, the fake engine.

A job is harmed at random moments until its share of harms is used up or it is finished, resumed each time its
driver is gone, and at last left alone to finish.
"""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

from tests.fake_engine import POISON_ID, REFUSED_ID
from tests.small_jobs import check_answers, random_prompts, write_prompts
from tests.torture.harm import Aim, Log, check_at_rest, check_finished, check_quarantined, send_signal
from tests.torture.processes import DriverProcess, JobSpec, Nursery

_PATIENCE_S = 60.0
_TOKENS_PER_ROW = 4.5
_WORK_S = (0.5, 2.5)
"""For how long a job's ranks are at work if nobody harms them: some harms come before its end, not all after."""


class ScriptedJob:
    """One job drawn from ``seed``, in a folder of its own."""

    def __init__(self, nursery: Nursery, folder: Path, seed: int, log: Log) -> None:
        self._nursery, self._log, self._random = nursery, log, random.Random(seed)
        random_ = self._random
        self._prompts = random_prompts(random_, random_.randrange(60, 250))
        for index in random_.sample(range(len(self._prompts)), len(self._prompts) // 10):
            self._prompts[index] = random_.choice([None, [], [REFUSED_ID]])
        if random_.random() < 0.15:
            self._prompts[random_.randrange(len(self._prompts))] = [7, POISON_ID]
        is_partitioned = random_.random() < 0.3
        num_ranks, capacity = random_.randrange(1, 4), random_.randrange(1, 6)
        num_steps = _TOKENS_PER_ROW * len(self._prompts) / (num_ranks * capacity)
        self._spec = JobSpec(
            input=folder / "in",
            output=folder / "out",
            rows_per_shard=random_.randrange(3, 60),
            num_ranks=num_ranks,
            capacity=capacity,
            step_s=random_.uniform(*_WORK_S) / num_steps,
            grace_s=random_.choice([0.0, 0.3, 1.0]),
            stall_timeout_s=2.0 if is_partitioned else random_.choice([2.0, 60.0]),
            is_partitioned=is_partitioned,
        )
        cut = random_.randrange(len(self._prompts))
        write_prompts(self._spec.input / "0.parquet", self._prompts[:cut])
        write_prompts(self._spec.input / "1.parquet", self._prompts[cut:])
        self._aim = Aim(self._spec.output, len(self._prompts), log)
        self._stopped_ranks: list[int] = []
        self._ranks: list[int] = []
        self._num_starts = 0

    def run(self, num_harms: int) -> None:
        """Harm the job ``num_harms`` times, or until it is finished, and check what it left."""
        driver = self._start()
        last = self._log.num_harms + num_harms
        while self._log.num_harms < last and not self._aim.is_finished:
            driver = self._harm(driver)
        self._continue_ranks()
        self._finish(driver)
        # What ranks left that died late is cleaned by the next run, which finds nothing else to do.
        for pid in self._ranks:
            send_signal(pid, signal.SIGKILL)
        self._finish(self._start())
        table = check_finished(self._spec.output, self._log)
        check_answers(table, self._prompts)
        self._check_errors(table.to_pylist())

    def _start(self) -> DriverProcess:
        self._log.num_resumes += self._num_starts > 0
        self._num_starts += 1
        return self._nursery.start_driver(self._spec)

    def _harm(self, driver: DriverProcess) -> DriverProcess:
        """One harm at a random moment; returns the driver that is at work afterwards."""
        if driver.poll(self._random.choice([0.05, 0.15, 0.5]) * self._random.random()):
            if self._aim.is_finished:
                return driver
            driver = self._resume(driver)
        harms = [
            self._kill_driver,
            self._stop_driver_for_a_while,
            self._end_driver,
            self._kill_rank,
            self._kill_rank,
            self._stop_rank,
            self._stop_rank_and_kill_driver,
        ]
        self._random.choice(harms)(driver)
        if driver.poll():
            return self._resume(driver)
        return driver

    def _resume(self, driver: DriverProcess) -> DriverProcess:
        """The driver is over: look at what it left, and start another."""
        self._ranks += driver.ranks
        if driver.exit_code is not None:
            self._log.exit_codes[driver.exit_code] += 1
            assert driver.exit_code in (0, 75, 1), driver.exit_code
        status = check_at_rest(self._spec.output, self._log)
        if driver.exit_code == 0:
            assert status is not None
            assert status.is_finished
        if self._random.random() < 0.3:
            self._continue_ranks()
        return self._start()

    def _finish(self, driver: DriverProcess) -> None:
        for _ in range(4):
            assert driver.poll(_PATIENCE_S), f"the driver {driver.pid} does not come to an end"
            self._ranks += driver.ranks
            if driver.exit_code is not None:
                self._log.exit_codes[driver.exit_code] += 1
            if driver.exit_code == 0:
                return
            # A rank that was ended too often before it did anything fails a run, not the job.
            driver = self._start()
        raise AssertionError(f"exit code {driver.exit_code}, again and again")

    # Harms

    def _kill_driver(self, driver: DriverProcess) -> None:
        self._hit_driver(driver, signal.SIGKILL)
        assert driver.poll(_PATIENCE_S)

    def _end_driver(self, driver: DriverProcess) -> None:
        number = self._random.choice([signal.SIGTERM, signal.SIGUSR1])
        if self._stopped_ranks and number is signal.SIGUSR1:
            self._continue_ranks()  # a drain waits for every rank
        self._hit_driver(driver, number)
        assert driver.poll(_PATIENCE_S)

    def _hit_driver(self, driver: DriverProcess, number: signal.Signals) -> None:
        driver.poll()
        self._aim.hit("driver", driver.pid, number, driver.ranks)

    def _stop_driver_for_a_while(self, driver: DriverProcess) -> None:
        self._hit_driver(driver, signal.SIGSTOP)
        if self._random.random() < 0.3 and (self._spec.output / "_overnight" / "runs").exists():
            second = self._nursery.start_driver(self._spec)
            assert second.poll(_PATIENCE_S)
            # 0: the first was through already, or had not locked the folder yet.
            assert second.exit_code in (2, 0), second.exit_code
            self._log.num_refused_while_stopped += second.exit_code == 2
        time.sleep(self._random.uniform(0, 0.4))
        send_signal(driver.pid, signal.SIGCONT)

    def _kill_rank(self, driver: DriverProcess) -> None:
        pid = self._draw_rank(driver)
        if pid is None:
            return
        number = self._random.choice([signal.SIGKILL, signal.SIGTERM])
        self._aim.hit("rank", pid, number, [pid])
        if number is signal.SIGTERM:
            send_signal(pid, signal.SIGCONT)  # a stopped process takes it only then

    def _stop_rank(self, driver: DriverProcess) -> None:
        pid = self._draw_rank(driver)
        if pid is not None and self._aim.hit("rank", pid, signal.SIGSTOP, [pid]):
            self._stopped_ranks.append(pid)
        if self._random.random() < 0.5:
            driver.poll(self._random.uniform(0, 0.5))
            self._continue_ranks()

    def _stop_rank_and_kill_driver(self, driver: DriverProcess) -> None:
        """The stopped rank lives on into the next run: an old attempt that wakes beside newer ones."""
        pid = self._draw_rank(driver)
        if pid is not None and self._aim.hit("rank", pid, signal.SIGSTOP, [pid]):
            self._stopped_ranks.append(pid)
        self._kill_driver(driver)

    def _draw_rank(self, driver: DriverProcess) -> int | None:
        """One of the driver's ranks at some moment of its life; None when it started none."""
        deadline = time.monotonic() + 2.0
        while not driver.ranks and not driver.poll(0.02) and time.monotonic() < deadline:
            pass
        if not driver.ranks:
            return None
        driver.poll(self._random.choice([0.0, 0.1, 0.5]) * self._random.random())
        pid = self._random.choice(driver.ranks[-self._spec.num_ranks :])
        if self._random.random() < 0.5:
            while not self._aim.num_in_flight(pid) and not driver.poll(0.01) and time.monotonic() < deadline:
                pass
        return pid

    def _continue_ranks(self) -> None:
        for pid in self._stopped_ranks:
            send_signal(pid, signal.SIGCONT)
        self._stopped_ranks.clear()

    def _check_errors(self, rows: list[dict[str, object]]) -> None:
        """Only rows that ask for it are errors, but for those that were there at two deaths."""
        for row, prompt in zip(rows, self._prompts, strict=True):
            expected = {None: "null_prompt", (): "empty_prompt", (REFUSED_ID,): "kv_too_small"}.get(
                None if prompt is None else tuple(prompt)
            )
            assert row["error"] in (expected, "engine_crash"), row
        check_quarantined(self._spec.output, rows, self._log)

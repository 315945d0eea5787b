"""One run of a job on Ray: refuse or begin, start or join the cluster, drive, leave nothing behind.

Owns the life of Ray and of the rank actors around one driver; it must not know how rows are read,
answered or written.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from engine import ConfigError
from jobs.config import JobConfig
from jobs.job_plan import output_folder, plan_job, record_job, with_absolute_paths
from jobs.metrics import RayMetrics
from jobs.rank import EngineBuilder, RankActor, RankSpec, rank_capacity
from jobs.reaper import MARK, Reaper
from jobs.stop_signals import StopSignals
from pipelines.commits import check_destination
from pipelines.driver import Driver, JobFailed, Orders, Outcome, RankDied, RankReport
from pipelines.manifest import (
    DriverLock,
    OutputFolder,
    check_folder,
    claim_run,
    discard_changed_job,
    write_plan,
)
from pipelines.plan import Plan
from pipelines.report import read_status

logger = logging.getLogger(__name__)

EXIT_COMMITTED = 0
EXIT_FAILED = 1
EXIT_TOO_MANY_ERRORS = 3
EXIT_STOPPED = 75

_OBJECT_STORE_BYTES = 100 << 20  # Ray's smallest: no row goes through it


def run_job(
    job: JobConfig, *, discard_changed: bool = False, build_engine: EngineBuilder | None = None
) -> int:
    """Run a job to its end or to a stop, and return the exit code.

    Raises ``ConfigError`` for what is refused; nothing is written then. ``discard_changed`` deletes
    what the output folder holds of a job with other inputs or settings. ``build_engine`` must be a
    function that other processes can import; None builds the real engine.
    """
    job = with_absolute_paths(job)
    folder = output_folder(job)
    try:
        with StopSignals() as signals:
            plan = plan_job(job)
            if discard_changed:
                difference = discard_changed_job(folder, plan)
                if difference is not None:
                    logger.warning("deleted the job that %s held: %s", folder.path, difference)
            check_folder(folder, plan)
            check_destination(folder, plan)
            signals.hold()
            with _connected(job, signals) as num_ranks:
                spec = RankSpec(job=job, run=0, build_engine=build_engine)
                outcome = Outcome.STOPPED if signals.requested else _drive(spec, plan, num_ranks, signals)
    except KeyboardInterrupt:
        return EXIT_STOPPED  # before there was anything to stop
    except (JobFailed, OSError) as error:
        logger.error("the job failed: %s", error)
        return EXIT_FAILED
    if outcome is Outcome.STOPPED:
        return EXIT_STOPPED
    if outcome is Outcome.TOO_MANY_ERRORS:
        logger.error("stopped: more error rows than output.max_errors (%s) allows", job.output.max_errors)
        return EXIT_TOO_MANY_ERRORS
    status = read_status(folder.path)
    is_over = status.num_error > job.output.max_error_rate * max(status.num_rows, 1)
    return EXIT_TOO_MANY_ERRORS if is_over else EXIT_COMMITTED


def _drive(spec: RankSpec, plan: Plan, num_ranks: int, signals: StopSignals) -> Outcome:
    folder = output_folder(spec.job)
    has_begun = folder.state.exists()
    write_plan(folder, plan)
    with DriverLock(folder):
        try:
            run = claim_run(folder)
            record_job(folder, spec.job)
            fleet = RayFleet(replace(spec, run=run), num_ranks)
            try:
                driver = Driver(
                    folder,
                    plan,
                    fleet,
                    run=run,
                    capacity=rank_capacity(spec.job),
                    max_errors=spec.job.output.max_errors,
                    stall_timeout_s=spec.job.cluster.stall_timeout_s,
                    cost_per_rank_hour=spec.job.cluster.cost_per_rank_hour,
                    on_metrics=RayMetrics(str(folder.path)).take,
                )
                signals.watch(driver)
                return driver.run()
            finally:
                fleet.close()
        except ConfigError:
            # A rank found that the job cannot run at all.
            if not has_begun and not _has_rows(folder, plan):
                _unwrite(folder)
            raise


def _has_rows(folder: OutputFolder, plan: Plan) -> bool:
    """Whether anything is journaled or committed: an empty file's part has no journal before it."""
    kept = [*folder.journals.rglob("*.journal"), *folder.commit_file(0).parent.iterdir()]
    return bool(kept) or any(folder.part_file(name).exists() for name in plan.output_names())


def _unwrite(folder: OutputFolder) -> None:
    """A job that was refused after all leaves no trace; its folder goes if it is empty."""
    shutil.rmtree(folder.state)
    with contextlib.suppress(OSError):
        folder.path.rmdir()


@contextlib.contextmanager
def _connected(job: JobConfig, signals: StopSignals) -> Iterator[int]:
    """Join the cluster that is named, or start a Ray and end it. Yields how many ranks there will be.

    The address "local" is Ray's own word for one that is started.
    """
    address = job.cluster.address or os.environ.get("RAY_ADDRESS") or "local"
    if address != "local":
        try:
            _init_ray(signals, address)
            yield _count_ranks(job)
        finally:
            ray.shutdown()
        return
    num_cpus = max(job.cluster.num_ranks, os.cpu_count() or 1)
    reaper = Reaper()
    os.environ[MARK] = reaper.mark
    try:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        own = {"num_cpus": num_cpus, "object_store_memory": _OBJECT_STORE_BYTES, "include_dashboard": False}
        _init_ray(signals, address, **own)
        yield _count_ranks(job)
    finally:
        ray.shutdown()
        del os.environ[MARK]
        reaper.close()


def _init_ray(signals: StopSignals, address: str, **options: Any) -> None:
    """Start or join Ray. ``KeyboardInterrupt`` when a signal made that impossible."""
    try:
        try:
            ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False, **options)
        finally:
            signals.install()
    except SystemExit as error:  # from Ray's own handler of SIGTERM, while it stood in the place of ours
        raise KeyboardInterrupt from error
    except Exception as error:  # Ray raises nothing narrower for a node that does not come up
        if signals.requested:  # a signal to the whole group ends Ray's processes too
            raise KeyboardInterrupt from error
        reason = " ".join(str(error).split())
        if address == "local":
            raise JobFailed(f"Ray did not start: {reason}") from error
        raise ConfigError(f"cannot join the Ray cluster at {address!r}: {reason}") from error


def _count_ranks(job: JobConfig) -> int:
    num_gpus = 0 if job.engine.device == "cpu" else _count("GPU")
    wanted = job.cluster.num_ranks
    if job.engine.device == "cuda" and not num_gpus:
        raise ConfigError("engine.device is cuda, but the cluster has no GPU")
    if num_gpus and wanted > num_gpus:
        raise ConfigError(f"cluster.num_ranks is {wanted}, but the cluster has {num_gpus} GPUs")
    num_ranks = wanted or num_gpus or 1
    num_cpus = _count("CPU")
    if num_ranks > num_cpus:
        raise ConfigError(f"{num_ranks} ranks need a CPU each, but the cluster has {num_cpus}")
    return num_ranks


def _count(resource: str) -> int:
    resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    return int(resources.get(resource, 0))


class RayFleet:
    """Rank actors, by slot; what ``pipelines.driver.Fleet`` asks for."""

    def __init__(self, spec: RankSpec, num_slots: int) -> None:
        self.num_slots = num_slots
        self._spec = spec
        has_gpus = spec.job.engine.device != "cpu" and _count("GPU") > 0
        # Liveness is the driver's business: an actor is never restarted behind its back.
        options: dict[str, Any] = {"num_cpus": 1, "num_gpus": int(has_gpus), "max_restarts": 0}
        if not _is_importable_elsewhere():
            root = str(Path(__file__).resolve().parent.parent)
            paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
            options["runtime_env"] = {"env_vars": {"PYTHONPATH": os.pathsep.join(paths)}}
        self._actor_class = ray.remote(RankActor).options(**options)
        self._actors: dict[int, Any] = {}
        self._exchanges: dict[Any, int] = {}

    def start(self, slot: int) -> None:
        """Start the rank of a slot and its first exchange."""
        self._actors[slot] = self._actor_class.remote(self._spec)
        self.exchange(slot, Orders())

    def exchange(self, slot: int, orders: Orders) -> None:
        """Begin the next exchange with a rank."""
        self._exchanges[self._actors[slot].exchange.remote(orders)] = slot

    def wait(self, timeout_s: float) -> list[tuple[int, RankReport | RankDied]]:
        """The exchanges that came back."""
        if not self._exchanges:
            return []
        ready, _ = ray.wait(list(self._exchanges), num_returns=1, timeout=timeout_s)
        also, _ = ray.wait(list(self._exchanges), num_returns=len(self._exchanges), timeout=0)
        events: list[tuple[int, RankReport | RankDied]] = []
        for reference in dict.fromkeys([*ready, *also]):
            slot = self._exchanges.pop(reference)
            try:
                events.append((slot, ray.get(reference)))
            except RayError as error:
                events.append((slot, RankDied(str(error))))
        return events

    def kill(self, slot: int) -> None:
        """End the rank of a slot at once."""
        actor = self._actors.pop(slot, None)
        self._exchanges = {ref: other for ref, other in self._exchanges.items() if other != slot}
        if actor is not None:
            ray.kill(actor)

    def close(self) -> None:
        """End every rank."""
        for slot in list(self._actors):
            self.kill(slot)


def _is_importable_elsewhere() -> bool:
    """Whether a rank's process finds our packages by itself: installed, or uploaded with a Ray job."""
    if "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ:
        return True
    try:
        importlib.metadata.distribution("overnight")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True

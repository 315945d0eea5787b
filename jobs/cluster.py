"""One run of a job on Ray: refuse or begin, start or join the cluster, drive, leave nothing behind.

Owns the order of things around one driver: what is checked before anything is written, what is taken back,
and the exit code. It must not know how rows are read, answered or written. Ray is imported once it is known
whether one is joined or started.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING

from engine import ConfigError
from jobs.config import JobConfig
from jobs.exit_codes import EXIT_COMMITTED, EXIT_FAILED, EXIT_STOPPED, EXIT_TOO_MANY_ERRORS
from jobs.job_plan import output_folder, plan_job, record_job, with_absolute_paths
from jobs.rank import EngineBuilder, RankSpec, rank_capacity
from jobs.stop_signals import StopSignals
from jobs.time_limit import TimeLimit
from pipelines.commits import check_destination, try_read_commit
from pipelines.counted import counted
from pipelines.driver import Driver, JobFailed, Outcome
from pipelines.manifest import (
    DriverLock,
    OutputFolder,
    check_folder,
    claim_run,
    write_plan,
)
from pipelines.metrics import MetricsListener
from pipelines.plan import Plan, slice_of_shards
from pipelines.rank_protocol import NoRanks
from pipelines.replaced_job import check_replaceable, restore_job, set_aside
from pipelines.report import read_status

if TYPE_CHECKING:
    from jobs.fleet import RayFleet
    from jobs.ray_connection import Places

logger = logging.getLogger(__name__)

_LOOPBACK_SWITCH = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Set to 0, a Ray that is started listens on 127.0.0.1 alone, on Linux too. Read when Ray is imported."""


_RECONNECT_LIMIT = "RAY_gcs_rpc_server_reconnect_timeout_s"
"""For how many seconds a driver goes on looking for a head that is gone: Ray's own minute is long for a job
whose ranks died with it and whose lock keeps the next run out."""

_CRASH_HANDLER_SWITCH = "RAY_DISABLE_FAILURE_SIGNAL_HANDLER"
"""Set to 1 while Ray is imported, it does not put a handler of crashes, which it takes a SIGTERM for, in the
place of ours."""


def run_job(
    job: JobConfig,
    *,
    discard_changed: bool = False,
    part: tuple[int, int] | None = None,
    limit_s: float | None = None,
    build_engine: EngineBuilder | None = None,
) -> int:
    """Run a job to its end or to a stop, and return the exit code.

    Raises ``ConfigError`` for what is refused; nothing is written then. ``discard_changed`` deletes
    what the output folder holds of a job with other inputs or settings, once a rank is ready to run this one;
    a run that ends before that leaves it as it was. ``part`` (i, n): only the i-th of n
    slices, from 0; other drivers may be at work on the others. ``limit_s``: stop cleanly before so long.
    ``build_engine`` must be a function that other processes can import; None builds the real engine.
    What comes next has to be ``leave_if_stopped``: Ray may still be up, or starting, in this process.
    """
    job = with_absolute_paths(job)
    folder = output_folder(job)
    _refuse_upload(folder)
    if discard_changed and part is not None:
        raise ConfigError("--discard-changed is for a whole job, --slice for a part of one")
    try:
        with StopSignals() as signals, TimeLimit(limit_s):
            logger.info("reading the input %s", job.input.path)
            plan = plan_job(job)
            num_rows = sum(shard.num_rows for shard in plan.shards)
            logger.info("%s in %s", counted(num_rows, "row"), counted(len(plan.shards), "shard"))
            restore_job(folder)
            difference = (check_replaceable if discard_changed else check_folder)(folder, plan)
            check_destination(folder, plan)
            shards = None if part is None else slice_of_shards(len(plan.shards), *part)
            if part is not None and not shards:
                logger.warning(
                    "slice %d/%d is empty: the job has %s", *part, counted(len(plan.shards), "shard")
                )
            is_done = difference is None and _is_committed(folder, plan, shards)
            connection = contextlib.nullcontext() if is_done else _connected(job, signals)
            signals.hold()
            with connection as places:
                spec = RankSpec(job=job, run=0, build_engine=build_engine)
                outcome = Outcome.STOPPED
                if not signals.requested:
                    with set_aside(folder, plan, difference) as on_ready:
                        outcome = _drive(spec, plan, shards, places, signals, on_ready)
                        if outcome is Outcome.COMMITTED:
                            on_ready()  # there was no row for any rank
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
    if not status.is_finished:
        return EXIT_COMMITTED  # this slice is; who commits the last shard judges them all
    is_over = status.has_more_errors_than(job.output.max_error_rate)
    return EXIT_TOO_MANY_ERRORS if is_over else EXIT_COMMITTED


def leave_if_stopped(code: int) -> int:
    """End this process, with all that it said, if its run was told to stop; else give ``code`` back.

    Such a run takes no leave of Ray, which takes seconds, not even if it was over by itself when it was told.
    Ranks are ended by then. A Ray of our own is ended by its watchdog; one that was joined sees us go.
    """
    if code == EXIT_STOPPED or ("ray" in sys.modules and sys.modules["ray"].is_initialized()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _connected(job: JobConfig, signals: StopSignals) -> AbstractContextManager[Places]:
    """Join the cluster that is named, or start a Ray that listens on this machine's loopback alone."""
    address = job.cluster.address or os.environ.get("RAY_ADDRESS") or "local"
    if address == "local":
        logger.info("starting a Ray on this machine")
        os.environ[_LOOPBACK_SWITCH] = "0"
    else:
        logger.info("joining the Ray cluster at %s", address)
    os.environ.setdefault(_RECONNECT_LIMIT, "8")
    with _setting(_CRASH_HANDLER_SWITCH, "1"):  # not for the ranks, which may say of what they crash
        from jobs.ray_connection import connected

    return connected(address, job, signals)


@contextlib.contextmanager
def _setting(name: str, value: str) -> Iterator[None]:
    """An environment variable for a while."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _refuse_upload(folder: OutputFolder) -> None:
    """Ray deletes the working directory that was uploaded with a job: no place for what the job is for."""
    for path in (folder.path, *folder.path.parents):
        if path.parent.name == "working_dir_files":
            raise ConfigError(
                f"the output folder {str(folder.path)!r} lies in the working directory that was uploaded "
                "with the Ray job, which Ray deletes: name an absolute path that every node sees"
            )


def _is_committed(folder: OutputFolder, plan: Plan, shards: range | None) -> bool:
    """Whether nothing is left to run. The last shards are looked at first: they are the likeliest to miss."""
    own = range(len(plan.shards)) if shards is None else shards
    return all(try_read_commit(folder, plan, index) is not None for index in reversed(own))


def _ranks(
    spec: RankSpec, folder: OutputFolder, places: Places | None
) -> tuple[RayFleet | NoRanks, MetricsListener | None]:
    """The ranks of a run, and who is told what it measures. ``places`` None: nothing is left for any rank."""
    if places is None:
        return NoRanks(), None
    from jobs.fleet import RayFleet
    from jobs.metrics import RayMetrics

    fleet = RayFleet(spec, places.num_slots, has_gpus=places.has_gpus)
    return fleet, RayMetrics(str(folder.path)).take


def _drive(
    spec: RankSpec,
    plan: Plan,
    shards: range | None,
    places: Places | None,
    signals: StopSignals,
    on_ready: Callable[[], None],
) -> Outcome:
    folder = output_folder(spec.job)
    has_begun = folder.state.exists()
    write_plan(folder, plan)
    with DriverLock(folder, shards):
        try:
            run = claim_run(folder)
            record_job(folder, spec.job)
            fleet, listener = _ranks(replace(spec, run=run), folder, places)
            try:
                driver = Driver(
                    folder,
                    plan,
                    fleet,
                    run=run,
                    shards=shards,
                    capacity=rank_capacity(spec.job),
                    min_ranks=1 if places is None else places.min_ranks,
                    place_timeout_s=0.0 if places is None else spec.job.cluster.place_timeout_s,
                    max_errors=spec.job.output.max_errors,
                    stall_timeout_s=spec.job.cluster.stall_timeout_s,
                    cost_per_rank_hour=spec.job.cluster.cost_per_rank_hour,
                    max_error_rate=spec.job.output.max_error_rate,
                    on_metrics=listener,
                    on_ready=on_ready,
                )
                signals.watch(driver)
                if places is None:
                    logger.info("no shard is left to run: Ray is not started")
                else:
                    num_ranks = counted(places.num_slots, "rank")
                    logger.info("Ray is up; %s is loaded by up to %s", spec.job.model.path, num_ranks)
                return driver.run()
            finally:
                fleet.close()
        except ConfigError:
            # A rank found that the job cannot run at all.
            if shards is None and not has_begun and not _has_rows(folder, plan):
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

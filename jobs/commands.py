"""The commands of batch-generate.

Owns what the commands do, what is printed and the exit codes; their flags are ``jobs.arguments``. It must
not know how a job is run or where its state lies: it hands a checked JobConfig over and prints what comes
back. Ray is imported only once a job runs, so that status and refusals are quick.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import logging
import sys
from datetime import timedelta
from typing import TYPE_CHECKING

from engine import ConfigError, EngineDead
from jobs.arguments import CPUS_PER_GPU, FLAGS
from jobs.config import JobConfig, load_job
from jobs.exit_codes import EXIT_FAILED, EXIT_REFUSED, EXIT_STOPPED, EXIT_TOO_MANY_ERRORS, STOPPED_SENTENCE
from jobs.slurm import SlurmRequest, render_script, submit_script
from pipelines.counted import counted
from pipelines.driver import Outcome
from pipelines.manifest import OutputFolder, Tally, load_plan
from pipelines.plan import slice_of_shards
from pipelines.progress import TIME_LEFT_UNKNOWN
from pipelines.report import JobStatus, ShardCounts, count_shards, read_status
from pipelines.report_page import write_reports
from pipelines.source import InputUnreadable

if TYPE_CHECKING:
    from jobs.verify import Verification

STOPPED_STATES = {
    Outcome.TOO_MANY_ERRORS.value: (
        "stopped, more error rows than output.max_errors; raise it to go on, which loses no row, "
        "or correct the input and begin anew with --discard-changed"
    ),
    Outcome.COMMITTED.value: "a slice is done; to go on run the other slices, or the job without --slice",
    "failed": "failed, the log says of what; run the same command again to go on once that is mended",
}
"""What ``status`` says of a job that is not finished, by how its last run ended."""

NUM_DIFFERENCES_SHOWN = 10


def execute(parsed: argparse.Namespace) -> int:
    """Do what the command line says, and return the exit code."""
    try:
        if parsed.command == "status":
            return _status(parsed)
        check_environment()
        if parsed.command == "verify":
            return _verify(parsed)
        flags = {key: getattr(parsed, key) for key, _, _ in FLAGS.values()}
        job = load_job(parsed.job, parsed.set, flags)
        commands = {"run": _run, "plan": _plan, "slurm": _slurm}
        return commands[parsed.command](job, parsed)
    except ConfigError as error:
        print(f"batch-generate: {error}", file=sys.stderr)
        return EXIT_REFUSED
    except InputUnreadable as error:
        print(f"batch-generate: {error}", file=sys.stderr)
        return EXIT_FAILED


def _status(parsed: argparse.Namespace) -> int:
    status = read_status(parsed.output_dir)
    print(format_status(status))
    if parsed.write_report:
        print(f"wrote {write_reports(parsed.output_dir, status)}")
    return 0


def _run(job: JobConfig, parsed: argparse.Namespace) -> int:
    _log_to_stderr()
    from jobs.cluster import leave_if_stopped, run_job

    limits = [limit for limit in (parsed.time_limit, parsed.until) if limit is not None]
    code = run_job(
        job,
        discard_changed=parsed.discard_changed,
        part=parsed.slice,
        limit_s=min(limits, default=None),
    )
    sentence = _closing_sentence(job, code, parsed.slice)
    if sentence is not None:
        print(sentence, file=sys.stderr)
    return leave_if_stopped(code)


def _closing_sentence(job: JobConfig, code: int, part: tuple[int, int] | None) -> str | None:
    """What a run, of slice ``part`` or of the whole job, came to and what to look at next.

    None where a failure has been told already.
    """
    from jobs.job_plan import output_folder

    if code == EXIT_STOPPED:
        return STOPPED_SENTENCE
    if code not in (0, EXIT_TOO_MANY_ERRORS):
        return None
    folder = output_folder(job)
    status = read_status(folder.path)
    if part is None:
        counts = f"{_count_rows(status.tally)}, under {job.output.path}"
    else:
        counts = _tell_slice(folder, part, status, job.output.path)
    if code == EXIT_TOO_MANY_ERRORS and status.is_finished:
        counts += f"; that is more than output.max_error_rate ({job.output.max_error_rate:g}) allows"
    return f"batch-generate: {counts}; the report is {folder.page_file}"


def _tell_slice(folder: OutputFolder, part: tuple[int, int], status: JobStatus, place: str) -> str:
    """How far a slice is, and what other slices have to do."""
    plan = load_plan(folder)
    shards = slice_of_shards(len(plan.shards), *part)
    counts = count_shards(folder, plan, plan.shards[shards.start : shards.stop])
    clauses = [
        f"slice {part[0]}/{part[1]}: {_tell_shards(counts)} ({_count_rows(counts.tally)}), under {place}"
    ]
    num_left = status.num_shards - status.num_shards_committed - counts.num_shards + counts.num_committed
    if status.is_finished:
        clauses.append(f"so is the whole job ({_count_rows(status.tally)})")
    elif num_left:
        verb = "is" if num_left == 1 else "are"
        clauses.append(f"{num_left} of the job's {status.num_shards} shards {verb} left to other slices")
    return "; ".join(clauses)


def _tell_shards(counts: ShardCounts) -> str:
    if not counts.num_shards:
        return "it has no shards"
    if counts.num_committed < counts.num_shards:
        return f"committed {counts.num_committed} of its {counts.num_shards} shards"
    return (
        "its shard is committed"
        if counts.num_shards == 1
        else f"its {counts.num_shards} shards are committed"
    )


def _count_rows(tally: Tally) -> str:
    return f"{counted(tally.num_ok, 'row')} ok, {counted(tally.num_error, 'error row')}"


def _plan(job: JobConfig, parsed: argparse.Namespace) -> int:
    from jobs.plan_report import forecast_job, format_forecast

    gib = parsed.device_memory_gib
    found = forecast_job(
        job,
        max_num_rows=parsed.rows or None,
        seed=parsed.seed,
        tokens_per_s=parsed.tokens_per_s,
        device_bytes=None if gib is None else int(gib * 2**30),
    )
    print(format_forecast(found))
    return EXIT_REFUSED if found.obstacles else 0


def _slurm(job: JobConfig, parsed: argparse.Namespace) -> int:
    given = [] if parsed.job is None else [parsed.job]
    for flag, (key, _, _) in FLAGS.items():
        if (value := getattr(parsed, key)) is not None:
            given += [flag, str(value)]
    request = SlurmRequest(
        nodes=parsed.nodes,
        gpus_per_node=parsed.gpus_per_node,
        cpus_per_node=parsed.cpus_per_node or CPUS_PER_GPU * max(parsed.gpus_per_node, 1),
        time_s=parsed.time,
        num_slices=parsed.array,
        extra=tuple(parsed.sbatch),
    )
    given += [word for setting in parsed.set for word in ("--set", setting)]
    script = render_script(job, given, request)
    print(submit_script(script) if parsed.submit else script, end="\n" if parsed.submit else "")
    return 0


def _log_to_stderr() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for library in ("aiobotocore", "botocore", "datasets", "fsspec", "httpx", "s3fs"):
        logging.getLogger(library).setLevel(logging.WARNING)  # they tell of every request


def _verify(parsed: argparse.Namespace) -> int:
    _log_to_stderr()
    from jobs.verify import verify_output

    try:
        found = verify_output(
            parsed.output_dir,
            num_rows=parsed.rows,
            seed=parsed.seed,
            model=parsed.model,
            allow_other_device=parsed.allow_other_device,
        )
    except EngineDead as error:
        print(f"batch-generate: the engine died: {error}", file=sys.stderr)
        return EXIT_FAILED
    print(format_verification(found))
    return 0 if found.is_equal else EXIT_FAILED


def check_environment() -> None:
    """Refuse an environment in which another distribution owns the import name ``kernels``."""
    try:
        found = importlib.metadata.distribution("kernels")
    except importlib.metadata.PackageNotFoundError:
        return
    raise ConfigError(
        f"the distribution 'kernels' {found.version} is installed here and shadows this project's own "
        "package of that name: use an environment without it"
    )


def format_status(status: JobStatus) -> str:
    """Some lines for a terminal; the second is the equation that always holds."""
    state, left = _state(status), _time_left(status)
    tally, effort, wasted = status.tally, status.effort, status.effort.wasted_tokens
    errors = ", ".join(f"{code} {count}" for code, count in sorted(tally.errors.items())) or "none"
    return "\n".join(
        [
            f"{state}: {status.num_shards_committed} of {status.num_shards} shards committed, "
            f"{status.num_rows_committed} of {status.num_rows} rows{left}",
            f"rows read {status.num_read} = ok {status.num_ok} + error {status.num_error} "
            f"+ in flight {status.num_in_flight}",
            f"last run: {counted(status.num_reused, 'row')} reused, {status.num_run} run; "
            f"{counted(status.num_runs, 'run')}, {counted(status.num_rank_deaths, 'rank')} lost, "
            f"{status.seconds:.1f} s in all",
            f"errors: {errors}",
            f"tokens: {tally.num_prompt_tokens} in ({tally.num_cached_tokens} cached, "
            f"{tally.cache_hit_rate:.1%}), {tally.num_completion_tokens} out, "
            f"{status.num_tokens_per_s:.1f} a second, "
            f"{status.num_tokens_per_s_per_rank:.1f} a second and rank",
            f"computed: {effort.num_tokens_computed} tokens, of them wasted {wasted.total} = "
            f"after preemptions {wasted.after_preemption} + replayed {wasted.replay} + "
            f"lost with ranks {wasted.lost_with_ranks} + lost with runs {wasted.lost_with_runs}",
            f"preemptions: {tally.num_preemptions}, at most {tally.most_row_preemptions} of one row",
            f"took {effort.rank_hours:.3f} {'GPU' if status.has_gpus else 'rank'}-hours, "
            f"{effort.tail_idle_rank_s:.1f} s of ranks idle at the end, "
            f"cost {'not known' if effort.cost is None else format(effort.cost, '.2f')}",
        ]
    )


def _state(status: JobStatus) -> str:
    if status.has_failed_rate:
        return (
            f"finished, with more error rows than output.max_error_rate ({status.max_error_rate:g}) allows; "
            "to accept them run the command with a higher one, or correct the input and begin anew with "
            "--discard-changed"
        )
    if status.is_finished:
        return "finished"
    if status.is_running:
        return "running"
    return STOPPED_STATES.get(status.last_outcome, "stopped; run the same command again to go on")


def _time_left(status: JobStatus) -> str:
    if status.seconds_left is not None:
        return f", {timedelta(seconds=round(status.seconds_left))} left"
    is_waiting = status.is_running and not status.is_finished and not status.num_run
    return f", {TIME_LEFT_UNKNOWN}" if is_waiting else ""


def format_verification(found: Verification) -> str:
    """What was compared, way by way, and the first differences."""
    num_rows = len(found.row_ids)
    here = ", ".join(f"{name} {value}" for name, value in found.environment.items())
    lines = [f"compared {num_rows} of {found.num_committed} committed rows (seed {found.seed}) on {here}"]
    if found.num_environments > 1:
        lines.append(f"the runs of this job recorded {found.num_environments} different environments")
    if found.elsewhere:
        lines.append(f"compared across devices or versions: {'; '.join(found.elsewhere)}")
    for way in found.ways:
        num_different = found.num_different(way)
        lines.append(f"  {way.name}: {num_rows - num_different} equal, {num_different} different")
    for difference in found.differences[:NUM_DIFFERENCES_SHOWN]:
        answer = difference.found if isinstance(difference.found, str) else ", ".join(difference.found)
        recorded = ", ".join(difference.recorded)
        lines.append(f"different: {difference.row_id} ({difference.way}): {recorded} before, {answer} now")
    num_hidden = len(found.differences) - NUM_DIFFERENCES_SHOWN
    if num_hidden > 0:
        lines.append(f"and {num_hidden} more")
    lines.append("every digest is equal" if found.is_equal else "the answers are not the same")
    return "\n".join(lines)

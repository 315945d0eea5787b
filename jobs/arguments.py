"""The flags of batch-generate: what each command takes, and what its help says.

Owns these words and the checks of a flag's form. It must not know what a command does with them.
"""

from __future__ import annotations

import argparse

from jobs import VERSION
from jobs.exit_codes import EXIT_CODES
from jobs.time_limit import parse_duration, parse_until

CPUS_PER_GPU = 4
NUM_ROWS_TO_PLAN = 10_000
NUM_ROWS_TO_VERIFY = 16

FLAGS = {
    "--model": ("model.path", "M", "model folder (model.path)"),
    "--input": ("input.path", "GLOB", "file, folder, glob, URL or dataset (input.path)"),
    "--output": ("output.path", "DIR", "output folder or URL (output.path)"),
    "--num-ranks": ("cluster.num_ranks", "N", "ranks; 0: one a GPU, or one on the CPU (cluster.num_ranks)"),
}
"""Shorthands: flag -> (the job's key, placeholder, help). Everything else goes by --set."""


class _Parser(argparse.ArgumentParser):
    """Says a command's exit codes in its help, and takes no abbreviated flags."""

    def __init__(self, prog: str, description: str, epilog: str) -> None:
        super().__init__(
            prog=prog,
            description=description,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )


def build_parser() -> argparse.ArgumentParser:
    """The flag set of batch-generate; a test pins it."""
    text = "Parquet prompts in, Parquet completions out."
    codes = f"run's {EXIT_CODES['run']}of the other commands: COMMAND --help"
    parser = _Parser("batch-generate", text, codes)
    parser.add_argument("--version", action="version", version=f"%(prog)s {VERSION}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    text = "run a job, or go on with one that was stopped"
    run = commands.add_parser("run", help=text, description=text, epilog=EXIT_CODES["run"])
    _add_job_flags(run)
    text = (
        "where the output folder holds this job with other inputs or settings, begin anew: its parts and "
        "journals are deleted once a rank is ready to run (an unchanged job goes on as ever)"
    )
    run.add_argument("--discard-changed", action="store_true", help=text)
    text = "stop cleanly (exit code 75) before so long, such as 7h30m"
    run.add_argument("--time-limit", type=_duration, metavar="TIME", help=text)
    text = "the same before the next 06:00, or before 2030-01-31T06:00:00"
    run.add_argument("--until", type=_until, metavar="TIME", help=text)
    text = "only the I-th of N slices of the job, from 0; others may run beside it, with the same N"
    run.add_argument("--slice", type=_slice, metavar="I/N", help=text)
    text = "say what a job will be, and whether it can succeed, without a GPU and without running it"
    plan = commands.add_parser("plan", help=text, description=text, epilog=EXIT_CODES["plan"])
    _add_job_flags(plan)
    text = f"tokenize about K rows, drawn at random; 0: all, for exact counts (default {NUM_ROWS_TO_PLAN})"
    plan.add_argument("--rows", type=_count, default=NUM_ROWS_TO_PLAN, metavar="K", help=text)
    plan.add_argument("--seed", type=int, default=0, metavar="S", help="which rows are drawn (default 0)")
    text = "tokens in and out that one rank does a second, for the expected time"
    plan.add_argument("--tokens-per-s", type=_rate, metavar="R", help=text)
    text = "memory of one rank's device, to check that the model and its cache fit"
    plan.add_argument("--device-memory-gib", type=_rate, metavar="G", help=text)
    text = "write a batch script that runs the job under Slurm until it is done, to standard output"
    slurm = commands.add_parser("slurm", help=text, description=text, epilog=EXIT_CODES["slurm"])
    _add_job_flags(slurm)
    slurm.add_argument("--nodes", type=_positive, default=1, metavar="N", help="nodes (default 1)")
    text = "GPUs of each node; 0: ranks on the CPU (default 0)"
    slurm.add_argument("--gpus-per-node", type=_count, default=0, metavar="G", help=text)
    text = f"CPUs of each node (default {CPUS_PER_GPU} a GPU, or {CPUS_PER_GPU} in all without one)"
    slurm.add_argument("--cpus-per-node", type=_positive, metavar="C", help=text)
    text = "time of one allocation, such as 8h; the job is queued again until it is done"
    slurm.add_argument("--time", type=_duration, required=True, metavar="T", help=text)
    text = "an array of K jobs, each on its own slice of the shards"
    slurm.add_argument("--array", type=_positive, default=1, metavar="K", help=text)
    text = "a further option of sbatch, such as --sbatch=--partition=gpu; repeatable"
    slurm.add_argument("--sbatch", action="append", default=[], metavar="OPTION", help=text)
    slurm.add_argument("--submit", action="store_true", help="hand the script to sbatch instead")
    text = "say how far the job of an output folder is"
    status = commands.add_parser("status", help=text, description=text, epilog=EXIT_CODES["status"])
    status.add_argument("output_dir", metavar="OUTPUT_DIR")
    text = "also write report.json and report.html now, as a run does when it ends"
    status.add_argument("--write-report", action="store_true", help=text)
    text = "run some committed rows again, in other ways, and compare the digests of their answers"
    verify = commands.add_parser("verify", help=text, description=text, epilog=EXIT_CODES["verify"])
    verify.add_argument("output_dir", metavar="OUTPUT_DIR")
    default = f"how many rows, drawn at random (default {NUM_ROWS_TO_VERIFY})"
    verify.add_argument("--rows", type=_positive, default=NUM_ROWS_TO_VERIFY, metavar="K", help=default)
    verify.add_argument("--seed", type=int, metavar="S", help="draw the rows of an earlier verify again")
    verify.add_argument("--model", metavar="M", help="where the model folder is now, if it was moved")
    verify.add_argument(
        "--allow-other-device",
        action="store_true",
        help="compare on another device kind or with other versions than the job's, and say so",
    )
    return parser


def _add_job_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", nargs="?", metavar="JOB.yaml", help="the job; may be left out: flags suffice")
    for flag, (key, placeholder, text) in FLAGS.items():
        kind = int if flag == "--num-ranks" else str
        parser.add_argument(flag, dest=key, metavar=placeholder, type=kind, help=text)
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="any key, its value in YAML; repeatable",
    )


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 0")
    return int(text)


def _duration(text: str) -> float:
    try:
        return parse_duration(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _until(text: str) -> float:
    try:
        return parse_until(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no time to come such as 06:00: {error}") from error


def _slice(text: str) -> tuple[int, int]:
    index, _, count = text.partition("/")
    if not (index.isdecimal() and count.isdecimal() and int(index) < int(count)):
        raise argparse.ArgumentTypeError(f"{text!r} is no slice such as 0/4, the first of four")
    return int(index), int(count)


def _rate(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return number


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)

"""How much faster are N ranks than one? Whole jobs of independent rows, as many rows for each rank.

The same job on each number of ranks: ranks that share the experts, or with ``--replicas`` ranks that have
them all. Rows have prompts and answers of one length; a larger job begins with the rows of a smaller one,
whose digests have to be equal in both. All figures are from the runs' own records and metrics:

  start     from when Ray is up until every rank is ready: loading, the ranks' meeting. In no rate.
  whole     tokens computed (prefill and decode) a second from then to the end: with what the first steps
            compile, and the last rows in batches that are not full.
  steady    the same from the first metrics line at which as many rows are answered as all ranks run at once
            to the last at which so many are not: every rank is full, and has been. Lines are a second apart,
            later up to ten: a steady part of a minute is good to a few percent.

The ratio is that of steady parts, or of the wholes where a job is too short to have one in every run.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from benchmarks.command_line import need_gpus, positive, positives
from benchmarks.environment import describe
from engine import ConfigError
from engine.memory import count_experts
from engine.models.deepseek_v41_config import load_model_config
from jobs.cluster import leave_if_stopped, run_job
from jobs.config import JobConfig, engine_config, load_job
from pipelines.manifest import OutputFolder
from pipelines.metrics import MetricsLine, read_metrics
from pipelines.report import RunRecord, read_runs


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaled:
    """A job on so many ranks. ``steady_s`` 0: it was too short to have a steady part."""

    num_ranks: int
    exchange: str
    start_s: float
    whole_s: float
    whole_tokens_per_s: float
    steady_s: float
    steady_tokens_per_s: float


def steady_part(lines: Sequence[MetricsLine], num_ranks: int, num_at_once: int) -> tuple[float, int]:
    """Seconds and tokens between the first line and the last at which all ranks are full, and have been.

    ``num_at_once`` is how many rows all ranks together run at once.
    """
    full = [
        line
        for line in lines
        if line.num_ranks == num_ranks
        and line.num_ok + line.num_error >= num_at_once
        and line.num_rows - line.num_ok - line.num_error >= num_at_once
    ]
    if len(full) < 2:
        return 0.0, 0
    first, last = full[0], full[-1]
    return last.seconds - first.seconds, _num_tokens(last) - _num_tokens(first)


def scaled(run: RunRecord, lines: Sequence[MetricsLine], num_ranks: int, num_at_once: int) -> Scaled:
    """A run's figures, from what it wrote down."""
    start_s = next(line.seconds for line in lines if line.num_ranks == num_ranks)
    steady_s, num_tokens = steady_part(lines, num_ranks, num_at_once)
    return Scaled(
        num_ranks=num_ranks,
        exchange=str(run.engine_settings[0]["exchange"]),
        start_s=round(start_s, 1),
        whole_s=round(run.seconds - start_s, 2),
        whole_tokens_per_s=round(_num_tokens(run) / max(run.seconds - start_s, 1e-3), 1),
        steady_s=round(steady_s, 2),
        steady_tokens_per_s=round(num_tokens / steady_s, 1) if steady_s else 0.0,
    )


def _num_tokens(counted: MetricsLine | RunRecord) -> int:
    return counted.num_prefill_tokens + counted.num_decode_tokens


def same_digests(answers: Sequence[Mapping[str, str]]) -> bool:
    """Whether rows that all jobs have were answered alike by all."""
    common = set.intersection(*(set(own) for own in answers))
    return bool(common) and all(len({own[row_id] for own in answers}) == 1 for row_id in common)


def write_rows(args: argparse.Namespace, folder: Path, num_ranks: int) -> None:
    """The input for so many ranks."""
    vocab_size = load_model_config(args.model).vocab_size
    prompts = []
    for index in range(args.rows * num_ranks):
        draw = random.Random(f"{args.seed} {index}")
        prompts.append([draw.randrange(3, vocab_size) for _ in range(args.prompt_tokens)])
    (folder / "in").mkdir()
    table = pa.table({"prompt_token_ids": pa.array(prompts, pa.list_(pa.int32()))})
    pq.write_table(table, folder / "in" / "rows.parquet")


def build_job(args: argparse.Namespace, folder: Path, num_ranks: int) -> JobConfig:
    """The job for so many ranks. Raises ``ConfigError``."""
    flags = {
        "model.path": str(Path(args.model).resolve()),
        "input.path": str(folder / "in"),
        "output.path": str(folder / "out"),
        "output.max_error_rate": 0.0,
        "engine.device": args.device,
        "engine.dtype": args.dtype,
        "engine.max_model_len": args.prompt_tokens + args.max_tokens,
        "engine.max_num_seqs": args.max_num_seqs,
        "sampling.max_tokens": args.max_tokens,
        "sampling.ignore_eos": True,
        "sampling.seed": args.seed,
        "cluster.num_ranks": num_ranks,
        "cluster.ranks_per_replica": 1 if args.replicas else num_ranks,
    }
    return load_job(None, args.set, flags)


def measure(args: argparse.Namespace, folder: Path, num_ranks: int) -> tuple[Scaled, dict[str, str]]:
    """Run the job on so many ranks: its figures, and each row's digest."""
    job = build_job(args, folder, num_ranks)
    write_rows(args, folder, num_ranks)
    try:
        code = leave_if_stopped(run_job(job))
    except ConfigError as error:
        sys.exit(f"the job on {num_ranks} rank(s) was refused: {error}")
    if code:
        sys.exit(f"the job on {num_ranks} rank(s) ended with exit code {code}")
    output = OutputFolder(folder / "out")
    (run,) = read_runs(output)
    if run.losses:
        sys.exit(f"a rank died in the job on {num_ranks} rank(s): {run.losses[0].reason}")
    num_at_once = engine_config(job).max_num_seqs * num_ranks
    answers: dict[str, str] = {}
    for part in sorted(output.path.glob("part-*.parquet")):
        table = pq.read_table(part, columns=["row_id", "output_digest"])
        answers.update(zip(*(column.to_pylist() for column in table.columns), strict=True))
    return scaled(run, read_metrics(output), num_ranks, num_at_once), answers


def show(found: Sequence[Scaled], are_same: bool) -> None:
    """Print each job's figures, its ratio to the first, and all as JSON."""
    part = "steady" if all(one.steady_s for one in found) else "whole"
    if part == "whole":
        print("no steady part in every run: more rows are needed, the ratio is that of the wholes")
    rates = [one.steady_tokens_per_s if part == "steady" else one.whole_tokens_per_s for one in found]
    ratios = [rate / max(rates[0], 1e-9) for rate in rates]
    for one, ratio in zip(found, ratios, strict=True):
        print(
            f"{one.num_ranks} rank(s), exchange {one.exchange}: steady {one.steady_tokens_per_s:,.1f} tok/s "
            f"in {one.steady_s:.1f} s, whole {one.whole_tokens_per_s:,.1f} tok/s in {one.whole_s:.1f} s, "
            f"start {one.start_s:.1f} s; {part} {ratio:.2f} times that of {found[0].num_ranks}"
        )
    print(f"output digests of the rows that all have: {'equal' if are_same else 'DIFFERENT'}")
    runs = [{**asdict(one), "ratio": round(ratio, 3)} for one, ratio in zip(found, ratios, strict=True)]
    print(json.dumps({"part": part, "same_digests": are_same, "runs": runs}))


def check_numbers(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Leave in a sentence before the first job if one of them cannot run."""
    try:
        num_experts = count_experts(args.model)
        jobs = [build_job(args, Path("."), num_ranks) for num_ranks in args.ranks]
    except ConfigError as error:
        parser.error(str(error))
    for job, num_ranks in zip(jobs, args.ranks, strict=True):
        if num_experts % job.cluster.ranks_per_replica:
            parser.error(
                f"--ranks has {num_ranks}, among which the model's {num_experts} experts a layer cannot be "
                "split evenly: take another number, or --replicas"
            )
        needs_gpus = job.engine.device == "cuda" or (
            job.engine.device == "auto" and torch.cuda.is_available()
        )
        if needs_gpus and job.cluster.address is None:
            need_gpus(parser, num_ranks, f"--ranks {num_ranks}")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scaling",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", required=True, help="a model folder; make_checkpoint writes large ones")
    parser.add_argument(
        "--ranks", type=positives, default="1,2", help="numbers of ranks; ratios are to the first (1,2)"
    )
    parser.add_argument("--replicas", action="store_true", help="ranks that do not share the experts")
    parser.add_argument("--rows", type=positive, default=256, help="for each rank (256)")
    parser.add_argument("--prompt-tokens", type=positive, default=512, help="of each row (512)")
    parser.add_argument(
        "--max-tokens", type=positive, default=128, help="that each row is answered with (128)"
    )
    parser.add_argument(
        "--max-num-seqs", type=positive, default=64, help="rows that a rank runs at once (64)"
    )
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--dtype", choices=["auto", "float32", "bfloat16"], default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--folder", type=Path, help="for input and output, which are deleted (a temporary one)"
    )
    parser.add_argument("--set", action="append", default=[], help="further settings: section.key=value")
    args = parser.parse_args(argv)
    if args.folder is not None and not args.folder.is_dir():
        parser.error(f"--folder {args.folder} is no folder")
    check_numbers(parser, args)
    os.environ.pop("RAY_ADDRESS", None)
    os.environ["PYTHONPATH"] = str(Path(__file__).resolve().parents[1])
    print(describe())
    print(f"seed {args.seed}; {args.rows} rows a rank of {args.prompt_tokens} + {args.max_tokens} tokens")
    found, answers = [], []
    for num_ranks in args.ranks:
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            figures, digests = measure(args, Path(folder), num_ranks)
        found.append(figures)
        answers.append(digests)
    are_same = same_digests(answers)
    show(found, are_same)
    if not are_same:
        sys.exit(1)


if __name__ == "__main__":
    main()

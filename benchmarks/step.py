"""The shared workload: one prefill step of 4,096 new tokens at the end of a context of 131,072.

One rank of an expert-parallel group is simulated on one device, with random weights in the release's formats
and a cache full of random entries; or, with ``--ranks``, so many ranks run on as many devices, and the first
one's step is told. Prints tokens a second, the mean step, peak memory, a table of stages
beside the least time each can take on an H200, and hashes of tokens, of every layer's output and of the
cache.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

from benchmarks.command_line import need_gpus, positive
from benchmarks.digests import digest
from benchmarks.environment import describe, device_name
from benchmarks.floors import FORMULAS, stage_floors_ms
from benchmarks.kernels.timing import event_times
from benchmarks.model_dims import DIMS, num_buckets, rank_config
from benchmarks.rank_processes import on_ranks
from benchmarks.stages import STAGES, StageMarks, Times, by_stage, measure_stages
from benchmarks.step_rank import SimulatedRank, Workload
from engine.config import ReplicaPlace

PROFILED_STEPS, LEAD_STEPS = 2, 3
TOP_KERNELS = 15
_BUILD_S, _STEP_S = 600.0, 300.0  # that long a rank waits for another: kernels are compiled in the first step


def add_options(parser: argparse.ArgumentParser) -> None:
    """What the workload is; all of it goes into the result."""
    on_gpu = torch.cuda.is_available()
    parser.add_argument(
        "--dims", choices=sorted(DIMS), default="flash", help="small: for a CPU, says nothing"
    )
    parser.add_argument("--layers", default="all", help="the first layers only, as 0-23; default: all")
    parser.add_argument(
        "--decoder",
        choices=["full", "mid"],
        default="full",
        help="full: every layer on every row; mid: a chunk in mid-prompt with the exact decoder tail",
    )
    parser.add_argument(
        "--group", type=positive, default=4, help="ranks that share the experts; one is simulated (4)"
    )
    parser.add_argument(
        "--ranks",
        type=positive,
        default=1,
        help="above 1: so many ranks share the experts, each on a device (1)",
    )
    parser.add_argument("--activation-quantisation", choices=["row", "release", "none"], default="row")
    parser.add_argument("--kernel-impl", choices=["triton", "torch"], default="triton" if on_gpu else "torch")
    parser.add_argument(
        "--dtype", choices=["bfloat16", "float32"], default="bfloat16" if on_gpu else "float32"
    )
    parser.add_argument("--steps", type=positive, default=10, help="steps that are timed (10)")
    parser.add_argument("--warm-up", type=int, default=3, help="steps before them (3)")
    parser.add_argument("--seed", type=int, default=0)


def workload_of(args: argparse.Namespace) -> Workload:
    """The options as a workload. Raises ``ValueError``."""
    text = DIMS[args.dims].text
    needed = text["kv_source_layer_ids"][-1] + 1 if args.decoder == "mid" else text["num_hidden_layers"]
    num_layers = needed
    if args.layers != "all":
        first, _, last = args.layers.partition("-")
        if first != "0" or not last.isdigit():
            raise ValueError(
                f"--layers is {args.layers!r}, expected 0-N: a model begins with its first layer"
            )
        num_layers = int(last) + 1
    if args.decoder == "mid" and num_layers < needed:
        raise ValueError(f"--decoder mid runs into layer {needed - 1}: --layers must hold it")
    return Workload(
        dims=args.dims,
        num_layers=min(num_layers, needed),
        num_ranks=args.ranks if args.ranks > 1 else args.group,
        is_real=args.ranks > 1,
        decoder=args.decoder,
        activations=args.activation_quantisation,
        dtype=args.dtype,
        kernel_impl=args.kernel_impl,
        seed=args.seed,
    )


def timed(call: Callable[[], object], num_calls: int, *, is_awaited: bool) -> list[float]:
    """Milliseconds of each call.

    An awaited one ends when the host has seen the device end it, as whoever samples has to.
    Others are asked for one behind the other, as a job asks for chunks in mid-prompt.
    """
    if not is_awaited and torch.cuda.is_available():
        return event_times(call, num_calls)
    times = []
    for _ in range(num_calls):
        started = time.perf_counter()
        call()
        synchronize()
        times.append(1e3 * (time.perf_counter() - started))
    return times


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def peak_gib() -> float:
    """Of the device; without one, of the process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def measure(
    workload: Workload, num_steps: int, num_warm_up: int, place: ReplicaPlace | None = None
) -> tuple[SimulatedRank, dict[str, Any]]:
    """Build the rank, hash a step, time steps, profile others. Returns the figures and hashes."""
    started = time.perf_counter()
    device = torch.device(f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu")
    marks = StageMarks()
    rank = SimulatedRank(workload, device, marks.mark_ops, place)
    synchronize()
    exchange_gib = rank.num_exchange_bytes / 2**30
    held_gib = exchange_gib + (torch.cuda.memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0)
    built = time.perf_counter()
    logits = rank.step()
    hashes = {"tokens": digest(logits.argmax(-1)), "logits": digest(logits)} | rank.cache_hashes()
    synchronize()
    first = time.perf_counter()
    hashes |= rank.output_hashes()
    is_awaited = workload.decoder == "full"
    timed(rank.step, num_warm_up, is_awaited=is_awaited)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    times = timed(rank.step, num_steps, is_awaited=is_awaited)
    figures: dict[str, float] = {
        "tokens_per_s": 1e3 * rank.num_new / statistics.mean(times),
        "mean_step_ms": statistics.mean(times),
        "min_step_ms": min(times),
        "max_step_ms": max(times),
        "peak_gib": exchange_gib + peak_gib(),
        "held_gib": held_gib,
        "build_s": built - started,
        "first_step_s": first - built,
    }
    step = (lambda: (rank.step(), synchronize())) if is_awaited else rank.step
    kernels = measure_stages(marks, step, PROFILED_STEPS, num_lead=LEAD_STEPS)
    stages = by_stage(kernels)
    stages["gaps"] = max(0.0, figures["mean_step_ms"] - sum(stages.values()))
    figures |= {f"stage {stage} ms": stages.get(stage, 0.0) for stage in STAGES}
    rank.leave()
    return rank, {"figures": figures, "kernels": top_kernels(kernels), "hashes": hashes}


def measure_rank(
    workload: Workload, num_steps: int, num_warm_up: int, place: ReplicaPlace | None = None
) -> tuple[SimulatedRank, dict[str, Any]]:
    """``measure`` in this process, on the device of its rank."""
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
    elif place is not None:
        torch.cuda.set_device(place.rank)  # all are visible to all: they write to each other
    return measure(workload, num_steps, num_warm_up, place)


def top_kernels(kernels: Times) -> dict[str, float]:
    """Those that take most of a step, named by their stage too."""
    ordered = sorted(kernels.items(), key=lambda item: -item[1])[:TOP_KERNELS]
    return {f"{stage}: {kernel[:60]}": ms for (stage, kernel), ms in ordered if kernel}


def print_report(rank: SimulatedRank, figures: dict[str, float]) -> None:
    """The workload in words, the figures, and the table of stages."""
    workload, config = rank.workload, rank.config
    dims = DIMS[workload.dims]
    last = rank.num_run_layers
    all_layers = dims.text["num_hidden_layers"]
    behind = f", and layer {last}'s entries and keys" if workload.decoder == "mid" else ""
    cut = "" if workload.decoder == "mid" or last == all_layers else f" of {all_layers} (CUT)"
    print(f"{rank.num_new} new tokens at context {rank.context}; layers 0-{last - 1}{cut}{behind}")
    num_experts = dims.text["n_routed_experts"]
    kind = "with its rows and theirs" if workload.is_real else "simulated: no traffic between ranks"
    print(
        f"one of {workload.num_ranks} ranks, {kind}: {num_experts // workload.num_ranks} of {num_experts} "
        f"experts, {rank.num_new * config.num_experts_per_tok} (row, slot) pairs"
    )
    print(
        f"n-gram tables cut to {dims.bucket_rows * num_buckets(dims.text):,} rows each, "
        f"{num_buckets(dims.text)} rows a token as ever"
    )
    for name, value in figures.items():
        if not name.startswith("stage "):
            print(f"{name:16} {value:12.3f}")
    floors = stage_floors_ms(config, num_layers=last, num_new=rank.num_new, context=rank.context)
    print(f"{'stage':28} {'ms':>9} {'of step':>8} {'floor':>8} {'floor/ms':>9}  floor's formula (H200)")
    for stage in STAGES:
        ms, floor = figures[f"stage {stage} ms"], floors.get(stage)
        share = f"{100 * ms / figures['mean_step_ms']:7.1f}%"
        bound = (
            "" if floor is None else f"{floor:8.2f} {100 * floor / ms if ms else 0:8.1f}%  {FORMULAS[stage]}"
        )
        print(f"{stage:28} {ms:9.3f} {share} {bound}")
    total = sum(floors.values())
    share, rate = 100 * total / figures["mean_step_ms"], 1e3 * rank.num_new / total
    print(f"{'sum of floors':28} {'':9} {'':8} {total:8.2f} {share:8.1f}%  {rate:,.0f} tok/s")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks step",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(parser)
    args = parser.parse_args(arguments)
    try:
        workload = workload_of(args)
        rank_config(DIMS[args.dims], num_layers=workload.num_layers, num_ranks=workload.num_ranks)
    except ValueError as error:
        parser.error(str(error))
    if torch.cuda.is_available():
        need_gpus(parser, args.ranks, f"--ranks {args.ranks}")
    elif args.dims != "small":
        need_gpus(parser, args.ranks, f"--dims {args.dims}, unlike --dims small,")
    print(describe(), flush=True)
    if workload.is_real:
        rank, result = on_ranks(
            workload.num_ranks,
            measure_rank,
            workload,
            args.steps,
            args.warm_up,
            start_timeout_s=_BUILD_S,
            timeout_s=_STEP_S,
        )
    else:
        rank, result = measure_rank(workload, args.steps, args.warm_up)
    print_report(rank, result["figures"])
    for name, ms in result["kernels"].items():
        print(f"{name:92} {ms:9.3f} ms a step")
    facts = {"suite": "step", "device": device_name(), "workload": asdict(workload)}
    print(json.dumps(facts | result))


if __name__ == "__main__":
    main()

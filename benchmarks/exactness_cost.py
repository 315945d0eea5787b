"""What does row invariance cost? The engine's products as they are, against the library's free choice.

``--kernels``: the fp8 kernels instead, as their tiles are chosen, against the best tiles for each number of
rows and against the library, which may also split a sum as it likes.

First every dense product of a layer at the release's dimensions, by row count: cut into padded tiles
of one shape (ours) against one call on exactly the rows there are (free). Then a whole engine on the
example model, with the same swap: generated tokens a second.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import time
from collections.abc import Callable, Iterator
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.command_line import need_gpus, positives
from benchmarks.environment import describe
from engine import EngineConfig, Request, SamplingParams
from engine.llm_engine import LLMEngine
from kernels.linear import HOPPER_TILES, fp8_linear, linear_reference
from kernels.number_formats import quantise_activations

USERS = (
    "kernels.linear",
    "kernels.linear.reference",
    "kernels.hyper_connections.reference",
    "kernels.moe.reference",
)
SHAPES = {"wq_a": (5120, 1280), "wkv": (5120, 512), "shared w2": (2304, 5120), "wo_b": (8192, 5120)}


def free_linear(x: Tensor, weight: Tensor) -> Tensor:
    """One library call on exactly the rows there are: its bits follow the number of rows."""
    return torch.mm(x, weight.t())


@contextlib.contextmanager
def invariance_off() -> Iterator[None]:
    """Every product of the engine becomes ``free_linear``."""
    with contextlib.ExitStack() as stack:
        for module in USERS:
            stack.enter_context(patch(f"{module}.linear_reference", free_linear))
        yield


def median_seconds(call: Callable[[], object], *, at_least_s: float = 0.2) -> float:
    """Median of repeated calls, the device drained after each."""
    times: list[float] = []
    call()
    while sum(times) < at_least_s or len(times) < 5:
        started = time.perf_counter()
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def compare_products(dtype: torch.dtype, device: torch.device, row_counts: list[int]) -> None:
    print(f"products, {dtype}: milliseconds ours / free (ratio)")
    print(f"{'rows':>10}" + "".join(f"{rows:>24}" for rows in row_counts))
    for name, (inputs, outputs) in SHAPES.items():
        weight = torch.randn(outputs, inputs, device=device).to(dtype)
        cells = []
        for rows in row_counts:
            x = torch.randn(rows, inputs, device=device).to(dtype)
            ours = median_seconds(lambda x=x, weight=weight: linear_reference(x, weight)) * 1e3
            free = median_seconds(lambda x=x, weight=weight: free_linear(x, weight)) * 1e3
            cells.append(f"{ours:9.3f}/{free:8.3f} ({ours / free:4.2f})")
        print(f"{name:>10}" + "".join(f"{cell:>24}" for cell in cells))


def compare_kernels(row_counts: list[int]) -> None:
    """Needs a Hopper GPU. Weights take turns, so that none is found in the cache."""
    # Its cases need the tests' packages, which a plain installation lacks.
    from benchmarks.kernels.bench_linear import CACHE_BYTES, LARGE, in_turn, random_weight, rows_of, scaled_mm
    from benchmarks.kernels.captured import LAUNCHES, captured_ms

    print("fp8 kernels: microseconds ours / best tiles (ratio), library (ratio)")
    for name, (inputs, outputs) in (SHAPES | LARGE).items():
        count = min(LAUNCHES, 1 + CACHE_BYTES // (inputs * outputs))
        weights = [random_weight(inputs, outputs, seed) for seed in range(count)]
        for rows in row_counts:
            x = quantise_activations(rows_of(rows, inputs), mode="row")
            ours = in_turn([lambda w=w, x=x: fp8_linear(x, w, dtype=torch.bfloat16) for w in weights])
            chosen = captured_ms(ours, 0.1) * 1e3
            times = [chosen]
            for tile in HOPPER_TILES:
                # A tile far from the rows there are is hopeless, and slow to measure.
                if rows / 8 <= tile.block_rows <= 4 * rows or tile.block_rows == 256:
                    with patch("kernels.linear.op.choose_hopper_config", lambda *_, tile=tile: tile):
                        times.append(captured_ms(ours, 0.1) * 1e3)
            library = captured_ms(in_turn([scaled_mm(rows_of(rows, inputs), w) for w in weights]), 0.1) * 1e3
            print(
                f"{name:>10} {rows:>6}: {chosen:8.1f} / {min(times):8.1f} ({chosen / min(times):4.2f}), "
                f"{library:8.1f} ({chosen / library:4.2f})",
                flush=True,
            )


def engine_tokens_per_s(model: str, dtype: str, num_requests: int) -> float:
    """Generated tokens a second of a bare engine after its first step."""
    config = EngineConfig(model=model, dtype=dtype, max_num_seqs=num_requests, enable_prefix_caching=False)
    engine = LLMEngine.build(config)
    rng = random.Random(0)
    sampling = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
    for index in range(num_requests):
        prompt = [rng.randrange(10, 4000) for _ in range(24)]
        engine.add_request(Request(request_id=str(index), prompt_token_ids=prompt, sampling=sampling))
    engine.step()
    started, steps = time.perf_counter(), 0
    while engine.has_unfinished():
        engine.step()
        steps += 1
    return steps * num_requests / (time.perf_counter() - started)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.exactness_cost",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--model", default="examples/bard/model")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--kernels", action="store_true", help="the fp8 kernels, on a Hopper GPU")
    parser.add_argument("--rows", type=positives, default="1,3,16,64,257,1024")
    args = parser.parse_args(arguments)
    if args.kernels:
        need_gpus(parser, 1, "--kernels")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        torch.set_num_threads(1)
    print(describe())
    if args.kernels:
        compare_kernels(args.rows)
        return
    compare_products(getattr(torch, args.dtype), device, args.rows)
    print("whole engine, generated tokens a second: ours / free (ours of free)")
    for num_requests in (1, 16, 64):
        ours = engine_tokens_per_s(args.model, args.dtype, num_requests)
        with invariance_off():
            free = engine_tokens_per_s(args.model, args.dtype, num_requests)
        print(f"{num_requests:4} sequences: {ours:8.1f} / {free:8.1f} ({ours / free:.2f})")


if __name__ == "__main__":
    main()

"""How long does one layer's share of a step take to come from each place? Random rows of a table, no model.

The parts that ``benchmarks.engram`` is made of: the gather from GPU memory and from page-locked host memory,
and rows that threads read from a file (in the page cache, and not) and copy to the device. Needs a GPU. The
file is a temporary one (TMPDIR says where), which is deleted at the end and after SIGTERM.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.command_line import need_gpus, positive, positives, scratch_folder
from benchmarks.engram import drop_cache, resident_share
from benchmarks.environment import describe
from engine.checkpoint import StoredTensor
from engine.staged_rows import RowReader, StagedTable
from kernels.engram import engram_gather

DIM, NUM_LOOKUPS = 256, 24
NUM_SETS = 8  # of rows that take turns
BLOCK = 1 << 24


def write_table(path: Path, num_rows: int) -> list[StoredTensor]:
    """Values and scales one behind the other, a random block over and over."""
    block = np.random.default_rng(0).integers(0, 120, BLOCK, dtype=np.uint8)
    num_values, num_scales = num_rows * DIM, num_rows * DIM // 32
    with open(path, "wb") as file:
        for start in range(0, num_values + num_scales, BLOCK):
            file.write(block[: num_values + num_scales - start].data)
        file.flush()
        os.fsync(file.fileno())  # only what is on disk can be dropped from the page cache
    return [
        StoredTensor("values", path, "F8_E4M3", (num_rows, DIM), 0, num_values),
        StoredTensor("scale", path, "F8_E8M0", (num_rows, DIM // 32), num_values, num_scales),
    ]


def median_ms(call: Callable[[int], object], num_calls: int = 24) -> float:
    """Each call drained, the sets of rows in turns; the first one warms up."""
    times = []
    for number in range(num_calls + 1):
        started = time.perf_counter()
        call(number % NUM_SETS)
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - started))
    return statistics.median(times[1:])


def measure(path: Path, num_table_rows: int, num_rows: int) -> None:
    """Print each place's time, and check that all give the same bytes."""
    stored = write_table(path, num_table_rows)
    bytes_ = torch.from_numpy(np.fromfile(path, np.uint8))
    host = bytes_.pin_memory()
    split = num_table_rows * DIM
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (num_rows, NUM_LOOKUPS)
    rows = [
        torch.randint(0, num_table_rows, shape, device="cuda", generator=generator) for _ in range(NUM_SETS)
    ]
    on_host = [numbers.cpu().numpy() for numbers in rows]
    table = StagedTable(RowReader(torch.device("cuda")), stored, max_num_rows=num_rows * NUM_LOOKUPS)
    in_turn = torch.arange(num_rows * NUM_LOOKUPS, device="cuda", dtype=torch.int32).view(shape)

    def gather(memory: Tensor, number: int) -> Tensor:
        values = memory[:split].view(torch.float8_e4m3fn).view(-1, DIM)
        scale = memory[split:].view(-1, DIM // 32)
        return engram_gather(values, scale, rows[number], dtype=torch.bfloat16)

    def staged(number: int) -> Tensor:
        with table.taken(table.fetch(lambda: on_host[number])) as fetched:
            values, scale = fetched.tensors
            return engram_gather(values.view(torch.float8_e4m3fn), scale, in_turn, dtype=torch.bfloat16)

    on_gpu = host.cuda()
    expected = [gather(on_gpu, number).view(torch.int16) for number in range(NUM_SETS)]
    drop_cache([path])
    share = resident_share([path])
    started = time.perf_counter()
    outputs = [staged(number) for number in range(2)]
    torch.cuda.synchronize()
    cold_ms = 1e3 * (time.perf_counter() - started) / 2
    assert all(torch.equal(a.view(torch.int16), b) for a, b in zip(outputs, expected, strict=False))
    for number in range(NUM_SETS):
        assert torch.equal(gather(host, number).view(torch.int16), expected[number])
        assert torch.equal(staged(number).view(torch.int16), expected[number])
    num_bytes = num_rows * NUM_LOOKUPS * (DIM + DIM // 32)
    for place, ms in (
        ("GPU memory", median_ms(lambda number: gather(on_gpu, number))),
        ("host memory", median_ms(lambda number: gather(host, number))),
        ("file, in the page cache", median_ms(staged)),
        (f"file, {100 * share:.1f} % in the page cache", cold_ms),
    ):
        print(f"{num_rows:5} rows from {place:32} {ms:9.3f} ms  {num_bytes / ms / 1e6:8.2f} GB/s", flush=True)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engram_rows",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument(
        "--table-rows", type=positive, default=16_000_000, help="264 bytes each: 4.2 GB (16000000)"
    )
    parser.add_argument("--rows", type=positives, default="4096,64,1", help="tokens of a step (4096,64,1)")
    args = parser.parse_args(arguments)
    need_gpus(parser, 1)
    print(describe(), flush=True)
    with scratch_folder() as folder:
        for num_rows in args.rows:
            measure(folder / "table", args.table_rows, num_rows)


if __name__ == "__main__":
    main()

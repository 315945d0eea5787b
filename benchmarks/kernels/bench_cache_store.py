"""Cache stores and engram at the release's shapes, 4,096 rows, against their byte floors.

The contract comes first: nothing is timed when a gate is red. Run from the root:
``python -m benchmarks.kernels.bench_cache_store``.
"""

from __future__ import annotations

import json

import torch

from benchmarks.kernels.bench_hyper_connections import copy_rate
from benchmarks.kernels.captured import captured_ms
from benchmarks.kernels.contracts import require_contracts
from kernels.cache_store import compress_and_store, store_index_keys, store_window_kv
from kernels.engram import engram_gate, engram_gather
from tests.kernels.cache_store_cases import EPS, store_inputs

NUM_ROWS, DIM, INDEX_DIM, WIDTH = 4096, 512, 128, 5120


def store_ops() -> dict[str, tuple[int, object]]:
    cuda = torch.device("cuda")
    kv = store_inputs(0, cuda, NUM_ROWS, DIM, torch.bfloat16)
    index = store_inputs(0, cuda, NUM_ROWS, INDEX_DIM, torch.bfloat16)
    norm, index_norm = ([i[n] for n in ("weight", "cos", "sin")] for i in (kv, index))
    entries = torch.zeros(2 * NUM_ROWS, 288, dtype=torch.uint8, device=cuda)
    keys = torch.zeros(2 * NUM_ROWS, 68, dtype=torch.uint8, device=cuda)
    rows = torch.empty(NUM_ROWS, 528, dtype=torch.uint8, device=cuda)
    groups = torch.arange(NUM_ROWS, device=cuda).view(-1, 2)
    half = NUM_ROWS // 2
    some = [norm[0], norm[1][:half], norm[2][:half], kv["slots"][:half]]
    return {
        "store_window_kv": (NUM_ROWS * (1024 + 528 + 256), lambda: store_window_kv(
            kv["rows"], *norm, eps=EPS, is_packed=True, out=rows)),
        "compress_and_store_1": (NUM_ROWS * (1024 + 288 + 1024 + 256), lambda: compress_and_store(
            kv["rows"], None, kv["group_rows"][:, :1].contiguous() % NUM_ROWS, *norm, kv["slots"], entries,
            eps=EPS, dtype=torch.bfloat16)),
        "compress_and_store_2": (half * (8192 + 288 + 1024 + 256), lambda: compress_and_store(
            kv["keys_and_gates"], kv["open_groups"], groups, *some, entries, eps=EPS, dtype=torch.bfloat16)),
        "store_index_keys": (NUM_ROWS * (256 + 68 + 256), lambda: store_index_keys(
            index["rows"], *index_norm, index["slots"], keys, eps=EPS)),
    }  # fmt: skip


def engram_ops() -> dict[str, tuple[int, object]]:
    g = torch.Generator("cuda").manual_seed(0)
    num_table_rows = 20_000_000
    table = torch.randint(0, 120, (num_table_rows, 256), device="cuda", dtype=torch.uint8).view(
        torch.float8_e4m3fn
    )
    scale = torch.randint(110, 130, (num_table_rows, 8), device="cuda", dtype=torch.uint8)
    rows = torch.randint(0, num_table_rows, (NUM_ROWS, 24), device="cuda", generator=g)
    gathered = torch.empty(NUM_ROWS, 24 * 256, device="cuda", dtype=torch.bfloat16)
    projected = torch.randn(NUM_ROWS, 5 * WIDTH, device="cuda", generator=g).bfloat16()
    streams = torch.randn(NUM_ROWS, 4, WIDTH, device="cuda", generator=g).bfloat16()
    weights = [torch.randn(4, WIDTH, device="cuda", generator=g) for _ in range(2)]
    keys, value = projected[:, : 4 * WIDTH].unflatten(1, (4, WIDTH)), projected[:, 4 * WIDTH :]
    out = torch.empty_like(streams)
    return {
        "engram_gather": (NUM_ROWS * 24 * (256 + 8 + 512), lambda: engram_gather(
            table, scale, rows, dtype=torch.bfloat16, out=gathered)),
        "engram_gate": (2 * NUM_ROWS * WIDTH * 13, lambda: engram_gate(
            streams, keys, value, *weights, eps=1e-20, out=out)),
    }  # fmt: skip


def main() -> None:
    require_contracts(__doc__, "cache_store", "engram")
    rate = copy_rate()
    results = {}
    for name, (num_bytes, launch) in (store_ops() | engram_ops()).items():
        ms, floor = captured_ms(launch), num_bytes / rate  # type: ignore[arg-type]
        results[name] = {"ms": ms, "floor_ms": floor, "ratio": ms / floor}
        print(f"{name:22} {ms:9.4f} ms  floor {floor:8.4f}  {ms / floor:5.2f} x")
    facts = {"op": "cache_store", "gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    print(json.dumps(facts | {"copy_tb_s": rate / 1e9, "results": results}))


if __name__ == "__main__":
    main()

"""Scoring and selection at the release's shapes: 4,096 rows of one sequence, 32 heads x 128.

The contract comes first: nothing is timed when a gate is red. DeepGEMM is timed beside where it is installed.
Run from the repository root: ``python -m benchmarks.kernels.bench_indexer``.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable

import torch

from benchmarks.kernels.contracts import require_contracts
from benchmarks.kernels.timing import sustained_ms
from kernels.indexer import KeyPages, candidate_scores, index_scores, select_entries, select_topk
from kernels.number_formats import pack_fp4_index

NUM_ROWS, HEADS, DIM, PER_BLOCK = 4096, 32, 128, 32
NUM_CANDIDATES, BLOCK_SIZE, TOP_K = 2048, 8, 512


def build_case(num_entries: int) -> tuple[torch.Tensor, torch.Tensor, KeyPages]:
    """A chunk at the end of one sequence, its blocks scattered over the pool."""
    g = torch.Generator("cuda").manual_seed(0)

    def vectors(*shape: int) -> torch.Tensor:
        return pack_fp4_index(torch.randn(shape, device="cuda", generator=g).bfloat16())

    num_blocks = num_entries // PER_BLOCK
    tables = torch.randperm(num_blocks, device="cuda", generator=g)[None]
    visible = num_entries - NUM_ROWS + 1 + torch.arange(NUM_ROWS, device="cuda")
    weights = torch.randn(NUM_ROWS, HEADS, device="cuda", generator=g) * (HEADS * DIM) ** -0.5
    pages = KeyPages(
        vectors(num_entries + 1, DIM), tables, torch.zeros_like(visible), visible, PER_BLOCK, num_entries
    )
    return vectors(NUM_ROWS, HEADS, DIM), weights, pages


def peak_mib(launch: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    launch()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def time_deepgemm(num_entries: int, visible: torch.Tensor) -> float | None:
    """DeepGEMM's fp8 scoring of the same shape, into fp32."""
    if importlib.util.find_spec("deep_gemm") is None:
        return None
    import deep_gemm

    q = torch.randn(NUM_ROWS, HEADS, DIM, device="cuda").to(torch.float8_e4m3fn)
    k = torch.randn(num_entries, DIM, device="cuda").to(torch.float8_e4m3fn)
    scale, weights = torch.ones(num_entries, device="cuda"), torch.randn(NUM_ROWS, HEADS, device="cuda")
    start, end = torch.zeros(NUM_ROWS, device="cuda", dtype=torch.int32), visible.int()
    return sustained_ms(
        lambda: deep_gemm.fp8_fp4_mqa_logits(
            (q, None),
            (k, scale),
            weights,
            start,
            end,
            clean_logits=False,
            max_seqlen_k=0,
            logits_dtype=torch.float32,
        )
    )


def measure_matrix(q: torch.Tensor, weights: torch.Tensor, pages: KeyPages) -> dict[str, float]:
    """Scores of all entries, and the selection over them."""
    scores = torch.empty(NUM_ROWS, pages.max_entries, device="cuda")
    selected = torch.empty(NUM_ROWS, TOP_K, device="cuda", dtype=torch.int64)
    return {
        "index_scores": sustained_ms(lambda: index_scores(q, weights, pages, out=scores)),
        "select_topk": sustained_ms(lambda: select_topk(scores, pages.num_visible, k=TOP_K, out=selected)),
        "torch_topk": sustained_ms(lambda: scores.topk(TOP_K, sorted=False), 0.3),
    }


def measure(num_entries: int) -> dict[str, float]:
    """Sustained milliseconds by op, and what ``select_entries`` allocates at its peak, results included."""
    q, weights, pages = build_case(num_entries)
    result = measure_matrix(q, weights, pages)
    anchor = time_deepgemm(num_entries, pages.num_visible)
    if anchor is not None:
        result["deepgemm"] = anchor
    torch.cuda.empty_cache()
    for name, num_blocks in (("select_entries", 0), ("select_entries_with_blocks", NUM_CANDIDATES)):

        def launch(num_blocks: int = num_blocks) -> object:
            return select_entries(q, weights, pages, k=TOP_K, block_size=BLOCK_SIZE, num_blocks=num_blocks)

        result[name] = sustained_ms(launch)
        result[f"{name}_peak_mib"] = peak_mib(launch)
    blocks = torch.rand(NUM_ROWS, num_entries // BLOCK_SIZE - 512, device="cuda").argsort(1)[
        :, :NUM_CANDIDATES
    ]
    blocks = blocks.sort(1).values.int()
    out = torch.empty(NUM_ROWS, NUM_CANDIDATES * BLOCK_SIZE, device="cuda")
    result["candidate_scores"] = sustained_ms(
        lambda: candidate_scores(q, weights, pages, blocks, block_size=BLOCK_SIZE, out=out)
    )
    result["select_listed"] = sustained_ms(
        lambda: select_entries(q, weights, pages, k=TOP_K, block_size=BLOCK_SIZE, blocks=blocks)
    )
    return result


def main() -> None:
    require_contracts(__doc__, "indexer")
    results = {str(n): measure(n) for n in (65_536, 131_072)}
    for n, result in results.items():
        for name, value in result.items():
            print(f"{n:>8} {name:30} {value:9.3f}")
    device = torch.cuda.get_device_name()
    print(json.dumps({"op": "indexer", "gpu": device, "torch": torch.__version__, "ms": results}))


if __name__ == "__main__":
    main()

"""Short launches as a job runs them, without the host between them: captured once, replayed many times."""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.kernels.timing import sustained_ms

LAUNCHES = 20


def captured_ms(launch: Callable[[], object], seconds: float = 0.5) -> float:
    """Sustained time of one launch among ``LAUNCHES`` of a CUDA graph."""
    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(LAUNCHES):
            launch()
    return sustained_ms(graph.replay, seconds) / LAUNCHES

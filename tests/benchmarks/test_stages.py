"""Kernels of a profile find the stage that launched them."""

from __future__ import annotations

from typing import Any

from benchmarks.stages import by_stage, stage_times


def mark(stage: str, ts: float, dur: float) -> dict[str, Any]:
    return {"ph": "X", "cat": "user_annotation", "name": f"stage: {stage}", "ts": ts, "dur": dur}


def kernel(
    name: str, number: int, launched: float, dur: float, cat: str = "cuda_driver"
) -> list[dict[str, Any]]:
    return [
        {"ph": "X", "cat": cat, "name": "launch", "ts": launched, "dur": 1, "args": {"correlation": number}},
        {"ph": "X", "cat": "kernel", "name": name, "ts": 1e6, "dur": dur, "args": {"correlation": number}},
    ]


MARKS = [
    mark("rest", 0, 100),
    mark("other attention", 10, 40),
    mark("selection", 20, 10),
    mark("MoE", 60, 20),
    {"ph": "X", "cat": "user_annotation", "name": "someone else's", "ts": 0, "dur": 100},
    {"ph": "X", "cat": "gpu_user_annotation", "name": "stage: MoE", "ts": 0, "dur": 100},
]


def test_a_kernel_belongs_to_the_innermost_mark_at_its_launch() -> None:
    events = [
        *MARKS,
        *kernel("a step before", 12, -5, 4096.0),
        *kernel("gather", 1, 5, 1.0, "cuda_runtime"),
        *kernel("matmul", 2, 12, 2.0),
        *kernel("select_kernel", 3, 21, 4.0),
        *kernel("score_tiles_kernel", 4, 22, 8.0),
        *kernel("rotate", 5, 35, 16.0),
        *kernel("experts", 6, 60, 32.0),
        *kernel("ncclDevKernel_SendRecv", 9, 61, 512.0),
        *kernel("send_rows_kernel", 10, 62, 1024.0),
        *kernel("c10d::symmetric_memory::barrier_kernel(unsigned int**, int)", 11, 63, 2048.0),
        *kernel("head", 7, 90, 64.0),
        *kernel("a neighbour's", 8, 300, 128.0),
        {"ph": "X", "cat": "kernel", "name": "no launch", "ts": 0, "dur": 256, "args": {"correlation": 99}},
    ]
    times = stage_times(events)
    assert times["indexer scoring", "score_tiles_kernel"] == 8.0
    assert by_stage(times) == {
        "rest": 1.0 + 64.0 + 128.0 + 256.0,
        "other attention": 2.0 + 16.0,
        "selection": 4.0,
        "indexer scoring": 8.0,
        "MoE": 32.0,
        "traffic between ranks": 512.0 + 1024.0 + 2048.0,
    }


def test_without_a_device_marks_count_their_own_time() -> None:
    assert by_stage(stage_times(MARKS)) == {
        "rest": 40.0,
        "other attention": 30.0,
        "selection": 10.0,
        "MoE": 20.0,
    }

"""Where a step's time goes: every kernel's duration, put to the stage that launched it.

Parts of the engine are marked while a profiler records; a kernel belongs to the innermost mark that was open
when the host launched it, some to a stage by their own name. Without a GPU the marks' own times are taken.
The engine itself knows nothing of this.
"""

from __future__ import annotations

import bisect
import contextlib
import json
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from engine.layers.attention import Attention
from engine.layers.engram import Engram
from engine.layers.moe import MoE
from engine.layers.ops import Ops
from engine.parallel import ExpertExchange, ExpertGroup

STAGES = (
    "indexer scoring",
    "selection",
    "attention core",
    "other attention",
    "MoE",
    "hyper-connections and norms",
    "engram",
    "traffic between ranks",
    "rest",
    "gaps",
)
_MARK = "stage: "
_SCOPES = (
    (Attention, "__call__", "other attention"),
    (MoE, "__call__", "MoE"),
    (Engram, "__call__", "engram"),
    (ExpertGroup, "swap", "traffic between ranks"),
    (ExpertExchange, "dispatch", "traffic between ranks"),
    (ExpertExchange, "combine", "traffic between ranks"),
    (ExpertExchange, "collect", "traffic between ranks"),
)
_OPS = {
    "select_entries": "selection",
    "paged_sparse_attention": "attention core",
    "rms_norm": "hyper-connections and norms",
    "read_streams": "hyper-connections and norms",
    "update_streams": "hyper-connections and norms",
    "expand_streams": "hyper-connections and norms",
    "collapse_norm": "hyper-connections and norms",
}
_KERNELS = (
    (re.compile(r"^(score_|unpack_queries|relay_keys)"), "indexer scoring"),
    # A rank that waits for another does so in the barrier's kernel. What experts store at another rank
    # is in the experts' own time: what it adds to it shows against one rank with as many experts and rows.
    (re.compile(r"^(ncclDevKernel|send_rows_)|\bbarrier_kernel\b"), "traffic between ranks"),
)
_ON_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
_LAUNCHES = {"cuda_runtime", "cuda_driver"}


class StageMarks:
    """Marks around a model's parts; they cost a comparison while nothing is recorded."""

    def __init__(self) -> None:
        self._is_recording = False

    def mark_ops(self, ops: Ops) -> Ops:
        """The table with its ops marked: build the model with it."""
        marked = {name: self._marked(getattr(ops, name), stage) for name, stage in _OPS.items()}
        return replace(ops, **marked)

    def _marked(self, call: Callable[..., Any], stage: str) -> Callable[..., Any]:
        def marked(*args: Any, **options: Any) -> Any:
            if not self._is_recording:
                return call(*args, **options)
            with record_function(_MARK + stage):
                return call(*args, **options)

        return marked

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Marks are written, those of whole layers too."""
        with contextlib.ExitStack() as stack:
            for owner, method, stage in _SCOPES:
                stack.enter_context(patch.object(owner, method, self._marked(getattr(owner, method), stage)))
            self._is_recording = True
            stack.callback(setattr, self, "_is_recording", False)
            yield


Times = dict[tuple[str, str], float]
"""By stage and kernel; without a device the kernel is empty."""


def measure_stages(
    marks: StageMarks, step: Callable[[], object], num_steps: int, *, num_lead: int = 0
) -> Times:
    """Milliseconds a step that kernels keep the device (or stages the CPU) busy; no gaps in it.

    ``num_lead`` steps come before, which do not count: a device that rested has a higher clock at first.
    """
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler:
        for _ in range(num_lead):
            step()
        with marks.recording():
            for _ in range(num_steps):
                with record_function(_MARK + "rest"):
                    step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return {key: us / 1e3 / num_steps for key, us in stage_times(events).items()}


def by_stage(times: Times) -> dict[str, float]:
    """The sums over kernels."""
    total: dict[str, float] = defaultdict(float)
    for (stage, _), value in times.items():
        total[stage] += value
    return dict(total)


def stage_times(events: list[dict[str, Any]]) -> Times:
    """Microseconds by stage and kernel of a Chrome trace's events, launched from the first mark on."""
    times, stages = _timeline([e for e in events if str(e.get("name")).startswith(_MARK) and _is_host(e)])
    total: Times = defaultdict(float)
    kernels = [event for event in events if event.get("cat") in _ON_DEVICE]
    if not kernels:
        for begin, end, stage in zip(times, times[1:], stages, strict=False):
            if stage is not None:
                total[stage, ""] += end - begin
        return dict(total)
    launched = {
        event["args"]["correlation"]: event["ts"]
        for event in events
        if event.get("cat") in _LAUNCHES and "correlation" in event.get("args", {})
    }
    for kernel in kernels:
        at = launched.get(kernel["args"].get("correlation"))
        if at is not None and at < times[0]:
            continue
        place = -1 if at is None else bisect.bisect_right(times, at) - 1
        marked = stages[place] if place >= 0 else None
        total[_stage_by_name(kernel["name"]) or marked or "rest", kernel["name"]] += kernel["dur"]
    return dict(total)


def _is_host(event: dict[str, Any]) -> bool:
    return event.get("ph") == "X" and event.get("cat") == "user_annotation"


def _stage_by_name(kernel: str) -> str | None:
    return next((stage for pattern, stage in _KERNELS if pattern.search(kernel)), None)


def _timeline(marks: list[dict[str, Any]]) -> tuple[list[float], list[str | None]]:
    """Moments at which the innermost open mark changes, and which it is from there on."""
    times: list[float] = []
    stages: list[str | None] = []
    open_marks: list[tuple[float, str]] = []

    def change(at: float) -> None:
        times.append(at)
        stages.append(open_marks[-1][1] if open_marks else None)

    for mark in sorted(marks, key=lambda m: (m["ts"], -m["dur"])):
        while open_marks and open_marks[-1][0] <= mark["ts"]:
            end, _ = open_marks.pop()
            change(end)
        open_marks.append((mark["ts"] + mark["dur"], mark["name"].removeprefix(_MARK)))
        change(mark["ts"])
    while open_marks:
        end, _ = open_marks.pop()
        change(end)
    return times, stages

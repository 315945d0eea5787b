"""Sustained timing: what a launch costs when the card has been busy for a while, which is how a job runs."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from itertools import pairwise

import torch


def sustained_ms(launch: Callable[[], object], seconds: float = 1.0) -> float:
    """Median of the later two thirds of back-to-back calls that fill ``seconds``."""
    for _ in range(3):
        launch()
    torch.cuda.synchronize()
    guess = event_times(launch, 5)
    count = max(12, int(seconds * 1e3 / statistics.median(guess)))
    times = event_times(launch, count)
    return statistics.median(times[count // 3 :])


def event_times(launch: Callable[[], object], count: int) -> list[float]:
    """Milliseconds of each of so many calls, one behind the other, by the device's clock."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for event in events[1:]:
        launch()
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in pairwise(events)]

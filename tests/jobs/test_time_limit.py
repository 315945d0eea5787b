"""Time limits: how they are written, and that a run is told to stop before they are up."""

from __future__ import annotations

import signal
import time
from datetime import datetime

import pytest

from jobs.time_limit import TimeLimit, moments_to_stop, parse_duration, parse_until


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("7h30m", 27000),
        ("90m", 5400),
        ("45s", 45),
        ("1d2h3m4s", 93784),
        ("08:00:00", 28800),
        ("1-00:00:30", 86430),
    ],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "7", "h", "30m7h", "0s", "-1h", "1.5h", "06:00", "٣h"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(ValueError, match="is no"):
        parse_duration(text)


def test_until_is_the_next_such_time() -> None:
    now = datetime(2030, 1, 31, 22, 0, 0)
    assert parse_until("23:30", now) == 5400
    assert parse_until("06:00", now) == 8 * 3600
    assert parse_until("22:00", now) == 24 * 3600
    assert parse_until("2030-01-31T22:00:10", now) == 10
    for wrong in ("2030-01-31T21:00:00", "6 o'clock", "24:00", "6:00"):
        with pytest.raises(ValueError, match=r"passed|isoformat|hour"):
            parse_until(wrong, now)


@pytest.mark.parametrize("limit_s", [2.0, 60.0, 3600.0, 27000.0])
def test_the_stop_comes_before_the_limit_and_the_drain_before_that(limit_s: float) -> None:
    drain_s, stop_s = moments_to_stop(limit_s)
    assert 0 < drain_s < stop_s < limit_s
    assert limit_s - drain_s <= 330


def test_a_run_is_told_to_drain_and_then_to_stop() -> None:
    heard: list[int] = []
    before = {
        n: signal.signal(n, lambda number, _: heard.append(number)) for n in (signal.SIGUSR1, signal.SIGTERM)
    }
    try:
        with TimeLimit(0.2):
            deadline = time.monotonic() + 30
            while len(heard) < 2 and time.monotonic() < deadline:
                time.sleep(0.01)
        with TimeLimit(0.2):
            pass
        with TimeLimit(None):
            time.sleep(0.3)
        assert heard == [signal.SIGUSR1, signal.SIGTERM]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

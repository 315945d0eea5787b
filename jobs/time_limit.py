"""A run's time limit: how it is written, and the signals that a run sends itself before it is up.

Owns reading "7h30m" and "06:00" and when to begin to stop. It must not know what a stop does: it sends what
an outside scheduler would, SIGUSR1 to drain and then SIGTERM, and the run's own handlers do the rest.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import threading
from collections.abc import Callable
from datetime import datetime, timedelta
from functools import partial

logger = logging.getLogger(__name__)

_MAX_DRAIN_S = 300.0
_MAX_RESERVE_S = 30.0

_UNITS = re.compile(r"(?=.)(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", re.ASCII)
_CLOCK = re.compile(r"(?:(\d+)-)?(\d+):(\d\d):(\d\d)", re.ASCII)  # as Slurm writes it


def parse_duration(text: str) -> float:
    """Seconds of "7h30m", "90m", "1d", or of Slurm's "1-07:30:00". Raises ``ValueError``."""
    match = _UNITS.fullmatch(text) or _CLOCK.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is no duration such as 7h30m")
    days, hours, minutes, seconds = (int(group or 0) for group in match.groups())
    duration = timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds).total_seconds()
    if duration <= 0:
        raise ValueError(f"{text!r} is no time at all")
    return duration


def parse_until(text: str, now: datetime | None = None) -> float:
    """Seconds from now until the next "06:00", or until "2030-01-31T06:00:00"; both local time.

    A moment that has passed is no time at all: ``ValueError``.
    """
    now = now if now is not None else datetime.now()
    match = re.fullmatch(r"(\d\d):(\d\d)", text, re.ASCII)
    if match is None:
        moment = datetime.fromisoformat(text)
        if moment.tzinfo is not None:
            moment = moment.astimezone().replace(tzinfo=None)
        if moment <= now:
            raise ValueError(f"{text!r} has passed")
    else:
        moment = now.replace(hour=int(match[1]), minute=int(match[2]), second=0, microsecond=0)
        if moment <= now:
            moment += timedelta(days=1)
    # By way of the zone, so that a night in which the clocks change has its own length.
    return (moment.astimezone() - now.astimezone()).total_seconds()


def moments_to_stop(limit_s: float) -> tuple[float, float]:
    """When to drain and when to stop at once, in seconds from the beginning of a limit of ``limit_s``."""
    stop_s = limit_s - min(_MAX_RESERVE_S, limit_s * 0.05)
    return stop_s - min(_MAX_DRAIN_S, limit_s * 0.1), stop_s


class TimeLimit:
    """While the ``with`` lasts, the clock runs; ``limit_s`` None: it never rings."""

    def __init__(self, limit_s: float | None) -> None:
        self._timers: list[threading.Timer] = []
        if limit_s is None:
            return
        drain_s, stop_s = moments_to_stop(limit_s)
        for after_s, ring in (
            (drain_s, partial(_ring, signal.SIGUSR1, "the time limit is near: no other row is begun")),
            (stop_s, partial(_ring, signal.SIGTERM, "the time limit is here: what is in flight is left")),
        ):
            self._timers.append(_timer(after_s, ring))

    def __enter__(self) -> TimeLimit:
        for timer in self._timers:
            timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        for timer in self._timers:
            timer.cancel()
        for timer in self._timers:
            timer.join()  # after this none rings, when other handlers stand again


def _timer(after_s: float, ring: Callable[[], None]) -> threading.Timer:
    timer = threading.Timer(after_s, ring)
    timer.daemon = True
    return timer


def _ring(number: signal.Signals, text: str) -> None:
    logger.warning("%s", text)
    os.kill(os.getpid(), number)

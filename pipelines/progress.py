"""The one line that says how far a job is, true across resumes: a live bar, or a plain line now and then.

Owns what the line looks like on a terminal and without one. It must not know where its numbers come from.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any, TextIO

from tqdm import tqdm

from pipelines.counted import counted

TIME_LEFT_UNKNOWN = "time left not known before a row is done"

_REFRESH_INTERVAL_S = 0.5
_LINE_INTERVAL_S = 5.0
_LONGEST_LINE_INTERVAL_S = 60.0


class ProgressLine:
    """``total`` rows, of which earlier runs did ``done``: the time left follows from this run's speed."""

    def __init__(self, total: int, done: int, stream: TextIO | None = None) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._total, self._first = total, done
        self._started = self._last_line = time.monotonic()
        self._bar: tqdm[Any] | None = None
        if self._stream.isatty() and _has_width(self._stream):
            self._bar = tqdm(total=total, initial=done, unit="row", file=self._stream, dynamic_ncols=True)

    def show(
        self,
        done: int,
        *,
        prefill_tokens_per_s: float,
        decode_tokens_per_s: float,
        cache_hit_rate: float,
        num_errors: int,
        num_ranks: int,
        is_last: bool = False,
    ) -> None:
        """Bring the line up to date. The rates are of the moment, on the last line of the whole run."""
        facts = (
            f"prefill {prefill_tokens_per_s:.0f} tok/s, decode {decode_tokens_per_s:.0f} tok/s, "
            f"{cache_hit_rate:.0%} cached, {counted(num_errors, 'error')}, {counted(num_ranks, 'rank')}"
        )
        if done == self._first < self._total and not is_last:
            facts = f"{TIME_LEFT_UNKNOWN}, {facts}"
        now = time.monotonic()
        elapsed = now - self._started
        if self._bar is not None:
            # Drawn by the clock: rates and the time left change also while no row ends.
            if is_last or now - self._last_line >= _REFRESH_INTERVAL_S:
                self._last_line = now
                self._bar.n = done
                self._bar.set_postfix_str(facts)
        elif is_last or now - self._last_line >= _line_interval(elapsed):
            self._last_line = now
            line = tqdm.format_meter(
                done, self._total, elapsed, initial=self._first, unit="row", ncols=0, postfix=facts
            )
            self._stream.write(f"{line}\n")
            self._stream.flush()

    def close(self) -> None:
        """Leave the terminal's line as it is."""
        if self._bar is not None:
            self._bar.close()


def _line_interval(elapsed: float) -> float:
    """Seconds between plain lines: a log file of a long night should stay readable."""
    return min(_LONGEST_LINE_INTERVAL_S, max(_LINE_INTERVAL_S, elapsed / 60))


def _has_width(stream: TextIO) -> bool:
    """Whether a terminal says how wide it is: some that programs make do not, and no bar shows there."""
    try:
        return os.get_terminal_size(stream.fileno()).columns > 0
    except OSError:
        return False

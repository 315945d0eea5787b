"""Signals into stop requests, from the beginning of a run to its end.

Owns the process's handlers of SIGTERM, SIGINT and SIGUSR1 for that time. It must not know what a stop does,
nor Ray, some versions of which put handlers of their own in their place when they start.
"""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any

from pipelines.driver import Driver, StopRequest


class StopSignals:
    """The handlers, while the ``with`` lasts.

    Until ``hold`` a signal interrupts whatever runs with ``KeyboardInterrupt``: nothing was taken or written
    yet. After it, the request is kept in ``requested``, and passed on to the driver once there is one.
    """

    _MEANING = {  # noqa: RUF012 (read only)
        signal.SIGTERM: StopRequest.NOW,
        signal.SIGINT: StopRequest.NOW,
        signal.SIGUSR1: StopRequest.DRAIN,
    }

    def __init__(self) -> None:
        self.requested = StopRequest.NONE
        self._is_holding = False
        self._driver: Driver | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        self._before = {number: signal.getsignal(number) for number in self._MEANING}
        self.install()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def install(self) -> None:
        """Put the handlers in place, again if something else took it."""
        for number in self._MEANING:
            signal.signal(number, self._handle)

    def hold(self) -> None:
        """From here on a stop has to be an orderly one."""
        self._is_holding = True

    def watch(self, driver: Driver) -> None:
        """Pass requests on to ``driver``, one that came before included."""
        self._driver = driver
        driver.request_stop(self.requested)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.requested = max(self.requested, self._MEANING[signal.Signals(number)])
        if not self._is_holding:
            raise KeyboardInterrupt
        if self._driver is not None:
            self._driver.request_stop(self.requested)

"""The three kinds of failure, and no others: a row, a rank, or the job.

This file owns the exception types that cross the engine's public face. It imports nothing.
"""

from __future__ import annotations


class RequestRejected(ValueError):
    """One row cannot be answered; the engine keeps serving the others.

    ``code`` is the machine-readable reason written to the row's ``error`` column, for example
    ``prompt_too_long``, ``empty_prompt``, ``kv_too_small`` or ``bad_sampling_param``.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message

    def __reduce__(self) -> tuple[type[RequestRejected], tuple[str, str]]:
        return (type(self), (self.code, self.message))


class EngineDead(RuntimeError):
    """This rank's engine cannot go on; its replica is replaced and its rows are leased again."""


class PeerLost(EngineDead):
    """It cannot go on only because another rank of its replica does not: that one is to blame."""


class ConfigError(ValueError):
    """The job cannot start: refused with one sentence before anything is taken or written."""

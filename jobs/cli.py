"""The entry points of batch-generate and batch-prefill.

Owns the first moment of a command: its flags are read, and from then on a stop of a run is a clean one. It
must not know what a command does, and imports ``jobs.commands``, which takes a second, only after that.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from jobs.arguments import build_parser
from jobs.exit_codes import EXIT_FAILED, EXIT_REFUSED, EXIT_STOPPED, STOPPED_SENTENCE


def batch_generate(arguments: Sequence[str] | None = None) -> int:
    """Entry point of ``batch-generate``: returns the exit code."""
    parsed = build_parser().parse_args(arguments)
    try:
        if parsed.command == "run":
            with _leaving_when_told():
                code = _execute(parsed)
        else:
            code = _execute(parsed)
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever reads our output, ``head`` say, has seen enough; Python's last flush must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    return code


def batch_prefill(arguments: Sequence[str] | None = None) -> int:
    """Entry point of ``batch-prefill``, which has no command yet."""
    parser = argparse.ArgumentParser(
        prog="batch-prefill", description="Prefill whole corpora. This command comes with a later version."
    )
    parser.parse_known_args(arguments)
    print(
        "batch-prefill: this version has no prefill jobs; they come with a later one. "
        "Use batch-generate to run prompts.",
        file=sys.stderr,
    )
    return EXIT_REFUSED


def _execute(parsed: argparse.Namespace) -> int:
    from jobs.commands import execute

    return execute(parsed)


@contextmanager
def _leaving_when_told() -> Iterator[None]:
    """Until ``jobs.stop_signals`` takes over a signal ends the process at once: nothing has begun."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    before = {number: signal.signal(number, _leave) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave(number: int, frame: FrameType | None) -> None:
    os.write(2, f"{STOPPED_SENTENCE}\n".encode())  # what it interrupts may be in the middle of a write
    os._exit(EXIT_STOPPED)


if __name__ == "__main__":
    sys.exit(batch_generate())

"""What benchmarks have in common before they measure: numbers, the GPUs they need, a folder to write into.

It knows nothing of what is measured.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import torch


def positive(text: str) -> int:
    """An option's number, 1 or more."""
    if not text.strip().isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 on")
    return int(text)


def positives(text: str) -> list[int]:
    """An option's numbers with commas between them, each 1 or more."""
    return [positive(part) for part in text.split(",")]


def need_gpus(parser: argparse.ArgumentParser, number: int, what: str = "this") -> None:
    """Leave in a sentence where there are not so many."""
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found < number:
        needed = "a GPU" if number == 1 else f"{number} GPUs"
        parser.error(f"{what} needs {needed}, and torch finds {found or 'none'} on this machine")


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """A temporary folder that is deleted at the end, after SIGTERM too."""
    with tempfile.TemporaryDirectory() as name:

        def leave(number: int, frame: FrameType | None) -> None:
            # Not by an exception: what is interrupted may be a library that swallows it and goes on.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            shutil.rmtree(name, ignore_errors=True)
            os._exit(128 + number)

        before = signal.signal(signal.SIGTERM, leave)
        try:
            yield Path(name)
        finally:
            signal.signal(signal.SIGTERM, before)

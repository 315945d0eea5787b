"""A job that another takes the folder of: set aside until its successor can run, then deleted, else put back.

Owns the folder in which it lies meanwhile, beside the state of its successor and hidden from a plain read. It
must not know why a successor is refused.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from engine.errors import ConfigError
from pipelines.manifest import DriverLock, OutputFolder, check_folder, is_driver_alive, load_plan, occupied
from pipelines.plan import Plan

REPLACED_FOLDER = "_overnight_replaced"


def check_replaceable(folder: OutputFolder, plan: Plan) -> str | None:
    """What differs between the job that ``folder`` holds and ``plan``; None if it holds none, or this one.

    Raises ``ConfigError`` for what ``check_folder`` refuses, while a driver is at work on the other job, and
    where that one's parts are in a store, which are never replaced.
    """
    difference = check_folder(folder, plan, may_differ=True)
    if difference is None:
        return None
    url = load_plan(folder).parts.url
    if url is not None:
        raise ConfigError(f"the parts under {url!r} are never replaced: choose another output.path")
    if is_driver_alive(folder):
        raise occupied(folder)
    return difference


@contextlib.contextmanager
def set_aside(folder: OutputFolder) -> Iterator[Callable[[], None]]:
    """Put the folder's job out of the way of another. What is yielded deletes it, once it is called.

    If it was not called the job is put back at the end, and what its successor wrote is deleted. Raises
    ``ConfigError`` while a driver is at work on it.
    """
    aside = _aside(folder)
    with DriverLock(folder):  # which moves along: whoever finds the job there sees that it is in use
        names = list(load_plan(folder).output_names())
        os.rename(folder.state, aside.state)
        try:
            _move(names, folder.path, _parts(aside))
            yield lambda: _delete(aside)
        finally:
            if aside.plan_file.is_file():
                _put_back(folder, aside)


def restore_job(folder: OutputFolder) -> None:
    """Put back what a run had set aside that was killed before its job could run, if there is any.

    Raises ``ConfigError`` while that run is at work.
    """
    aside = _aside(folder)
    if not aside.state.is_dir():
        return
    with DriverLock(aside):
        if aside.plan_file.is_file():
            _put_back(folder, aside)
        else:
            _delete(aside)


def _aside(folder: OutputFolder) -> OutputFolder:
    return OutputFolder(folder.path, REPLACED_FOLDER)


def _parts(aside: OutputFolder) -> Path:
    return aside.state / "parts"


def _delete(aside: OutputFolder) -> None:
    # The plan goes first: without it nothing is put back, and the next run deletes the rest.
    aside.plan_file.unlink(missing_ok=True)
    shutil.rmtree(aside.state, ignore_errors=True)


def _put_back(folder: OutputFolder, aside: OutputFolder) -> None:
    """Killed in the middle, it is done again: the job counts as set aside until all of it is in its place."""
    if folder.state.exists():
        with DriverLock(folder):
            if folder.plan_file.is_file():
                for name in load_plan(folder).output_names():  # parts of empty shards need no rank
                    folder.part_file(name).unlink(missing_ok=True)
            shutil.rmtree(folder.state)
    _move(load_plan(aside).output_names(), _parts(aside), folder.path)
    shutil.rmtree(_parts(aside), ignore_errors=True)
    os.rename(aside.state, folder.state)


def _move(names: Iterable[str], source: Path, target: Path) -> None:
    for name in names:
        if (source / name).exists():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            os.rename(source / name, target / name)

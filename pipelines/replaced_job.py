"""A job that another takes the folder of: set aside until its successor can run, then deleted, else put back.

Owns the folder in which it lies meanwhile, beside the state of its successor and hidden from a plain read. It
must not know why a successor is refused.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from engine.errors import ConfigError
from pipelines.manifest import DriverLock, OutputFolder, check_folder, is_driver_alive, load_plan, occupied
from pipelines.plan import Plan, describe_difference

logger = logging.getLogger(__name__)

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
def set_aside(folder: OutputFolder, plan: Plan, difference: str | None) -> Iterator[Callable[[], None]]:
    """Put the folder's job, which has that ``difference``, out of the way of ``plan``; None: there is none.

    What is yielded deletes it for good. If that was not called, the job is put back at the end, and what its
    successor wrote is deleted. Raises ``ConfigError`` while a driver is at work on it, and where the folder
    holds another job by now than the one that was found to differ.
    """
    if difference is None:
        yield lambda: None
        return
    aside = OutputFolder(folder.path, REPLACED_FOLDER)

    def delete() -> None:
        if aside.plan_file.is_file():
            _delete(aside)
            logger.warning("deleted the job that %s held: %s", folder.path, difference)

    with DriverLock(folder):  # which moves along: whoever finds the job there sees that it is in use
        held = load_plan(folder)
        if describe_difference(held, plan) != difference:
            raise ConfigError(
                f"output folder {str(folder.path)!r} holds another job than when this run began: run it again"
            )
        parts = _parts(folder, aside, held)
        os.rename(folder.state, aside.state)
        try:
            _move(parts)
            yield delete
        finally:
            if aside.plan_file.is_file():
                _put_back(folder, aside)


def restore_job(folder: OutputFolder) -> None:
    """Put back what a run had set aside that was killed before its job could run, if there is any.

    Raises ``ConfigError`` while that run is at work.
    """
    aside = OutputFolder(folder.path, REPLACED_FOLDER)
    if not aside.state.is_dir():
        return
    with DriverLock(aside):
        if aside.plan_file.is_file():
            _put_back(folder, aside)
        else:
            _delete(aside)


def _delete(aside: OutputFolder) -> None:
    # The plan goes first: without it nothing is put back, and the next run deletes the rest.
    aside.plan_file.unlink(missing_ok=True)
    shutil.rmtree(aside.state, ignore_errors=True)


def _put_back(folder: OutputFolder, aside: OutputFolder) -> None:
    """Killed in the middle, it is done again: the job counts as set aside until all of it is in its place."""
    parts = _parts(folder, aside, load_plan(aside))
    if folder.state.exists():
        with DriverLock(folder):
            if folder.plan_file.is_file():
                for name in load_plan(folder).output_names():  # parts of empty shards need no rank
                    folder.part_file(name).unlink(missing_ok=True)
            shutil.rmtree(folder.state)
    _move((kept, part) for part, kept in parts)
    shutil.rmtree(aside.state / "parts", ignore_errors=True)
    os.rename(aside.state, folder.state)


def _parts(folder: OutputFolder, aside: OutputFolder, plan: Plan) -> list[tuple[Path, Path]]:
    """Where each part of ``plan`` lies in the folder, and aside."""
    kept = OutputFolder(aside.state / "parts")
    return [(folder.part_file(name), kept.part_file(name)) for name in plan.output_names()]


def _move(paths: Iterable[tuple[Path, Path]]) -> None:
    for source, target in paths:
        if source.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            os.rename(source, target)

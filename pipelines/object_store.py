"""Objects that are written once: conditional PUT, where a store offers it.

Owns the promise that of two writers of one name one wins, and its test before a job begins. It must not
know parts or plans.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine.errors import ConfigError
from pipelines.source_location import open_file_system

_CONDITIONAL = ("s3://", "s3a://")
"""Stores whose client sends a PUT with If-None-Match."""


def check_store(url: str) -> None:
    """Refuse with ``ConfigError`` a store that cannot be written, or that lets a second writer win."""
    if not url.startswith(_CONDITIONAL):
        raise ConfigError(
            f"output.path {url!r}: output goes to a folder or to a store with conditional PUT (s3://), where "
            "of two attempts at a part one wins"
        )
    file_system, path = open_file_system(f"{url}/_overnight-probe-{uuid.uuid4().hex}")
    try:
        file_system.pipe_file(path, b"1", mode="create")
        try:
            file_system.pipe_file(path, b"2", mode="create")
            has_won_twice = True
        except FileExistsError:
            has_won_twice = False
        file_system.rm_file(path)
    except Exception as error:  # each store has errors of its own: no such bucket, no credentials, no route
        raise ConfigError(
            f"output.path {url!r} cannot be written: {type(error).__name__}: {error}"
        ) from error
    if has_won_twice:
        raise ConfigError(
            f"output.path {url!r}: this store ignores If-None-Match: two attempts at a part could both win; "
            "write to a folder instead"
        )


def list_names(url: str) -> Iterator[str]:
    """Names of the objects under ``url``, relative to it."""
    file_system, root = open_file_system(url)
    for path in file_system.find(root):
        yield str(path).removeprefix(root.rstrip("/") + "/")


def has_object(url: str) -> bool:
    """Whether there is an object of that name now."""
    file_system, path = open_file_system(url)
    file_system.invalidate_cache()
    return bool(file_system.exists(path))


def put_once(url: str, source: Path, owner: str) -> None:
    """Write a file to ``url`` unless its content is there already, under the same ``owner``.

    Raises ``ConfigError`` when something else is there.
    """
    file_system, path = open_file_system(url)
    label = {"overnight-owner": owner, "overnight-digest": _digest(source)}
    try:
        file_system.put_file(str(source), path, mode="create", Metadata=label)
    except FileExistsError as error:
        found: dict[str, Any] = file_system.metadata(path, refresh=True)
        if {key: found.get(key.replace("-", "_")) or found.get(key) for key in label} != label:
            raise ConfigError(f"{url!r} holds something that this attempt did not write") from error


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()

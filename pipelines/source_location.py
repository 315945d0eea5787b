"""Where input files lie: a local path or a URL becomes a root and the names under it, which can be opened.

Owns folders, globs and file systems; it must not know what is in a file.
"""

from __future__ import annotations

import glob
import io
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import IO, Any, cast

from engine.errors import ConfigError

_BLOCK_BYTES = 4 << 20
"""What is fetched at once of a remote file. A few dozen such blocks are kept of each open file."""

_BUFFER_BYTES = 1 << 16


@dataclass(frozen=True)
class Location:
    """A folder, local or behind a URL, and its files by names relative to it, with ``/``."""

    root: str

    @property
    def is_local(self) -> bool:
        """Whether the root is a path of this machine."""
        return not is_url(self.root)

    @cached_property
    def _file_system(self) -> tuple[Any, str]:
        return open_file_system(self.root)

    def describe(self, name: str) -> str:
        """The path or URL of a file, for people and for libraries."""
        return f"{self.root.rstrip('/')}/{name}"

    def open(self, name: str) -> IO[bytes]:
        """Open a file for reading. Raises ``OSError``."""
        if self.is_local:
            return open(os.path.join(self.root, name), "rb")
        file_system, root = self._file_system
        path = f"{root.rstrip('/')}/{name}"
        raw = file_system.open(path, "rb", block_size=_BLOCK_BYTES, cache_type="blockcache")
        # Some stores' files lack parts of the protocol, and read lines slowly.
        return io.BufferedReader(cast(io.RawIOBase, raw), _BUFFER_BYTES)


def is_url(path: str) -> bool:
    """Whether a path names its file system; ``file://`` counts too."""
    return "://" in path


def open_file_system(url: str) -> tuple[Any, str]:
    """A URL's file system and the path in it. Raises ``ConfigError`` for one that cannot be had here."""
    # Imported here: most jobs read local files.
    from fsspec.core import url_to_fs

    try:
        file_system, path = url_to_fs(url)
    except (ImportError, ValueError) as error:
        protocol = url.partition("://")[0]
        hint = "; install overnight[s3]" if protocol in ("s3", "s3a") else ""
        raise ConfigError(f"{url!r} cannot be opened: {error}{hint}") from error
    return file_system, path


def find_files(
    path: str, suffixes: Collection[str], *, exclude: str | None = None
) -> tuple[Location, tuple[str, ...]]:
    """Resolve a file, a folder (its files with one of ``suffixes``, at any depth) or a glob, in fixed order.

    Files under the folder ``exclude`` are left out. Raises ``ConfigError`` when a URL cannot be listed.
    """
    if path.startswith("file://"):
        path = open_file_system(path)[1]
    root, names = _match_url(path, suffixes) if is_url(path) else _match(path, suffixes)
    if exclude is not None and is_url(exclude) == is_url(root):
        outside = (exclude if is_url(exclude) else os.path.abspath(exclude)).rstrip("/") + "/"
        names = [name for name in names if not f"{root.rstrip('/')}/{name}".startswith(outside)]
    return Location(root), tuple(sorted(set(names)))


def _match(path: str, suffixes: Collection[str]) -> tuple[str, list[str]]:
    absolute = Path(path).absolute()
    if absolute.is_file():
        return str(absolute.parent), [absolute.name]
    if absolute.is_dir():
        found = glob.iglob(f"{glob.escape(str(absolute))}/**/*", recursive=True)
        names = [Path(p).relative_to(absolute).as_posix() for p in found if os.path.isfile(p)]
        return str(absolute), [name for name in names if _is_wanted(name, suffixes)]
    fixed = _fixed_parts(absolute.parts)
    root = Path(*fixed)
    if len(fixed) == len(absolute.parts):
        return str(root), []
    matches = (Path(p) for p in glob.iglob(str(absolute), recursive=True) if os.path.isfile(p))
    return str(root), [match.relative_to(root).as_posix() for match in matches]


def _match_url(url: str, suffixes: Collection[str]) -> tuple[str, list[str]]:
    file_system, path = open_file_system(url)
    try:
        if glob.has_magic(path):
            root = str(PurePosixPath(*_fixed_parts(PurePosixPath(path).parts)))
            paths = [p for p in file_system.glob(path) if file_system.isfile(p)]
            wanted = None
        elif file_system.isfile(path):
            root, paths, wanted = str(PurePosixPath(path).parent), [path], None
        else:
            root, paths, wanted = path, list(file_system.find(path)), suffixes
    except Exception as error:  # each store has errors of its own: no such bucket, no credentials, no route
        raise ConfigError(f"input.path {url!r} cannot be listed: {type(error).__name__}: {error}") from error
    names = [str(p).removeprefix(root.rstrip("/") + "/") for p in paths]
    names = [name for name in names if wanted is None or _is_wanted(name, wanted)]
    return str(file_system.unstrip_protocol(root)), names


def _fixed_parts(parts: Sequence[str]) -> list[str]:
    fixed: list[str] = []
    for piece in parts:
        if glob.has_magic(piece):
            break
        fixed.append(piece)
    return fixed


def _is_wanted(name: str, suffixes: Collection[str]) -> bool:
    # Parquet readers skip these names in a folder: "_SUCCESS", "_overnight/", ".cache/".
    is_hidden = any(piece.startswith(("_", ".")) for piece in PurePosixPath(name).parts)
    return not is_hidden and PurePosixPath(name).suffix in suffixes

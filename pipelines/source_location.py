"""Where input files lie: a local path or a URL becomes a root and the names under it, which can be opened.

Owns folders, globs and file systems; it must not know what is in a file.
"""

from __future__ import annotations

import fnmatch
import glob
import io
import logging
import os
import stat
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import IO, Any, cast

from engine.errors import ConfigError

logger = logging.getLogger(__name__)

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

    Files in the folder ``exclude`` or below it are left out. Links are followed; of one file's names the
    first is taken. Raises ``ConfigError`` when something cannot be listed or a link leads nowhere.
    """
    if path.startswith("file://"):
        path = open_file_system(path)[1]
    if not is_url(path):
        folder, found = _match(path, suffixes, None if exclude is None or is_url(exclude) else exclude)
        return Location(folder), found
    root, names = _match_url(path, suffixes)
    if exclude is not None and is_url(exclude):
        outside = exclude.rstrip("/") + "/"
        names = [name for name in names if not f"{root.rstrip('/')}/{name}".startswith(outside)]
    return Location(root), tuple(sorted(set(names)))


def _match(path: str, suffixes: Collection[str], exclude: str | None) -> tuple[str, tuple[str, ...]]:
    absolute = Path(path).absolute()
    outside = None if exclude is None else os.path.realpath(exclude)
    if os.path.isfile(absolute):
        is_outside = _is_within(os.path.realpath(absolute.parent), outside)
        return str(absolute.parent), () if is_outside else (absolute.name,)
    if os.path.isdir(absolute):
        found = _walk(str(absolute), ("**", "*"), _is_hidden, outside)
        return str(absolute), _name_once({n: real for n, real in found.items() if _has_suffix(n, suffixes)})
    fixed = _fixed_parts(absolute.parts)
    root, pieces = str(Path(*fixed)), absolute.parts[len(fixed) :]
    if not pieces or not os.path.isdir(root):
        return root, ()
    return root, _name_once(_walk(root, pieces, lambda name: name.startswith("."), outside))


def _walk(
    root: str, pieces: Sequence[str], is_hidden: Callable[[str], bool], outside: str | None
) -> dict[str, str]:
    """The files under ``root`` that match ``pieces`` of a glob, by name, and where each really lies.

    Of a real folder's several names the first is walked, so that links in a circle end. No wildcard matches
    a hidden name, but where it begins as one. Nothing in ``outside`` is found.
    """
    found: dict[str, str] = {}
    walked: dict[tuple[str, int], str] = {}
    waiting = [("", os.path.realpath(root), 0)]
    while waiting:
        prefix, folder, place = waiting.pop()
        if _is_within(folder, outside):
            continue
        if (folder, place) in walked:
            if (first := walked[folder, place]) != prefix:
                logger.warning("input folder %r is %r by another name: read once", prefix, first or root)
            continue
        walked[folder, place] = prefix
        piece, is_last = pieces[place], place == len(pieces) - 1
        for name in _list(root, prefix, piece, is_hidden):
            real, mode = _resolve(root, prefix + name, os.path.join(folder, name))
            if stat.S_ISREG(mode) and is_last:
                found[prefix + name] = real
            elif stat.S_ISDIR(mode) and (piece == "**" or not is_last):
                waiting.append((f"{prefix}{name}/", real, place if piece == "**" else place + 1))
        if piece == "**" and not is_last:
            waiting.append((prefix, folder, place + 1))
    return found


def _list(root: str, prefix: str, piece: str, is_hidden: Callable[[str], bool]) -> list[str]:
    """The names in a folder that match ``piece``, the last one first."""
    folder = os.path.join(root, prefix.rstrip("/"))
    if not glob.has_magic(piece):
        return [piece] if os.path.lexists(os.path.join(folder, piece)) else []
    try:
        names = os.listdir(folder)
    except OSError as error:
        raise ConfigError(f"input folder {folder!r} cannot be listed: {error.strerror}") from error
    may_be_hidden = is_hidden(piece)
    matching = (name for name in names if piece == "**" or fnmatch.fnmatchcase(name, piece))
    return sorted((name for name in matching if may_be_hidden or not is_hidden(name)), reverse=True)


def _resolve(root: str, name: str, path: str) -> tuple[str, int]:
    """Where ``path`` really lies, whose folder does lie there, and its mode."""
    try:
        mode = os.stat(path).st_mode
        return os.path.realpath(path) if os.path.islink(path) else os.path.normpath(path), mode
    except OSError as error:
        what = "is a link that leads nowhere" if os.path.islink(path) else "cannot be looked at"
        raise ConfigError(f"{os.path.join(root, name)!r} in the input {what}: {error.strerror}") from error


def _name_once(found: Mapping[str, str]) -> tuple[str, ...]:
    """The names in order, of those of one file the first."""
    first: dict[str, str] = {}
    for name in sorted(found):
        if first.setdefault(found[name], name) != name:
            logger.warning("input file %r is %r by another name: read once", name, first[found[name]])
    return tuple(first.values())


def _is_within(folder: str, outside: str | None) -> bool:
    return outside is not None and os.path.commonpath((folder, outside)) == outside


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
    return not any(map(_is_hidden, PurePosixPath(name).parts)) and _has_suffix(name, suffixes)


def _is_hidden(piece: str) -> bool:
    # Parquet readers skip these names in a folder: "_SUCCESS", "_overnight/", ".cache/".
    return piece.startswith(("_", "."))


def _has_suffix(name: str, suffixes: Collection[str]) -> bool:
    return suffix_of(name) in suffixes


def suffix_of(name: str) -> str:
    """What says of which kind a file is: ``A.CSV`` is of the same as ``a.csv``."""
    return PurePosixPath(name).suffix.lower()

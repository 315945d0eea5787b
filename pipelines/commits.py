"""What is committed: a part's commit record, in its Parquet footer or, where a part has none, beside it.

Owns the record and when a shard counts as published; it must not know how rows are read or put together.

A footer is published with the rows in one link. Otherwise the record is linked first and names the finished
files of its attempt: from then on that attempt's files, and no other's, become the shard's.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from engine.errors import ConfigError
from pipelines.manifest import (
    OutputFolder,
    Tally,
    load_plan,
    replace_durably,
    sync_folder,
    try_link,
    write_durably,
)
from pipelines.object_store import check_store, has_object, list_names, put_once
from pipelines.plan import Plan

COMMIT_KEY = b"overnight"
"""Where a part's Parquet footer keeps its commit record: with the rows, in one atomic publish."""


def is_in_footer(plan: Plan) -> bool:
    """Whether a part holds its own commit record."""
    return plan.parts.format == "parquet" and plan.parts.url is None


def commit_metadata(plan: Plan, shard_index: int, tally: Tally) -> dict[bytes, bytes]:
    """A part's commit record, for its Parquet footer."""
    record = {"fingerprint": plan.fingerprint, "shard": shard_index, "tally": asdict(tally)}
    return {COMMIT_KEY: json.dumps(record).encode()}


def try_read_commit(folder: OutputFolder, plan: Plan, shard_index: int) -> Tally | None:
    """The tally of a published part; None when the shard is not published.

    Raises ``ConfigError`` when the part's name is taken by a file that this plan did not write.
    """
    if is_in_footer(plan):
        return _try_read_footer(folder, plan, shard_index)
    record = _try_read_record(folder, plan, shard_index)
    if record is None or not record.is_published:
        return None
    if plan.parts.url is None and not all(folder.part_file(name).exists() for name in record.files):
        return None
    return record.tally


def _try_read_footer(folder: OutputFolder, plan: Plan, shard_index: int) -> Tally | None:
    path = folder.part_file(plan.part_name(shard_index))
    try:
        metadata = pq.read_metadata(path).metadata or {}
    except FileNotFoundError:
        return None
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(f"{str(path)!r} cannot be read: {error}") from error
    record = json.loads(metadata.get(COMMIT_KEY, b"{}"))
    if record.get("fingerprint") != plan.fingerprint or record.get("shard") != shard_index:
        raise ConfigError(f"{str(path)!r} was not written by this job")
    return Tally(**record["tally"])


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitRecord:
    """Which finished files become a shard's: final name to the name of the temporary file."""

    fingerprint: str
    tally: Tally
    files: Mapping[str, str]
    is_published: bool = False

    def to_bytes(self) -> bytes:
        """The record as its file holds it."""
        return json.dumps(asdict(self)).encode()


def _try_read_record(folder: OutputFolder, plan: Plan, shard_index: int) -> CommitRecord | None:
    try:
        tree: dict[str, Any] = json.loads(folder.commit_file(shard_index).read_bytes())
    except FileNotFoundError:
        return None
    record = CommitRecord(**{**tree, "tally": Tally(**tree["tally"])})
    if record.fingerprint != plan.fingerprint:
        raise ConfigError(f"{str(folder.commit_file(shard_index))!r} was not written by this job")
    strange = record.files.keys() - {plan.part_name(shard_index), plan.errors_name(shard_index)}
    if strange:
        raise ConfigError(f"{str(folder.commit_file(shard_index))!r} names {min(strange)!r}, no part of it")
    return record


def publish_files(
    folder: OutputFolder, plan: Plan, shard_index: int, tally: Tally, files: Mapping[str, str]
) -> Tally:
    """Commit to an attempt's finished ``files`` unless another attempt was first; give them their names.

    ``files`` maps final names to names in the temporary folder. Returns the committed attempt's tally.
    """
    mine = CommitRecord(fingerprint=plan.fingerprint, tally=tally, files=files)
    path = folder.commit_file(shard_index)
    attempt = folder.temporary / f"{path.name}.{next(iter(files.values()))}"
    write_durably(attempt, mine.to_bytes())
    is_anew = False
    if not try_link(attempt, path):
        found = _try_read_record(folder, plan, shard_index)
        assert found is not None, f"{path} vanished"
        is_anew = not all(_is_there(folder, plan, *names) for names in found.files.items())
        if is_anew:
            # That attempt's files were lost before they had their names: it cannot give them any more.
            replace_durably(folder, path, mine.to_bytes())
        else:
            mine = found
    for name, temporary in mine.files.items():
        _give_name(folder, plan, name, temporary, is_anew=is_anew)
    published = CommitRecord(
        fingerprint=mine.fingerprint, tally=mine.tally, files=mine.files, is_published=True
    )
    replace_durably(folder, path, published.to_bytes())
    for temporary in {*files.values(), *mine.files.values()}:
        folder.temporary_file(temporary).unlink(missing_ok=True)
    return mine.tally


def check_destination(folder: OutputFolder, plan: Plan) -> None:
    """Refuse a store that cannot hold parts safely, or that holds something else under the parts' URL."""
    url = plan.parts.url
    if url is None:
        return
    check_store(url)
    is_begun = folder.plan_file.is_file() and load_plan(folder).fingerprint == plan.fingerprint
    ours = set(plan.output_names()) if is_begun else set()
    for name in list_names(url):
        is_hidden = any(piece.startswith((".", "_")) for piece in name.split("/"))
        if not is_hidden and name not in ours:
            raise ConfigError(f"output.path {url!r} holds {name!r}, which is not this job's")


def _is_there(folder: OutputFolder, plan: Plan, name: str, temporary: str) -> bool:
    if folder.temporary_file(temporary).exists():
        return True
    if plan.parts.url is not None:
        return has_object(f"{plan.parts.url}/{name}")
    return folder.part_file(name).exists()


def _give_name(folder: OutputFolder, plan: Plan, name: str, temporary: str, *, is_anew: bool) -> None:
    source = folder.temporary_file(temporary)
    if plan.parts.url is not None:
        url = f"{plan.parts.url}/{name}"
        if source.exists():
            put_once(url, source, plan.fingerprint)
        elif not has_object(url):
            # A newer run began by removing it. A store's parts are believed: this one must not be told of.
            raise FileNotFoundError(f"{str(source)!r} is gone, and was not yet at {url!r}")
        return
    final = folder.part_file(name)
    final.parent.mkdir(parents=True, exist_ok=True)
    if is_anew:
        os.replace(source, final)
        sync_folder(final.parent)
    elif source.exists() and not final.exists():
        try_link(source, final)

"""The plan: what a job is, told apart from every other job. Fixed by the first run for ever.

Owns the fingerprint of inputs, settings and columns, and the words for a difference. It must not know
where a plan is kept, nor who works on it.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import PurePosixPath
from typing import Any, Literal

import pyarrow as pa

from engine.errors import ConfigError
from pipelines.schema import ColumnContract
from pipelines.source import InputFile, InputSet, Shard, SourceKind, plan_shards

PartFormat = Literal["parquet", "jsonl", "openai_batch"]
PartLayout = Literal["shards", "mirror"]

_KEPT_AS_HASHES = {
    "model.path": "the model's files are not the same",
    "chat.template": "the chat template is not the same",
}
"""Settings that name files and are kept as hashes of their content, and what is said when these differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartOptions:
    """How parts are written.

    ``layout``: one part a shard, or one an input file, under its name. ``row_group_rows`` is the size of a
    Parquet part's row groups. ``url`` is where parts go; None: into the output folder.
    """

    format: PartFormat = "parquet"
    layout: PartLayout = "shards"
    row_group_rows: int = 10_000
    url: str | None = None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the job is: its inputs, the settings that change answers, its columns. Never changes.

    ``settings`` maps dotted names to JSON values, what follows from others after these. ``places`` says of
    those that are hashes of files where these lie: for a reader, and no part of what the job is.
    """

    root: str
    kind: SourceKind
    files: tuple[InputFile, ...]
    rows_per_shard: int
    settings: Mapping[str, Any]
    contract: ColumnContract
    parts: PartOptions = PartOptions()
    places: Mapping[str, str] = field(default_factory=dict, compare=False)

    @cached_property
    def shards(self) -> tuple[Shard, ...]:
        """The job's shards in part order."""
        if self.parts.layout == "mirror":
            return plan_shards(self.files, max((file.num_rows for file in self.files), default=0) or 1)
        return plan_shards(self.files, self.rows_per_shard)

    def part_name(self, shard_index: int) -> str:
        """The name of a shard's one part, below where parts lie, with ``/``."""
        suffix = ".parquet" if self.parts.format == "parquet" else ".jsonl"
        if self.parts.layout == "mirror":
            path = self.shards[shard_index].path
            return path if path.endswith(suffix) else path + suffix
        return f"part-{shard_index:05d}-of-{len(self.shards):05d}{suffix}"

    def errors_name(self, shard_index: int) -> str:
        """The name of the file with a shard's failed rows, where the format keeps them apart."""
        name = PurePosixPath(self.part_name(shard_index))
        if self.parts.layout == "mirror":
            return str(name.with_suffix(".errors.jsonl"))
        return str(name.with_name(name.name.replace("part-", "errors-", 1)))

    def output_names(self) -> Iterator[str]:
        """Every name that the job may give to a file of its output."""
        for shard in self.shards:
            yield self.part_name(shard.index)
            if self.parts.format == "openai_batch":
                yield self.errors_name(shard.index)

    @property
    def num_rows(self) -> int:
        """All rows of the input."""
        return sum(file.num_rows for file in self.files)

    @cached_property
    def fingerprint(self) -> str:
        """Equal for equal plans: what binds journals and parts to this one."""
        facts = [
            [asdict(file) for file in self.files],
            self.rows_per_shard,
            dict(self.settings),
            self.contract.to_json(),
            asdict(self.parts),
        ]
        return hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=16).hexdigest()

    def to_json(self) -> str:
        """The plan as the text of ``plan.json``."""
        contract = self.contract
        return json.dumps(
            {
                "version": 1,
                "fingerprint": self.fingerprint,
                "root": self.root,
                "kind": self.kind,
                "rows_per_shard": self.rows_per_shard,
                "settings": dict(self.settings),
                "places": dict(self.places),
                "parts": asdict(self.parts),
                "columns": {
                    "passed": _schema_to_text(contract.passed),
                    "answered": _schema_to_text(contract.answered),
                    "prefix": contract.prefix,
                    "prompt_column": contract.prompt_column,
                    "render_columns": list(contract.render_columns),
                    "is_list": contract.is_list,
                },
                "files": [asdict(file) for file in self.files],
            },
            indent=1,
        )

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan that ``to_json`` wrote."""
        tree = json.loads(text)
        columns = tree["columns"]
        return cls(
            root=tree["root"],
            kind=tree["kind"],
            files=tuple(InputFile(**file) for file in tree["files"]),
            rows_per_shard=tree["rows_per_shard"],
            settings=tree["settings"],
            places=tree.get("places", {}),  # plans of earlier versions do not say it
            parts=PartOptions(**tree["parts"]),
            contract=ColumnContract(
                passed=_schema_from_text(columns["passed"]),
                answered=_schema_from_text(columns["answered"]),
                prefix=columns["prefix"],
                prompt_column=columns["prompt_column"],
                render_columns=tuple(columns["render_columns"]),
                is_list=columns["is_list"],
            ),
        )


def slice_of_shards(num_shards: int, index: int, count: int) -> range:
    """The shards of slice ``index`` (from 0) of ``count``: neighbours, so that one lock holds them."""
    return range(num_shards * index // count, num_shards * (index + 1) // count)


def _schema_to_text(schema: pa.Schema) -> str:
    return base64.b64encode(schema.serialize().to_pybytes()).decode()


def _schema_from_text(text: str) -> pa.Schema:
    return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(text)))


def build_plan(
    found: InputSet,
    contract: ColumnContract,
    *,
    rows_per_shard: int,
    settings: Mapping[str, Any],
    parts: PartOptions = PartOptions(),
    places: Mapping[str, str] | None = None,
) -> Plan:
    """The plan of a job over ``found``. Raises ``ConfigError`` if two parts would have one name."""
    # Once through JSON, so that a plan compares equal to itself read back (tuples become lists).
    plain = json.loads(json.dumps(dict(settings)))
    plan = Plan(
        root=found.root,
        kind=found.kind,
        files=found.files,
        rows_per_shard=rows_per_shard,
        settings=plain,
        contract=contract,
        parts=parts,
        places=places or {},
    )
    repeated = [name for name, count in Counter(plan.output_names()).items() if count > 1]
    if repeated:
        raise ConfigError(f"output.layout {parts.layout} gives the name {repeated[0]!r} to two files")
    return plan


def describe_difference(old: Plan, new: Plan) -> str | None:
    """The first thing in which ``new`` is another job than ``old``, in words; None when it is the same."""
    for name in dict.fromkeys([*new.settings, *old.settings]):
        if old.settings.get(name) != new.settings.get(name):
            return _describe_setting(name, old, new)
    if old.rows_per_shard != new.rows_per_shard:
        return f"input.rows_per_shard was {old.rows_per_shard} and is now {new.rows_per_shard}"
    for name in ("format", "layout", "row_group_rows"):
        before, after = getattr(old.parts, name), getattr(new.parts, name)
        if before != after:
            return f"output.{name} was {before!r} and is now {after!r}"
    if old.parts.url != new.parts.url:
        return f"output.path was {old.parts.url!r} and is now {new.parts.url!r}"
    before_files = {file.path: file for file in old.files}
    after_files = {file.path: file for file in new.files}
    for path in sorted({*before_files, *after_files}):
        if path not in after_files:
            return f"input file {path!r} is gone"
        if path not in before_files:
            return f"input file {path!r} is new"
        for name, what in (
            ("num_rows", "rows"),
            ("num_bytes", "bytes"),
            ("footer", "the hash of its footer" if old.kind == "parquet" else "the hash of its content"),
        ):
            a, b = getattr(before_files[path], name), getattr(after_files[path], name)
            if a != b:
                return f"input file {path!r} changed: {what} was {a} and is now {b}"
    return None if old.fingerprint == new.fingerprint else "the columns of its output differ"


def _describe_setting(name: str, old: Plan, new: Plan) -> str:
    if name not in _KEPT_AS_HASHES:
        before, after = old.settings.get(name), new.settings.get(name)
        return f"{name} was {json.dumps(before)} and is now {json.dumps(after)}"
    before, after = old.places.get(name), new.places.get(name)
    is_known = before is not None or old.settings.get(name) is None
    was = f"was {json.dumps(before)} and is now" if is_known and before != after else "is"
    return f"{_KEPT_AS_HASHES[name]}: {name} {was} {json.dumps(after)}"

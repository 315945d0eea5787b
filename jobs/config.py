"""JobConfig: everything one job is told, read from YAML and flags and checked before anything starts.

Owns names, defaults and the messages for mistakes in them. It must not look at inputs, outputs or devices,
and takes the fields of ``sampling`` and ``engine`` from the engine's own types, so that they cannot drift.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from engine import ConfigError, EngineConfig, SamplingParams
from pipelines.plan import PartFormat, PartLayout
from pipelines.source import FileFormat

DERIVED_KEYS = {"engine.model": "model.path", "engine.seed": "sampling.seed"}
"""Engine fields that a job sets elsewhere, and where."""


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, protected_namespaces=())


class ModelSection(_Section):
    """``path``: the folder with config.json, tokenizer.json and the safetensors files."""

    path: str = Field(min_length=1)


class InputSection(_Section):
    """``path``: a file, a folder, a glob, a URL of these, or ``hf://NAME:SPLIT``.

    ``format`` None goes by the files' names. ``rows_per_shard`` rows become one output file. A file that
    lacks a column which another has is refused, or has nulls there with ``missing_columns: fill``.
    """

    path: str = Field(min_length=1)
    format: FileFormat | None = None
    rows_per_shard: int = Field(default=1000, ge=1)
    missing_columns: Literal["refuse", "fill"] = "refuse"


class ChatSection(_Section):
    """How ``messages`` become text.

    The defaults are those of the public server of this model, thinking on with effort high, so that a
    batch answers as the server does; ``thinking: false`` asks for plain chat. ``template`` is a Jinja
    file that replaces the model's own encoding.
    """

    thinking: bool = True
    reasoning_effort: Literal["low", "high", "max"] | Annotated[int, Field(ge=1, le=100)] = "high"
    drop_thinking: bool = True
    template: str | None = None


class OutputSection(_Section):
    """``path``: a folder, or a URL of a store, with ``state_dir`` for what is no output then.

    ``format`` None is Parquet, and for API requests their own. ``layout`` is one file a shard or one an
    input file. ``columns`` of the input pass through; ``prefix`` goes before the names of those we add.

    ``max_error_rate`` is judged when every shard is committed, 1.0 never fails a job; more than
    ``max_errors`` error rows stop it at once. ``split_reasoning`` and ``prompt_token_ids`` add columns.
    """

    path: str = Field(min_length=1)
    state_dir: str | None = None
    format: PartFormat | None = None
    layout: PartLayout = "shards"
    row_group_rows: int = Field(default=10_000, ge=1, le=2**31 - 1)
    columns: Literal["all", "none"] | tuple[str, ...] = "all"
    prefix: str = ""
    max_error_rate: float = Field(default=0.05, ge=0.0, le=1.0)
    max_errors: int | None = Field(default=None, ge=0)
    split_reasoning: bool = False
    prompt_token_ids: bool = False


_LEAST_STALL_OF_REPLICA_S = 30.0


class ClusterSection(_Section):
    """``num_ranks`` 0: one a GPU, or one CPU rank. ``address`` None: RAY_ADDRESS, else a Ray of our own.

    With ``max_ranks`` instead, ranks come and go with the cluster's nodes: up to so many. The job begins with
    ``min_ranks`` (1), and stops cleanly when fewer have had a place for ``place_timeout_s``.
    ``ranks_per_replica`` ranks are a replica: they hold the routed experts once between them, start and end
    together, and are on one node unless ``replica_spans_nodes``. All numbers of ranks are multiples of it.
    A rank whose step loop stands still for ``stall_timeout_s`` is ended and replaced.
    ``cost_per_rank_hour``: what one rank (a GPU, or a CPU rank) costs, in any currency; for the report.
    """

    num_ranks: int = Field(default=0, ge=0, le=100_000)
    min_ranks: int | None = Field(default=None, ge=1)
    max_ranks: int | None = Field(default=None, ge=1, le=100_000)
    ranks_per_replica: int = Field(default=1, ge=1)
    replica_spans_nodes: bool = False
    place_timeout_s: float = Field(default=1800.0, gt=0.0)
    address: str | None = None
    cost_per_rank_hour: float | None = Field(default=None, ge=0.0)
    stall_timeout_s: float = Field(default=900.0, gt=0.0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _check_ranks(self) -> ClusterSection:
        if self.max_ranks and self.num_ranks:
            raise ValueError("num_ranks is a fixed number, max_ranks one that may grow: give one of them")
        most = self.max_ranks or self.num_ranks
        if most and (self.min_ranks or 1) > most:
            raise ValueError(f"min_ranks is {self.min_ranks}, more than the {most} ranks at most")
        for name in ("num_ranks", "min_ranks", "max_ranks"):
            number = getattr(self, name) or 0
            if number % self.ranks_per_replica:
                raise ValueError(
                    f"{name} is {number}, no multiple of ranks_per_replica, {self.ranks_per_replica}"
                )
        if self.ranks_per_replica > 1 and self.stall_timeout_s < _LEAST_STALL_OF_REPLICA_S:
            # Ranks that wait for one that stands still have to say so before they count as standing still.
            raise ValueError(
                f"stall_timeout_s is {self.stall_timeout_s:g}, and for replicas of several ranks at least "
                f"{_LEAST_STALL_OF_REPLICA_S:g} is needed"
            )
        return self


class JobConfig(_Section):
    """One job. ``engine.model`` is ``model.path``; ``engine.seed``, the job's, is ``sampling.seed`` or 0."""

    model: ModelSection
    input: InputSection
    chat: ChatSection = ChatSection()
    output: OutputSection
    sampling: SamplingParams = SamplingParams()
    engine: EngineConfig
    cluster: ClusterSection = ClusterSection()


def engine_config(job: JobConfig) -> EngineConfig:
    """What each rank's engine is asked for."""
    return job.engine


def sampling_params(job: JobConfig) -> SamplingParams:
    """How a row is sampled unless its own columns say otherwise."""
    return job.sampling


def load_job(
    path: str | Path | None, overrides: Iterable[str] = (), flags: Mapping[str, object] | None = None
) -> JobConfig:
    """Read and check a job; later sources win: the file, then ``flags``, then ``overrides``.

    ``flags`` maps dotted keys to values (None: not given). ``overrides`` are ``a.b=value`` with the
    value in YAML. Relative paths, also those in the file, are relative to the current directory.
    Raises ``ConfigError`` with one sentence, a clause for each thing that is wrong.
    """
    tree = _read_yaml(Path(path)) if path is not None else {}
    given = [(key, value) for key, value in (flags or {}).items() if value is not None]
    wrong: list[str] = []
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"--set needs section.key=value, got {override!r}")
        given.append((key.strip(), _parse_yaml(text, f"--set {key.strip()}")))
    for key, value in given:
        clause = _set_key(tree, key, value)
        wrong += [] if clause is None else [clause]
    known, unknown = _sort_out_keys(tree)
    wrong += unknown
    for section in ("model", "input", "output"):
        values = known.setdefault(section, {})
        if values.get("path") is None:
            if values == tree.get(section, {}):  # else one of the keys that are wrong may be meant for it
                wrong.append(f"{section}.path is not set: give it in the job file or with --{section}")
            values["path"] = "not set"  # the other values are looked at all the same
    return _validate(known, wrong)


def _validate(tree: dict[str, dict[str, Any]], wrong: list[str]) -> JobConfig:
    """The job of a tree whose keys are known, if nothing was ``wrong`` before and nothing is now."""
    seed = tree.get("sampling", {}).get("seed")
    engine = {**tree.get("engine", {}), "model": tree["model"]["path"], "seed": 0 if seed is None else seed}
    try:
        job = _parse({**tree, "engine": engine})
    except ValidationError as error:
        raise ConfigError("; ".join([*wrong, *_explain(_list_errors(error, tree))])) from error
    if wrong:
        raise ConfigError("; ".join(wrong))
    return job


def _parse(tree: Mapping[str, Any]) -> JobConfig:
    # By way of JSON, whose strict mode takes lists for tuples and mappings for dataclasses.
    return JobConfig.model_validate_json(json.dumps(tree, default=str))


def _list_errors(error: ValidationError, tree: Mapping[str, Mapping[str, Any]]) -> list[ErrorDetails]:
    """All errors of a tree. The engine's own types stop at their first: their fields are tried singly."""
    found: dict[str, list[ErrorDetails]] = {}
    for item in error.errors(include_url=False):
        found.setdefault(str(item["loc"][0]), []).append(item)
    paths = {name: {"path": "any"} for name in ("model", "input", "output")}
    for section in found.keys() & {"sampling", "engine"}:
        singly: list[ErrorDetails] = []
        for name, value in tree.get(section, {}).items():
            alone = {**paths, "engine": {"model": "any"}}
            alone[section] = {**alone.get(section, {}), name: value}
            try:
                _parse(alone)
            except ValidationError as wrong:
                singly += wrong.errors(include_url=False)
        found[section] = singly or found[section]
    return [item for items in found.values() for item in items]


def _explain(errors: Iterable[ErrorDetails]) -> Iterator[str]:
    """One clause for each wrong value; the branches of a union, which share the value, share the clause."""
    wrong: dict[str, list[str]] = {}
    values: dict[str, object] = {}
    valid = set(_valid_keys())
    for item in errors:
        parts = [str(part) for part in item["loc"]]
        key = ".".join(parts[:2]) if ".".join(parts[:2]) in valid else ".".join(parts)
        if key not in DERIVED_KEYS:  # said already, of the key it comes from
            wrong.setdefault(key, []).append(item["msg"].removeprefix("Value error, ").removeprefix("Input "))
            values[key] = item["input"]
    for key, messages in wrong.items():
        if key in valid:
            yield f"{key} {' or '.join(messages)}, got {values[key]!r}"
        else:  # rules of the whole section, which name the field and the value themselves
            yield from (f"{key}: {message}" for message in messages)


def _section_keys() -> dict[str, list[str]]:
    keys: dict[str, list[str]] = {
        name: list(section.model_fields)
        for name, section in (
            ("model", ModelSection),
            ("input", InputSection),
            ("chat", ChatSection),
            ("output", OutputSection),
            ("cluster", ClusterSection),
        )
    }
    keys["sampling"] = [field.name for field in fields(SamplingParams)]
    keys["engine"] = [f.name for f in fields(EngineConfig) if f"engine.{f.name}" not in DERIVED_KEYS]
    return keys


def _valid_keys() -> list[str]:
    return [f"{section}.{name}" for section, names in _section_keys().items() for name in names]


def _sort_out_keys(tree: Mapping[str, Any]) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """The part of a tree that has known keys, and a clause for each other."""
    keys = _section_keys()
    known: dict[str, dict[str, Any]] = {}
    wrong: list[str] = []
    for section, values in tree.items():
        if section not in keys:
            names = [f"{section}.{name}" for name in values] if isinstance(values, Mapping) else []
            wrong += map(_unknown_key, names or [section])
            continue
        if not isinstance(values, Mapping):
            wrong.append(f"{section} must be a mapping with keys {', '.join(keys[section])}, got {values!r}")
            continue
        known[section] = {name: value for name, value in values.items() if name in keys[section]}
        for name in [name for name in values if name not in keys[section]]:
            setter = DERIVED_KEYS.get(f"{section}.{name}")
            if setter is None:
                wrong.append(_unknown_key(f"{section}.{name}"))
            else:
                wrong.append(f"{section}.{name} cannot be set: set {setter} instead")
    return known, wrong


def _unknown_key(key: str) -> str:
    """Name the nearest valid key: in the nearest section, unless another has a name that is near."""
    keys = _section_keys()
    section, _, name = str(key).partition(".")
    near_sections = difflib.get_close_matches(section, keys, n=1, cutoff=0.6)
    if near_sections and not name:
        return f"unknown key {key}: the nearest valid one is {near_sections[0]}"
    siblings = {sibling: f"{near}.{sibling}" for near in near_sections for sibling in keys[near]}
    anywhere = {full.rpartition(".")[2]: full for full in reversed(_valid_keys())}
    for candidates, cutoff in ((siblings, 0.6), (anywhere, 0.6), (siblings, 0.0), (anywhere, 0.0)):
        closest = difflib.get_close_matches(name or section, candidates, n=1, cutoff=cutoff)
        if closest:
            return f"unknown key {key}: the nearest valid one is {candidates[closest[0]]}"
    return f"unknown key {key}: the sections are {', '.join(keys)}"


def _set_key(tree: dict[str, Any], key: str, value: object) -> str | None:
    """Put a value into the tree, or say what is wrong with its key."""
    section, dot, name = key.partition(".")
    if not dot and section in _section_keys():
        return f"--set needs section.key=value, got the whole section {section}"
    if not dot or "." in name:
        return _unknown_key(key)
    values = tree.setdefault(section, {})
    if isinstance(values, dict):  # if not, that is said of the section
        values[name] = value
    return None


class _Loader(yaml.SafeLoader):
    """Safe YAML: 1e-3 is a number (as in YAML 1.2); a key that is repeated, or a list, is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(
                    None, None, "a key must be a word, not a list or a mapping", key_node.start_mark
                )
            if key_node.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key_node.value} is given twice", key_node.start_mark
                )
            seen.add(key_node.value)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+"), list("-+0123456789")
)


def _parse_yaml(text: str, where: str) -> Any:
    try:
        value = yaml.load(text, Loader=_Loader)  # a subclass of SafeLoader
        json.dumps(value, default=str)  # YAML can also say what is no tree, and keys that are no words
    except RecursionError as error:
        raise ConfigError(f"{where} is nested too deeply") from error
    except (yaml.YAMLError, TypeError, ValueError) as error:
        raise ConfigError(f"{where} is not valid YAML: {' '.join(str(error).split())}") from error
    return value


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the job file {path}: {error}") from error
    tree = _parse_yaml(text, str(path))
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} must hold a mapping of sections, got {type(tree).__name__}")
    return {str(section): {} if values is None else values for section, values in tree.items()}

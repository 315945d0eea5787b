"""From a checked JobConfig to the plan that tells the job apart from every other, and the job's own record.

Owns which settings change answers, and the model's fingerprint. It must not know Ray, nor what is done
with a plan.
"""

from __future__ import annotations

import hashlib
import logging
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from engine import ConfigError, check_settings, count_experts
from jobs.config import JobConfig, OutputSection
from jobs.environment import SPEED_ONLY
from jobs.rank import build_job_renderer
from pipelines.manifest import STATE_FOLDER, OutputFolder, replace_durably
from pipelines.plan import PartOptions, Plan, build_plan
from pipelines.replaced_job import REPLACED_FOLDER
from pipelines.schema import build_contract, find_near_misses
from pipelines.source import InputSet, find_input
from pipelines.source_location import is_url

logger = logging.getLogger(__name__)

_NUM_SAMPLES, _SAMPLE_BYTES = 8, 4096  # of each weight file


def with_absolute_paths(job: JobConfig) -> JobConfig:
    """Ranks may run in another directory."""
    model = os.path.abspath(job.model.path)
    template = job.chat.template
    return job.model_copy(
        update={
            "model": job.model.model_copy(update={"path": model}),
            "engine": replace(job.engine, model=model),
            "input": job.input.model_copy(update={"path": _absolute(job.input.path)}),
            "output": _absolute_output(job.output),
            "chat": job.chat.model_copy(
                update={"template": None if template is None else os.path.abspath(template)}
            ),
        }
    )


def _absolute(path: str) -> str:
    if path.startswith("hf://."):
        return f"hf://{os.path.abspath(path.removeprefix('hf://'))}"
    return path if is_url(path) else os.path.abspath(path)


def _absolute_output(output: OutputSection) -> OutputSection:
    path, state_dir = output.path.removeprefix("file://"), output.state_dir
    if is_url(path) and state_dir is None:
        raise ConfigError(
            f"output.path {path!r} is a URL: set output.state_dir to a folder that the driver and all ranks "
            "see, for the plan and the journals"
        )
    if not is_url(path) and state_dir is not None:
        raise ConfigError("output.state_dir is for output to a URL; a folder holds its state itself")
    state_dir = None if state_dir is None else os.path.abspath(state_dir)
    return output.model_copy(update={"path": _absolute(path).rstrip("/") or "/", "state_dir": state_dir})


def output_folder(job: JobConfig) -> OutputFolder:
    """The job's folder: its output's, or where its state lies if the output is a URL."""
    return OutputFolder(Path(job.output.state_dir or job.output.path))


def passed_columns(job: JobConfig) -> tuple[str, ...] | None:
    """The input's columns that pass through; None: all of them."""
    if isinstance(job.output.columns, str):
        return None if job.output.columns == "all" else ()
    return job.output.columns


def record_job(folder: OutputFolder, job: JobConfig) -> None:
    """Keep the job beside its output. The last run's stands: the model may lie elsewhere by then."""
    replace_durably(folder, folder.job_file, job.model_dump_json(indent=1).encode())


def read_recorded_job(folder: OutputFolder, model: str | None = None) -> JobConfig:
    """The job that ``record_job`` kept, with its model at ``model`` if given. Raises ``ConfigError``."""
    try:
        job = JobConfig.model_validate_json(folder.job_file.read_bytes())
    except (FileNotFoundError, ValidationError) as error:
        raise ConfigError(
            f"{str(folder.job_file)!r} does not hold the job as this version knows it: run the job once more"
        ) from error
    path = os.path.abspath(job.model.path if model is None else model)
    if not (Path(path) / "config.json").is_file():
        raise ConfigError(f"{path!r} is not a model folder: name where the model is now with --model")
    return job.model_copy(
        update={
            "model": job.model.model_copy(update={"path": path}),
            "engine": replace(job.engine, model=path),
        }
    )


def plan_job(job: JobConfig) -> Plan:
    """The job's plan, from its inputs as they are. Raises ``ConfigError``; writes nothing."""
    if not (Path(job.model.path) / "config.json").is_file():
        raise ConfigError(f"model.path {job.model.path!r} is not a model folder: it has no config.json")
    check_settings(job.engine)
    _check_replica(job)
    renderer = build_job_renderer(job)
    found = find_input(job.input.path, format=job.input.format, exclude=job.output.path)
    for column, name in find_near_misses(name for schema in found.schemas for name in schema.names):
        logger.warning("input column %r is none of ours and passes through; is %r meant?", column, name)
    contract = build_contract(
        [(file.path, schema) for file, schema in zip(found.files, found.schemas, strict=True)],
        prefix=job.output.prefix,
        num_samples=job.sampling.n,
        has_logprobs=job.sampling.logprobs is not None,
        has_reasoning=job.output.split_reasoning,
        has_prompt_token_ids=job.output.prompt_token_ids,
        columns=passed_columns(job),
        fill_missing=job.input.missing_columns == "fill",
        is_requests=found.kind == "openai_batch",
    )
    renderer.check_column(contract.prompt_column)
    if job.output.split_reasoning:
        renderer.build_splitter()
    return build_plan(
        found,
        contract,
        rows_per_shard=job.input.rows_per_shard,
        settings=answer_settings(job),
        parts=_part_options(job, found),
        places=answer_places(job),
    )


def _check_replica(job: JobConfig) -> None:
    num_ranks = job.cluster.ranks_per_replica
    if num_ranks > 1 and (num_experts := count_experts(job.model.path)) % num_ranks:
        raise ConfigError(
            f"cluster.ranks_per_replica is {num_ranks}, but the model's {num_experts} experts a layer cannot "
            "be split evenly among so many ranks"
        )


def _part_options(job: JobConfig, found: InputSet) -> PartOptions:
    output, is_requests = job.output, found.kind == "openai_batch"
    part_format = output.format or ("openai_batch" if is_requests else "parquet")
    if part_format == "openai_batch":
        if not is_requests:
            raise ConfigError("output.format openai_batch needs input in the format of OpenAI batch requests")
        if output.columns != "all" or output.prefix or output.prompt_token_ids:
            raise ConfigError(
                "output.columns, output.prefix and output.prompt_token_ids have no place in output.format "
                "openai_batch: leave them out, or write parquet or jsonl"
            )
    hidden = (STATE_FOLDER, REPLACED_FOLDER)
    state = [file.path for file in found.files if file.path.split("/")[0] in hidden]
    if output.layout == "mirror" and state:
        raise ConfigError(f"output.layout mirror has no place for {state[0]!r}: the job's state lies there")
    return PartOptions(
        format=part_format,
        layout=output.layout,
        row_group_rows=output.row_group_rows,
        url=output.path if is_url(output.path) else None,
    )


def answer_settings(job: JobConfig) -> dict[str, Any]:
    """The settings that change answers, by dotted name: equal for two runs of one job.

    The first that differs is named: those of ``sampling`` come before the engine's seed, which nobody sets.
    """
    settings: dict[str, Any] = {"model.path": fingerprint_model(Path(job.model.path))}
    settings |= {f"chat.{name}": value for name, value in job.chat.model_dump().items()}
    if job.chat.template is not None:
        settings["chat.template"] = hashlib.blake2b(Path(job.chat.template).read_bytes()).hexdigest()[:32]
    settings |= {f"sampling.{name}": value for name, value in asdict(job.sampling).items()}
    settings["sampling.seed"] = job.sampling.seed or None  # not set is 0
    settings |= {
        f"engine.{name}": value for name, value in asdict(job.engine).items() if name not in SPEED_ONLY
    }
    if job.sampling.max_tokens is None and job.engine.num_kv_blocks:
        settings["engine.num_kv_blocks"] = job.engine.num_kv_blocks  # ends answers that nothing else ends
    settings["input.missing_columns"] = job.input.missing_columns
    for name in ("columns", "prefix", "split_reasoning", "prompt_token_ids"):
        settings[f"output.{name}"] = getattr(job.output, name)
    return settings


def answer_places(job: JobConfig) -> dict[str, str]:
    """Where the files lie that ``answer_settings`` has hashes of."""
    template = job.chat.template
    return {"model.path": job.model.path} | ({} if template is None else {"chat.template": template})


def fingerprint_model(folder: Path) -> str:
    """Tells models apart by their small files' content and their weight files' names, sizes and samples."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(folder.iterdir()):
        if path.suffix in (".json", ".jinja"):
            digest.update(f"{path.name}\0".encode() + path.read_bytes())
        elif path.suffix == ".safetensors":
            size = path.stat().st_size
            digest.update(f"{path.name}\0{size}\0".encode())
            with open(path, "rb") as file:
                # Half a terabyte is not read for this; weights that were trained on differ everywhere.
                for piece in range(_NUM_SAMPLES):
                    file.seek(max(0, size - _SAMPLE_BYTES) * piece // (_NUM_SAMPLES - 1))
                    digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()

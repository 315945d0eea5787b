"""What a job will be, told before it is run: rows, tokens, refusals, memory, time. Needs no GPU.

Owns what is counted and the reasons why a job cannot succeed. It must not know flags or how the facts are
printed, and writes nothing.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

from engine import MemoryEstimate, Request, RequestRejected, count_experts, estimate_memory, needs_gpu
from engine.config import KV_BLOCK_SIZE, most_total_tokens
from jobs.config import ClusterSection, JobConfig, engine_config
from jobs.job_plan import output_folder, plan_job, with_absolute_paths
from jobs.lease_reader import Renderer, read_values
from jobs.rank import build_job_renderer
from pipelines.counted import counted
from pipelines.manifest import check_folder
from pipelines.plan import Plan
from pipelines.shared_prefixes import MIN_SHARED_TOKENS, common_length
from pipelines.source import RowReader, Shard

_BLOCK_ROWS = 64  # a sample is drawn in runs of rows: files are read forwards, and neighbours share prefixes
_MAX_NAMED = 5


@dataclass(slots=True, kw_only=True)
class RowFacts:
    """What the rows looked at are like. ``num_shared_tokens``: of prompts, those alike to a neighbour's."""

    num_rows: int = 0
    num_prompt_tokens: int = 0
    most_prompt_tokens: int = 0
    most_output_tokens: int = 0
    num_shared_tokens: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    refused_rows: list[tuple[str, str]] = field(default_factory=list)

    @property
    def num_refused(self) -> int:
        return sum(self.refused.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class JobForecast:
    """A job before it is run. Counts of ``facts`` are of the rows looked at: all of them if ``is_exact``.

    ``gpu_reason`` is the setting that asks for a GPU, if one does. ``num_experts`` are a layer's routed ones.
    ``num_kv_blocks`` None: the device's size is not known.
    ``obstacles`` are the reasons why the job cannot succeed.
    """

    plan: Plan
    seed: int
    facts: RowFacts
    memory: MemoryEstimate
    gpu_reason: str | None
    cluster: ClusterSection
    num_experts: int
    num_kv_blocks: int | None
    tokens_per_s: float | None
    max_error_rows: float
    obstacles: tuple[str, ...]

    @property
    def is_exact(self) -> bool:
        """Whether every row was looked at."""
        return self.facts.num_rows == self.plan.num_rows

    @property
    def scale(self) -> float:
        """How many rows of the job each row that was looked at stands for."""
        return self.plan.num_rows / self.facts.num_rows if self.facts.num_rows else 0.0

    @property
    def most_seconds(self) -> float | None:
        """At the stated tokens a second of each rank, every row as long as it may become."""
        if not self.tokens_per_s:
            return None
        num_tokens = (self.facts.num_prompt_tokens + self.facts.most_output_tokens) * self.scale
        return num_tokens / (self.tokens_per_s * self.num_ranks)

    @property
    def num_ranks(self) -> int:
        """Those asked for; where they are as many as there will be GPUs, one replica's."""
        return self.cluster.num_ranks or self.cluster.ranks_per_replica


def forecast_job(
    job: JobConfig,
    *,
    max_num_rows: int | None,
    seed: int,
    tokens_per_s: float | None = None,
    device_bytes: int | None = None,
) -> JobForecast:
    """Look at a job without running it. Raises ``ConfigError`` for what ``run`` would refuse as well.

    ``max_num_rows`` None renders every row, else about so many, drawn at random with ``seed``.
    """
    job = with_absolute_paths(job)
    plan = plan_job(job)
    check_folder(output_folder(job), plan)
    config = engine_config(job)
    gpu_reason = needs_gpu(config)
    # Whoever names a device's memory plans for a GPU.
    is_gpu = gpu_reason is not None or (config.device == "auto" and device_bytes is not None)
    allowed = None if device_bytes is None else int(job.engine.gpu_memory_utilization * device_bytes)
    memory = estimate_memory(
        config,
        is_gpu=is_gpu,
        num_expert_ranks=job.cluster.ranks_per_replica,
        allowed_bytes=allowed,
    )
    obstacles: list[str] = []
    num_kv_blocks = _count_blocks(job, memory, device_bytes, obstacles)
    facts = _look_at_rows(job, plan, _draw(plan, max_num_rows, seed), memory.max_model_len, num_kv_blocks)
    found = JobForecast(
        plan=plan,
        seed=seed,
        facts=facts,
        memory=memory,
        gpu_reason=gpu_reason,
        cluster=job.cluster,
        num_experts=count_experts(job.model.path),
        num_kv_blocks=num_kv_blocks,
        tokens_per_s=tokens_per_s,
        max_error_rows=_max_error_rows(job, plan),
        obstacles=tuple(obstacles),
    )
    return replace(found, obstacles=(*obstacles, *_error_obstacle(found)))


def _count_blocks(
    job: JobConfig, memory: MemoryEstimate, device_bytes: int | None, obstacles: list[str]
) -> int | None:
    config = engine_config(job)
    if device_bytes is None:
        return config.num_kv_blocks or None
    allowed = int(config.gpu_memory_utilization * device_bytes)
    if config.num_kv_blocks:
        needed = memory.num_fixed_bytes + config.num_kv_blocks * memory.num_bytes_per_block
    else:
        needed = memory.num_least_bytes
    if needed > allowed:
        obstacles.append(
            f"a rank needs {_gib(needed)} of device memory, and engine.gpu_memory_utilization allows "
            f"{_gib(allowed)}"
        )
        return None
    return memory.num_kv_blocks(config, device_bytes)


def _max_error_rows(job: JobConfig, plan: Plan) -> float:
    by_rate = job.output.max_error_rate * plan.num_rows
    return by_rate if job.output.max_errors is None else min(by_rate, job.output.max_errors)


def _error_obstacle(found: JobForecast) -> tuple[str, ...]:
    """A sample can only warn; rows that were all looked at decide."""
    facts = found.facts
    if not found.is_exact or facts.num_refused <= found.max_error_rows:
        return ()
    return (
        f"{facts.num_refused} of {facts.num_rows} rows would be refused; output.max_error_rate and "
        f"output.max_errors allow {int(found.max_error_rows)}",
    )


def _look_at_rows(
    job: JobConfig,
    plan: Plan,
    runs: Iterator[tuple[Shard, int, int]],
    max_model_len: int,
    num_kv_blocks: int | None,
) -> RowFacts:
    renderer = build_job_renderer(job)
    reader = RowReader(plan.root, plan.kind, plan.files, plan.contract.render_columns)
    facts = RowFacts()
    for shard, start, stop in runs:
        prompts: list[Sequence[int]] = []
        for row_id, request in _render(reader, renderer, shard, start, stop):
            facts.num_rows += 1
            try:
                if isinstance(request, RequestRejected):
                    raise request
                _check_fit(request, max_model_len, num_kv_blocks)
            except RequestRejected as rejected:
                facts.refused[rejected.code] += 1
                if len(facts.refused_rows) < _MAX_NAMED:
                    facts.refused_rows.append((row_id, f"{rejected.code}: {rejected.message}"))
                continue
            length = len(request.prompt_token_ids)
            facts.num_prompt_tokens += length
            facts.most_prompt_tokens = max(facts.most_prompt_tokens, length)
            facts.most_output_tokens += request.sampling.n * _most_output(
                request, max_model_len, num_kv_blocks
            )
            prompts.append(request.prompt_token_ids)
        facts.num_shared_tokens += _count_shared(prompts)
    reader.close()
    return facts


def _draw(plan: Plan, max_num_rows: int | None, seed: int) -> Iterator[tuple[Shard, int, int]]:
    """Runs of rows in the order of the files: all of them, or some that are drawn at random."""
    runs = [
        (shard, start, min(start + _BLOCK_ROWS, shard.num_rows))
        for shard in plan.shards
        for start in range(0, shard.num_rows, _BLOCK_ROWS)
    ]
    if max_num_rows is None or max_num_rows >= plan.num_rows:
        return iter(runs)
    num_runs = min(len(runs), -(-max_num_rows // _BLOCK_ROWS))
    chosen = sorted(random.Random(seed).sample(range(len(runs)), num_runs))
    return (runs[index] for index in chosen)


def _render(
    reader: RowReader, renderer: Renderer, shard: Shard, start: int, stop: int
) -> Iterator[tuple[str, Request | RequestRejected]]:
    row = start
    for batch in reader.read(shard.path, shard.start + start, shard.start + stop):
        for i in range(batch.num_rows):
            row_id = shard.row_id(row)
            try:
                yield row_id, renderer.render(read_values(batch, i), row_id)
            except RequestRejected as rejected:
                yield row_id, rejected
            row += 1


def _most_output(request: Request, max_model_len: int, num_kv_blocks: int | None) -> int:
    asked = request.sampling.max_tokens
    num_tokens = most_total_tokens(
        len(request.prompt_token_ids),
        asked,
        max_model_len=max_model_len,
        num_kv_blocks=-(-max_model_len // KV_BLOCK_SIZE) if num_kv_blocks is None else num_kv_blocks,
    )
    return num_tokens - len(request.prompt_token_ids)


def _check_fit(request: Request, max_model_len: int, num_kv_blocks: int | None) -> None:
    """The engine's own rule: the last token is sampled and never run, so it needs no room."""
    num_tokens = len(request.prompt_token_ids) + _most_output(request, max_model_len, num_kv_blocks) - 1
    if num_kv_blocks is not None and num_tokens > num_kv_blocks * KV_BLOCK_SIZE:
        raise RequestRejected(
            "kv_too_small", f"needs room for {num_tokens} tokens, of {num_kv_blocks * KV_BLOCK_SIZE}"
        )


def _count_shared(prompts: Sequence[Sequence[int]]) -> int:
    """Tokens that a prompt has in common with one before it in sorted order."""
    lengths = (common_length(left, right) for left, right in pairwise(sorted(map(list, prompts))))
    return sum(length for length in lengths if length >= MIN_SHARED_TOKENS)


def format_forecast(found: JobForecast) -> str:
    """A few lines for a terminal; the last says whether the job can run."""
    plan, facts = found.plan, found.facts
    how = (
        "exact, every row"
        if found.is_exact
        else f"from {facts.num_rows} rows drawn at random, seed {found.seed}"
    )
    about = "" if found.is_exact else "about "
    num_in, num_out = (
        round(number * found.scale) for number in (facts.num_prompt_tokens, facts.most_output_tokens)
    )
    lines = [
        f"rows: {plan.num_rows} in {counted(len(plan.files), 'file')}, {counted(len(plan.shards), 'shard')}; "
        f"prompts in column {plan.contract.prompt_column!r}",
        f"tokens ({how}): {about}{num_in} in, at most {about}{num_out} out; "
        f"longest prompt {facts.most_prompt_tokens}, limit {found.memory.max_model_len - 1}",
        f"shared prefixes: {facts.num_shared_tokens / max(facts.num_prompt_tokens, 1):.1%} of prompt tokens, "
        f"among neighbours of {_BLOCK_ROWS} rows",
        *_refused_lines(found, about),
        _layout_line(found),
        *_memory_lines(found),
        _time_line(found),
    ]
    if found.obstacles:
        return "\n".join([*lines, *(f"the job cannot succeed: {text}" for text in found.obstacles)])
    return "\n".join([*lines, f"the job can run{_elsewhere(found)}"])


def _elsewhere(found: JobForecast) -> str:
    """Where it can, if that is not here: a plan is made on any machine."""
    if found.gpu_reason is None or next(Path("/dev").glob("nvidia[0-9]*"), None) is not None:
        return ""
    return f" where each rank has a GPU: {found.gpu_reason}, and this machine has none"


def _refused_lines(found: JobForecast, about: str) -> list[str]:
    facts = found.facts
    codes = ", ".join(f"{code} {about}{round(n * found.scale)}" for code, n in sorted(facts.refused.items()))
    lines = [f"error rows: {codes or 'none'}; allowed {int(found.max_error_rows)}"]
    return lines + [f"  {row_id}: {text}" for row_id, text in facts.refused_rows]


def _layout_line(found: JobForecast) -> str:
    cluster, size = found.cluster, found.cluster.ranks_per_replica
    kind = "replica" if size > 1 else "rank"
    number = (cluster.num_ranks or cluster.max_ranks or 0) // size
    if not number:
        count = (
            "as many replicas as there is room for, each"
            if size > 1
            else "a rank for every GPU, or one on the CPU"
        )
    else:
        count = f"{'' if cluster.num_ranks else 'up to '}{number} {kind}{'s' if number > 1 else ''}"
    if size == 1:
        return f"layout: {count}, with all {found.num_experts} experts of a layer on each"
    where = "" if cluster.replica_spans_nodes else " of one node"
    share = f"{found.num_experts // size} of a layer's {found.num_experts} experts"
    return f"layout: {count} of {size} ranks{where}, with {share} on each rank"


def _memory_lines(found: JobForecast) -> list[str]:
    line = found.memory.describe(found.num_kv_blocks)
    if found.num_kv_blocks is None:
        return [line, "KV cache: not known without --device-memory-gib or engine.num_kv_blocks"]
    return [line, f"KV cache: {found.num_kv_blocks} blocks, {found.num_kv_blocks * KV_BLOCK_SIZE} tokens"]


def _time_line(found: JobForecast) -> str:
    seconds = found.most_seconds
    if seconds is None:
        return "time: not known without --tokens-per-s"
    ranks = f"{found.num_ranks} ranks" if found.num_ranks > 1 else "one rank"
    return (
        f"time: at most {seconds / 3600:.2f} h on {ranks} at {found.tokens_per_s:g} tokens a second each, "
        f"{seconds * found.num_ranks / 3600:.2f} rank-hours"
    )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"

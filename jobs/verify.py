"""Re-run a sample of a job's committed rows in other ways and compare the digests of their answers.

Owns which ways, when a comparison would mean nothing and is refused, and what a difference is. It must
not know Ray: one engine in this process answers everything. Nothing is written.
"""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine import ConfigError, Engine, EngineConfig, Request, RequestRejected
from jobs.config import JobConfig
from jobs.environment import describe_environment, describe_versions, find_differences, settings_that_matter
from jobs.job_plan import answer_places, answer_settings, read_recorded_job
from jobs.lease_reader import read_values
from jobs.rank import EngineBuilder, build_job_renderer, build_rank_engine
from pipelines.committed_rows import CommittedRow, read_input_rows, sample_committed_rows
from pipelines.manifest import OutputFolder, load_plan
from pipelines.plan import Plan, describe_difference
from pipelines.prompt import PromptRenderer
from pipelines.report import distinct, read_runs

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to run the sample. ``is_alone``: each row in an engine that is empty and has cached nothing."""

    name: str
    max_num_seqs: int
    max_num_batched_tokens: int
    is_alone: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A row that came out otherwise: ``found`` are its digests, or why it was refused."""

    row_id: str
    way: str
    recorded: tuple[str, ...]
    found: tuple[str, ...] | str


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What was compared and how it came out. ``elsewhere`` says in what this place is not the job's."""

    seed: int
    num_committed: int
    row_ids: tuple[str, ...]
    ways: tuple[Way, ...]
    differences: tuple[Difference, ...]
    environment: Mapping[str, str]
    num_environments: int
    elsewhere: tuple[str, ...]

    @property
    def is_equal(self) -> bool:
        """Whether every digest compared is the Parquet's."""
        return not self.differences

    def num_different(self, way: Way) -> int:
        """Rows that came out otherwise in one way."""
        return sum(difference.way == way.name for difference in self.differences)


def verify_output(
    output_dir: str | Path,
    *,
    num_rows: int,
    seed: int | None = None,
    model: str | None = None,
    allow_other_device: bool = False,
    build_engine: EngineBuilder | None = None,
) -> Verification:
    """Compare up to ``num_rows`` committed rows. Raises ``ConfigError`` for what is refused.

    ``model`` is where the model's folder lies now. ``allow_other_device`` compares although this device,
    these versions or the settings that they imply are not those of the job.
    """
    folder = OutputFolder(Path(output_dir))
    plan = load_plan(folder)
    job = read_recorded_job(folder, model)
    renderer = build_job_renderer(job)
    _check_settings(folder, plan, job)
    recorded = _Recorded.read(folder, is_binding=not allow_other_device)
    recorded.compare(describe_versions())  # what can be refused before a model is loaded

    seed = random.SystemRandom().randrange(2**32) if seed is None else seed
    random_ = random.Random(seed)
    rows, num_committed = sample_committed_rows(folder, plan, num_rows, random_)
    requests, differences = _render(plan, rows, renderer)
    longest = max((len(request.prompt_token_ids) for request in requests), default=1)
    ways = choose_ways(job.engine, len(rows), longest)
    engine = build_rank_engine(_wide_enough(job.engine, ways, allow_other_device), build_engine)
    environment = describe_environment(engine.resolved, plan.settings["model.path"])
    elsewhere = recorded.compare(environment, settings_that_matter(engine.resolved))
    for way in ways:
        random_.shuffle(requests)
        differences += _run_way(engine, way, requests, {row.row_id: row for row in rows})
    return Verification(
        seed=seed,
        num_committed=num_committed,
        row_ids=tuple(row.row_id for row in rows),
        ways=tuple(ways),
        differences=tuple(differences),
        environment=environment,
        num_environments=len(recorded.environments),
        elsewhere=tuple(elsewhere),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recorded:
    """Where the job's runs computed. ``is_binding``: another place is refused."""

    environments: Sequence[Mapping[str, Any]]
    engine_settings: Sequence[Mapping[str, Any]]
    is_binding: bool

    @classmethod
    def read(cls, folder: OutputFolder, *, is_binding: bool) -> _Recorded:
        runs = read_runs(folder)
        environments = distinct(facts for run in runs for facts in run.environments)
        if not environments:
            raise ConfigError(f"no run of output folder {str(folder.path)!r} recorded where it computed")
        settings = distinct(facts for run in runs for facts in run.engine_settings)
        return cls(environments=environments, engine_settings=settings, is_binding=is_binding)

    def compare(
        self, environment: Mapping[str, str], engine_settings: Mapping[str, Any] | None = None
    ) -> list[str]:
        """In what this place is another, in words. Raises ``ConfigError`` if that is not allowed."""
        differences = find_differences(self.environments, environment)
        differences += find_differences(self.engine_settings, engine_settings or {})
        if differences and self.is_binding:
            raise ConfigError(
                "digests compare within one device kind and one set of versions only: "
                f"{'; '.join(differences)} (--allow-other-device compares all the same)"
            )
        return differences


def _check_settings(folder: OutputFolder, plan: Plan, job: JobConfig) -> None:
    settings: dict[str, Any] = json.loads(json.dumps(answer_settings(job)))
    difference = describe_difference(plan, replace(plan, settings=settings, places=answer_places(job)))
    if difference is not None:
        raise ConfigError(f"output folder {str(folder.path)!r} is another job's: {difference}")


def _render(
    plan: Plan, rows: Sequence[CommittedRow], renderer: PromptRenderer
) -> tuple[list[Request], list[Difference]]:
    requests: list[Request] = []
    differences: list[Difference] = []
    for row, batch in zip(rows, read_input_rows(plan, rows), strict=True):
        try:
            requests.append(renderer.render(read_values(batch, 0), row.row_id))
        except RequestRejected as rejected:
            differences.append(_rejection(row, "rendering", rejected))
    return requests, differences


def choose_ways(config: EngineConfig, num_rows: int, longest: int) -> list[Way]:
    """Alone; in batches of another size; and cut into chunks of several other sizes.

    ``longest`` is the longest prompt's length: chunks are chosen to cut it into about three and seven.
    """
    seqs, tokens = config.max_num_seqs, config.max_num_batched_tokens
    other_seqs = min(seqs, num_rows) // 2 + 1
    if other_seqs == seqs:
        other_seqs += 1
    reach = min(longest, tokens)
    chunks = sorted({reach // 3 + 1, reach // 7 + 1} - {tokens}) or [tokens + 1]
    return [
        Way(name="alone", max_num_seqs=seqs, max_num_batched_tokens=tokens, is_alone=True),
        Way(name=f"max_num_seqs {other_seqs}", max_num_seqs=other_seqs, max_num_batched_tokens=tokens),
        *(
            Way(name=f"max_num_batched_tokens {chunk}", max_num_seqs=seqs, max_num_batched_tokens=chunk)
            for chunk in chunks
        ),
    ]


def _wide_enough(config: EngineConfig, ways: Sequence[Way], is_device_free: bool) -> EngineConfig:
    """One engine serves all ways: a model is loaded once, and restarted within each way's limits."""
    return replace(
        config,
        max_num_seqs=max(way.max_num_seqs for way in ways),
        max_num_batched_tokens=max(way.max_num_batched_tokens for way in ways),
        device="auto" if is_device_free else config.device,
    )


Answer = tuple[str, ...] | RequestRejected


def _answers(engine: Engine, way: Way, requests: Sequence[Request]) -> Iterator[tuple[Request, Answer]]:
    """Each request with the digests of its samples, or its refusal."""
    for group in [[request] for request in requests] if way.is_alone else [list(requests)]:
        engine.restart(max_num_seqs=way.max_num_seqs, max_num_batched_tokens=way.max_num_batched_tokens)
        asked = {request.request_id: request for request in group}
        for request in group:
            try:
                engine.add_request(request)
            except RequestRejected as rejected:
                yield request, rejected
        while engine.has_unfinished():
            for output in engine.step():
                digests = tuple(completion.output_digest for completion in output.completions)
                yield asked[output.request_id], digests


def _run_way(
    engine: Engine, way: Way, requests: Sequence[Request], rows: Mapping[str, CommittedRow]
) -> list[Difference]:
    differences = []
    for request, answer in _answers(engine, way, requests):
        difference = _compare(rows[request.request_id], way, answer)
        if difference is not None:
            differences.append(difference)
    logger.info("%s: %d rows, %d different", way.name, len(requests), len(differences))
    return sorted(differences, key=lambda difference: difference.row_id)


def _compare(row: CommittedRow, way: Way, answer: Answer) -> Difference | None:
    if isinstance(answer, RequestRejected):
        return _rejection(row, way.name, answer)
    if answer == row.digests:
        return None
    return Difference(row_id=row.row_id, way=way.name, recorded=row.digests, found=answer)


def _rejection(row: CommittedRow, way: str, rejected: RequestRejected) -> Difference:
    found = f"{rejected.code}: {rejected.message}"
    return Difference(row_id=row.row_id, way=way, recorded=row.digests, found=found)

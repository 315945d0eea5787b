"""Verifying an output folder: what is found equal, what is found different, and what is refused."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from engine import ConfigError, Engine, EngineConfig, RequestOutput
from jobs import cli, commands
from jobs.config import JobConfig, load_job
from jobs.environment import describe_versions
from jobs.job_plan import plan_job, record_job
from jobs.rank import build_job_renderer, build_rank_engine
from jobs.verify import Verification, choose_ways, verify_output
from pipelines.driver import Outcome
from pipelines.manifest import OutputFolder
from tests.conftest import ROOT
from tests.fake_engine import FakeEngine
from tests.small_jobs import start_run, write_prompts

TINY = ROOT / "tests" / "data" / "tiny"

Build = Callable[[EngineConfig], Engine]


def random_rows(seed: int, count: int, longest: int) -> list[list[int] | None]:
    random_ = random.Random(seed)
    prompts: list[list[int] | None] = [
        [random_.randrange(3, 100) for _ in range(random_.randrange(1, longest))] for _ in range(count)
    ]
    prompts[1] = None
    prompts[4] = []
    return prompts


class Job:
    """A small job run in this process, its model a copy of its own."""

    def __init__(self, path: Path, build: Build, prompts: list[list[int] | None], *overrides: str) -> None:
        self.path, self.build = path, build
        self.model, self.input = path / "model", path / "in" / "rows.parquet"
        self.folder = OutputFolder(path / "out")
        shutil.copytree(TINY, self.model, ignore=shutil.ignore_patterns("golden"))
        write_prompts(
            self.input, prompts, n=pa.array([None, None, 3, *[None] * (len(prompts) - 3)], pa.int32())
        )
        flags = {
            "model.path": str(self.model),
            "input.path": str(self.input),
            "input.rows_per_shard": 5,
            "output.path": str(self.folder.path),
            "engine.max_num_seqs": 4,
        }
        self.job: JobConfig = load_job(None, overrides, flags)
        self.run()

    def run(self) -> None:
        driver, _ = start_run(
            self.folder,
            plan_job(self.job),
            num_slots=1,
            make_engine=lambda _: build_rank_engine(self.job.engine, self.build),
            renderer=build_job_renderer(self.job),
        )
        record_job(self.folder, self.job)
        assert driver.run() is Outcome.COMMITTED

    def verify(self, num_rows: int = 12, **options: Any) -> Verification:
        return verify_output(
            self.folder.path, **{"num_rows": num_rows, "seed": 1, "build_engine": self.build, **options}
        )

    def refused(self, says: str, **options: Any) -> str:
        with pytest.raises(ConfigError, match=says) as caught:
            self.verify(**options)
        assert "\n" not in str(caught.value), "one sentence"
        return str(caught.value)

    def rewrite_part(self, index: int, column: str, change: Callable[[list[Any]], list[Any]]) -> str:
        """Change a column of one part, its commit record kept; returns the part's name."""
        part = sorted(self.folder.path.glob("*.parquet"))[index]
        table = pq.read_table(part)
        position = table.schema.get_field_index(column)
        values = pa.array(change(table.column(column).to_pylist()), table.schema.field(column).type)
        pq.write_table(table.set_column(position, table.schema.field(column), values), part)
        return part.name

    def rewrite_record(self, run: int, **facts: str) -> None:
        """Let a run have recorded another environment."""
        file = self.folder.run_file(run)
        tree = json.loads(file.read_text())
        tree["environments"] = [{**environment, **facts} for environment in tree["environments"]]
        file.write_text(json.dumps(tree))


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path, FakeEngine, random_rows(1, 12, 9))


def test_a_real_engine_gives_the_same_bits_in_every_way(tmp_path: Path) -> None:
    build = lambda config: build_rank_engine(config, None)  # noqa: E731
    job = Job(
        tmp_path, build, random_rows(2, 12, 40), "sampling.max_tokens=2", "engine.max_num_batched_tokens=64"
    )
    found = job.verify()
    assert found.is_equal
    assert (found.num_committed, len(set(found.row_ids))) == (10, 10)
    assert not {"rows.parquet#1", "rows.parquet#4"} & set(found.row_ids), "error rows have no answer"
    assert [way.is_alone for way in found.ways] == [True, False, False, False]
    assert len({way.max_num_batched_tokens for way in found.ways}) == 3
    assert (found.elsewhere, found.num_environments) == ((), 1)
    assert found.environment["device_kind"] in ("cpu", "cuda")


def test_a_sample_is_drawn_by_its_seed(job: Job) -> None:
    samples = [job.verify(4, seed=seed).row_ids for seed in (1, 1, 2, 3)]
    assert samples[0] == samples[1]
    assert len(set(samples)) > 1
    assert {len(sample) for sample in samples} == {4}
    assert job.verify(seed=None).is_equal


def test_a_changed_digest_is_named_and_the_command_says_1(
    job: Job, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("jobs.verify.build_rank_engine", lambda config, build: FakeEngine(config))
    command = ["verify", str(job.folder.path), "--rows", "12", "--seed", "5"]
    assert cli.batch_generate(command) == 0
    equal = capsys.readouterr().out
    assert "compared 10 of 10 committed rows (seed 5)" in equal
    assert "alone: 10 equal, 0 different" in equal
    job.rewrite_part(1, "output_digest", lambda digests: [*digests[:3], ["f" * 32], digests[4]])
    assert cli.batch_generate(command) == 1
    different = capsys.readouterr().out
    assert f"different: rows.parquet#8 (alone): {'f' * 32} before, " in different
    assert "rows.parquet#7" not in different


class BatchDependentEngine(FakeEngine):
    """Its answers depend on what runs beside them: the fault that verifying is for."""

    def step(self) -> list[RequestOutput]:
        outputs = super().step()
        if len(outputs) > 1:
            outputs[0] = RequestOutput(
                request_id=outputs[0].request_id,
                completions=outputs[1].completions,
                num_prompt_tokens=outputs[0].num_prompt_tokens,
            )
        return outputs


def test_answers_that_depend_on_the_batch_are_found(job: Job) -> None:
    found = job.verify(build_engine=BatchDependentEngine)
    assert found.num_different(found.ways[0]) == 0, "alone there is nothing to depend on"
    assert all(found.num_different(way) for way in found.ways[1:])


def test_other_versions_are_refused_or_reported(job: Job) -> None:
    job.rewrite_record(1, torch="1.0.0")
    torch = describe_versions()["torch"]
    sentence = job.refused("--allow-other-device", build_engine=None)  # no engine is built for that
    assert f"torch was 1.0.0 and is here {torch}" in sentence
    found = job.verify(allow_other_device=True)
    assert found.is_equal
    assert found.elsewhere == (f"torch was 1.0.0 and is here {torch}",)
    assert "across" in commands.format_verification(found)


def test_another_device_is_refused_or_reported(job: Job) -> None:
    job.rewrite_record(1, device="NVIDIA H200", device_kind="cuda")
    job.refused("device was NVIDIA H200 and is here fake")
    assert len(job.verify(allow_other_device=True).elsewhere) == 2


def test_runs_that_computed_in_different_places_are_told(job: Job) -> None:
    shutil.copy(job.folder.run_file(1), job.folder.run_file(2))
    job.rewrite_record(2, triton="9.9")
    job.refused("triton was 9.9")
    found = job.verify(allow_other_device=True)
    assert found.num_environments == 2
    assert "recorded 2 different environments" in commands.format_verification(found)


def test_a_moved_model_is_named_and_another_one_refused(job: Job, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere"
    job.model.rename(moved)
    job.refused("--model")
    assert job.verify(model=str(moved)).is_equal
    config = moved / "config.json"
    config.write_text(config.read_text() + " ")
    job.refused(
        f"the model's files are not the same: .* and is now {json.dumps(str(moved))}", model=str(moved)
    )


def test_a_changed_input_is_refused(job: Job) -> None:
    before = job.input.read_bytes()
    write_prompts(job.input, random_rows(9, 12, 9), n=pa.nulls(12, pa.int32()))
    job.refused("rows.parquet' changed since the job was planned")
    job.input.unlink()
    job.refused("cannot be read as Parquet")
    job.input.write_bytes(before)
    assert job.verify().is_equal


def test_parts_that_are_not_as_committed_are_refused(job: Job, tmp_path: Path) -> None:
    job.rewrite_part(0, "row_id", lambda ids: ids[::-1])
    job.refused("was changed")
    empty = Job(tmp_path / "empty", FakeEngine, [None, [], None, None, []])
    empty.refused("no committed row that was answered")
    with pytest.raises(ConfigError, match="not the output folder of a job"):
        verify_output(tmp_path / "nothing", num_rows=1)


@pytest.mark.parametrize("seqs", [1, 2, 3, 64])
@pytest.mark.parametrize(("tokens", "longest"), [(1, 1), (2, 9), (2048, 1), (2048, 20), (2048, 100_000)])
def test_every_way_but_the_first_has_a_limit_of_its_own(seqs: int, tokens: int, longest: int) -> None:
    config = EngineConfig(model="m", max_num_seqs=seqs, max_num_batched_tokens=tokens)
    first, *others = choose_ways(config, 16, longest)
    assert first.is_alone
    limits = {(way.max_num_seqs, way.max_num_batched_tokens) for way in others}
    assert len(limits) == len(others) >= 2
    assert (seqs, tokens) not in limits
    assert all(min(limit) >= 1 for limit in limits)

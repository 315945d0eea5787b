"""A job from YAML and flags: defaults, precedence, and one sentence for each mistake."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from engine import ConfigError, EngineConfig, SamplingParams
from jobs.config import JobConfig, engine_config, load_job, sampling_params

PATHS = {"model.path": "m", "input.path": "in/*.parquet", "output.path": "out"}

PATHS_YAML = "model: {path: m}\ninput: {path: i}\noutput: {path: o}\n"

JOB_YAML = """
model: {path: folder}
input: {path: rows, rows_per_shard: 5}
output: {path: results}
chat:
sampling: {temperature: 1, min_p: 1e-3, stop: [a, b]}
engine: {dtype: float32}
"""


def refusal(*overrides: str, path: Path | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load_job(path, overrides, {} if path else PATHS)
    return str(caught.value)


def test_flags_alone_suffice() -> None:
    job = load_job(None, flags=PATHS)
    assert (job.model.path, job.input.path, job.output.path) == ("m", "in/*.parquet", "out")
    assert sampling_params(job) == SamplingParams()
    assert engine_config(job) == EngineConfig(model="m")
    assert (job.input.rows_per_shard, job.output.prefix, job.output.max_error_rate) == (1000, "", 0.05)
    assert (job.cluster.num_ranks, job.cluster.address, job.cluster.stall_timeout_s) == (0, None, 900.0)
    output = job.output
    assert (output.max_errors, output.split_reasoning, output.prompt_token_ids) == (None, False, False)
    assert (job.chat.thinking, job.chat.reasoning_effort, job.chat.drop_thinking) == (True, "high", True)


def test_a_file_is_overridden_by_flags_and_these_by_set(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(JOB_YAML)
    job = load_job(file, ["sampling.top_k=9", "model.path=last"], {"model.path": "flag", "input.path": None})
    assert (job.model.path, job.input.path) == ("last", "rows")
    assert job.engine == EngineConfig(model="last", dtype="float32")
    assert job.sampling == SamplingParams(temperature=1.0, min_p=1e-3, stop=("a", "b"), top_k=9)
    assert type(job.sampling.temperature) is float


def test_the_jobs_seed_is_the_engines() -> None:
    assert engine_config(load_job(None, flags=PATHS)).seed == 0
    job = load_job(None, ["sampling.seed=12"], PATHS)
    assert (engine_config(job).seed, sampling_params(job).seed) == (12, 12)


def test_every_field_of_the_engine_and_of_sampling_can_be_set() -> None:
    for section, kind in (("engine", EngineConfig), ("sampling", SamplingParams)):
        for field in fields(kind):
            if field.name not in ("model", "seed"):
                message = refusal(f"{section}.{field.name}={{}}")
                assert message.startswith(f"{section}.{field.name} should be")


def test_a_job_survives_json() -> None:
    job = load_job(None, ["sampling.stop=[a]", "chat.reasoning_effort=30"], PATHS)
    assert JobConfig.model_validate_json(job.model_dump_json()) == job


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ("sampling.temprature=1", "sampling.temperature"),
        ("smapling.top_p=1", "sampling.top_p"),
        ("max_tokens=4", "sampling.max_tokens"),
        ("engine.max_seqs=4", "engine.max_num_seqs"),
        ("cluster.ranks=2", "cluster.num_ranks"),
        ("engine.temperature=2", "sampling.temperature"),
        ("output.foo=1", "output.format"),
    ],
)
def test_an_unknown_key_names_the_nearest(override: str, nearest: str) -> None:
    key = override.partition("=")[0]
    assert refusal(override) == f"unknown key {key}: the nearest valid one is {nearest}"


def test_an_unknown_section_of_a_file_names_the_nearest(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(f"{PATHS_YAML}smapling: {{top_p: 1}}\n")
    assert refusal(path=file) == "unknown key smapling.top_p: the nearest valid one is sampling.top_p"
    file.write_text(f"{PATHS_YAML}smapling:\n")
    assert refusal(path=file) == "unknown key smapling: the nearest valid one is sampling"


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("sampling.temperature=-1", ["sampling", "temperature", "-1"]),
        ("sampling.temperature=true", ["sampling.temperature", "True"]),
        ("sampling.top_k=1.5", ["sampling.top_k", "1.5"]),
        ("sampling.stop=abc", ["sampling.stop", "'abc'"]),
        ("sampling.seed=yes", ["sampling.seed", "True"]),
        ("chat.reasoning_effort=medium", ["chat.reasoning_effort", "'low', 'high' or 'max'", "'medium'"]),
        ("chat.reasoning_effort=101", ["chat.reasoning_effort", "101"]),
        ("engine.dtype=fp8", ["engine.dtype", "'float32'", "'fp8'"]),
        ("output.max_error_rate=2", ["output.max_error_rate", "2"]),
        ("input.rows_per_shard=0", ["input.rows_per_shard", "0"]),
        ("engine.model=x", ["set model.path instead"]),
        ("engine.seed=1", ["set sampling.seed instead"]),
        ("sampling={top_k: 1}", ["whole section sampling"]),
        ("sampling", ["section.key=value", "'sampling'"]),
        ("sampling.stop=[", ["--set sampling.stop", "not valid YAML"]),
        ("sampling.n={? [1, 2] : 3}", ["--set sampling.n", "not valid YAML", "a key must be a word"]),
        ("sampling.n={2026-01-01: 3}", ["--set sampling.n", "not valid YAML"]),
        ("sampling.n=2026-13-41", ["--set sampling.n", "not valid YAML", "month"]),
        ("sampling.n=&a [*a]", ["--set sampling.n", "not valid YAML", "Circular"]),
        (f"sampling.n={'[' * 5000}", ["--set sampling.n", "nested too deeply"]),
        ("sampling.temperature=1e-6", ["temperature", "at least 1e-05", "1e-06"]),
    ],
)
def test_a_wrong_value_is_named(override: str, parts: list[str]) -> None:
    message = refusal(override)
    assert "\n" not in message
    assert [part for part in parts if part not in message] == []


def test_everything_that_is_wrong_is_said_at_once(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(
        "model: {path: m}\n"
        "input: {pth: i}\n"
        "smapling: {top_k: 1, seed: 2}\n"
        "sampling: {top_p: 3, temprature: 1}\n"
        "engine: {model: m, dtype: fp8}\n"
        "cluster: 4\n"
    )
    assert refusal("output.prefix=5", "max_tokens=4", path=file).split("; ") == [
        "unknown key max_tokens: the nearest valid one is sampling.max_tokens",
        "unknown key input.pth: the nearest valid one is input.path",
        "unknown key smapling.top_k: the nearest valid one is sampling.top_k",
        "unknown key smapling.seed: the nearest valid one is sampling.seed",
        "unknown key sampling.temprature: the nearest valid one is sampling.temperature",
        "engine.model cannot be set: set model.path instead",
        "cluster must be a mapping with keys num_ranks, min_ranks, max_ranks, ranks_per_replica, "
        "replica_spans_nodes, place_timeout_s, address, cost_per_rank_hour, stall_timeout_s, got 4",
        "output.path is not set: give it in the job file or with --output",
        "output.prefix should be a valid string, got 5",
        "sampling: top_p must be a number in (0, 1], got 3.0",
        "engine.dtype should be 'auto', 'float32' or 'bfloat16', got 'fp8'",
    ]


def test_every_wrong_value_of_a_section_is_said() -> None:
    overrides = ["temperature=-1", "n=0", "top_k=1.5", "seed=-2", "stop=[a, '']"]
    assert refusal(
        *(f"sampling.{override}" for override in overrides),
        *(
            "engine.dtype=fp8",
            "engine.max_num_seqs=0",
            "engine.gpu_memory_utilization=2",
            "engine.device=cpu",
        ),
    ).split("; ") == [
        "sampling: temperature must be a number in [0, 100], got -1.0",
        "sampling: n must be a whole number in [1, 128], got 0",
        f"sampling: seed must be a whole number in [0, {2**63 - 1}], got -2",
        "sampling: stop must be a list of non-empty strings, got ('a', '')",
        "sampling.top_k should be a valid integer, got 1.5",
        "engine.dtype should be 'auto', 'float32' or 'bfloat16', got 'fp8'",
        "engine: max_num_seqs must be at least 1, got 0",
        "engine: gpu_memory_utilization must be in (0, 1], got 2.0",
    ]


@pytest.mark.parametrize(
    "name",
    [
        "output.row_group_rows",
        "cluster.num_ranks",
        "engine.max_num_seqs",
        "engine.num_kv_blocks",
        "engine.max_num_batched_tokens",
        "engine.host_memory_bytes",
    ],
)
def test_a_number_that_nothing_could_hold_is_refused_at_start(name: str) -> None:
    assert name.partition(".")[2] in refusal(f"{name}={10**23}")


@pytest.mark.parametrize("name", ["num_host_kv_blocks", "num_host_states"])
def test_host_memory_that_is_none_and_some_is_refused(name: str) -> None:
    assert refusal("engine.host_memory_bytes=0", f"engine.{name}=3") == (
        f"engine: {name} is 3, but host_memory_bytes is 0, which keeps nothing there"
    )


@pytest.mark.parametrize("section", ["model", "input", "output"])
def test_a_missing_path_says_how_to_give_it(section: str) -> None:
    flags = {key: value for key, value in PATHS.items() if not key.startswith(section)}
    with pytest.raises(ConfigError, match=rf"{section}\.path is not set.*--{section}"):
        load_job(None, flags=flags)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("- a", "mapping of sections"),
        ("model: folder", "model must be a mapping"),
        ("model: {path: a, path: b}", "given twice"),
        ("model: !!python/object/apply:os.getcwd []", "not valid YAML"),
        ("model: [", "not valid YAML"),
        ("? {a: b}\n: c", "not valid YAML"),
        ("model: &a {path: *a}", "not valid YAML"),
        ("model: " + "[" * 5000, "nested too deeply"),
    ],
)
def test_a_bad_file_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(text)
    assert reason in refusal(path=file)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    assert "cannot read the job file" in refusal(path=tmp_path / "absent.yaml")


def test_the_example_job_is_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(__file__).resolve().parents[2]
    monkeypatch.chdir(root)
    job = load_job("examples/bard/job.yaml")
    assert Path(job.model.path, "config.json").is_file()
    assert Path(job.input.path).is_file()
    assert job.cluster.num_ranks == 2


@pytest.mark.parametrize("name", ["num_ranks", "min_ranks", "max_ranks"])
def test_ranks_are_counted_in_whole_replicas(name: str) -> None:
    message = refusal("cluster.ranks_per_replica=4", "cluster.max_ranks=8", f"cluster.{name}=6")
    if name == "num_ranks":
        message = refusal("cluster.ranks_per_replica=4", "cluster.num_ranks=6")
    assert message == f"cluster: {name} is 6, no multiple of ranks_per_replica, 4"
    assert load_job(None, ["cluster.ranks_per_replica=4"], PATHS).cluster.num_ranks == 0


def test_a_loop_cannot_stand_still_for_ever() -> None:
    assert "cluster.stall_timeout_s" in refusal("cluster.stall_timeout_s=.inf")


def test_a_replica_needs_time_to_say_which_rank_stands_still() -> None:
    message = refusal("cluster.ranks_per_replica=2", "cluster.stall_timeout_s=12")
    assert message == (
        "cluster: stall_timeout_s is 12, and for replicas of several ranks at least 30 is needed"
    )

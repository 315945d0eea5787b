"""Whole jobs whose parts are no Parquet, or are named after their input."""

from __future__ import annotations

import datetime
import json
import os
import random
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from engine import ConfigError, SamplingParams
from jobs.config import load_job
from jobs.job_plan import plan_job, with_absolute_paths
from pipelines.chat import ChatOptions
from pipelines.commits import try_read_commit
from pipelines.committed_rows import sample_committed_rows
from pipelines.driver import Outcome
from pipelines.manifest import OutputFolder, check_folder
from pipelines.plan import PartOptions, Plan
from pipelines.prompt import build_renderer
from pipelines.report import read_status
from tests.small_jobs import check_answers, make_plan, random_prompts, read_output, start_run, write_prompts


@pytest.fixture
def folder(tmp_path: Path) -> OutputFolder:
    return OutputFolder(tmp_path / "out")


def visible_files(path: Path) -> list[str]:
    names = (file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file())
    return sorted(name for name in names if not name.startswith("_"))


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_json_lines_hold_every_column(tmp_path: Path, folder: OutputFolder) -> None:
    columns = {
        "when": pa.array([datetime.datetime(2020, 1, 2, 3), None], pa.timestamp("us")),
        "money": pa.array([Decimal("1.50"), None]),
        "raw": pa.array([b"\xff\0", None]),
        "score": pa.array([float("nan"), 0.1]),
        "nested": pa.array(
            [{"a": [1, None], "m": [("k", "é")]}, None],
            pa.struct([("a", pa.list_(pa.int8())), ("m", pa.map_(pa.string(), pa.string()))]),
        ),
    }
    write_prompts(tmp_path / "in.parquet", [[1], None], **columns)
    plan = make_plan(tmp_path / "in.parquet", parts=PartOptions(format="jsonl"))
    driver, _ = start_run(folder, plan)
    assert driver.run() is Outcome.COMMITTED
    assert visible_files(folder.path) == ["part-00000-of-00001.jsonl"]
    first, second = lines_of(folder.path / "part-00000-of-00001.jsonl")
    assert list(first) == plan.contract.output.names
    expected = {
        "when": "2020-01-02T03:00:00.000000",
        "money": "1.50",
        "raw": "/wA=",
        "score": "NaN",
        "nested": {"a": [1, None], "m": [{"key": "k", "value": "é"}]},
    }
    assert {name: first[name] for name in columns} == expected
    assert {name: second[name] for name in columns} == {**dict.fromkeys(columns), "score": 0.1}
    assert (first["row_id"], second["error"]) == ("in.parquet#0", "null_prompt")
    with pytest.raises(ConfigError, match="writes jsonl there, which it does not read again"):
        sample_committed_rows(folder, plan, 1, random.Random(0))


@pytest.mark.parametrize("part_format", ["parquet", "jsonl"])
def test_mirror_writes_a_part_of_each_input_file_under_its_name(
    tmp_path: Path, folder: OutputFolder, part_format: Any
) -> None:
    prompts = random_prompts(random.Random(2), 30)
    write_prompts(tmp_path / "in" / "a.parquet", prompts[:25])
    write_prompts(tmp_path / "in" / "sub" / "b.parquet", prompts[25:])
    write_prompts(tmp_path / "in" / "sub" / "none.parquet", [])
    plan = make_plan(tmp_path / "in", 10, parts=PartOptions(layout="mirror", format=part_format))
    driver, _ = start_run(folder, plan)
    assert driver.run() is Outcome.COMMITTED
    suffix = "" if part_format == "parquet" else ".jsonl"
    assert visible_files(folder.path) == [f"{name}.parquet{suffix}" for name in ("a", "sub/b", "sub/none")]
    check_folder(folder, plan)
    if part_format == "parquet":
        check_answers(
            pa.concat_tables([pq.read_table(folder.path / n) for n in visible_files(folder.path)]), prompts
        )
    (folder.path / "sub" / "c.parquet").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"holds 'sub/c\.parquet', which is not this job's"):
        check_folder(folder, plan)


def test_mirror_refuses_two_inputs_for_one_name(tmp_path: Path) -> None:
    write_prompts(tmp_path / "in" / "a", [[1]])
    write_prompts(tmp_path / "in" / "a.parquet", [[1]])
    with pytest.raises(ConfigError, match=r"mirror gives the name 'a\.parquet' to two files"):
        make_plan(tmp_path / "in" / "a*", parts=PartOptions(layout="mirror"))


def test_row_groups_have_the_size_that_is_asked_for(tmp_path: Path, folder: OutputFolder) -> None:
    write_prompts(tmp_path / "in.parquet", random_prompts(random.Random(3), 100))
    plan = make_plan(tmp_path / "in.parquet", 100, parts=PartOptions(row_group_rows=40))
    start_run(folder, plan)[0].run()
    metadata = pq.read_metadata(next(folder.path.glob("*.parquet")))
    assert [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)] == [40, 40, 20]
    assert metadata.row_group(0).column(0).compression == "ZSTD"


REQUESTS: list[Any] = [
    {"url": "/v1/completions", "body": {"model": "m", "prompt": "to be", "max_tokens": 3, "user": "u", "stop": None}},
    {"url": "/v1/chat/completions", "body": {"messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 7, "n": 2, "logprobs": True, "top_logprobs": 1, "temperature": 0}},
    {"url": "/v1/completions", "body": {"model": "m", "prompt": [5, 6], "logprobs": 2, "stream": False}},
    {"url": "/v1/completions", "body": {"prompt": "x", "presence_penalty": 0.5}},
    {"url": "/v1/embeddings", "body": {"input": "x"}},
    {"url": "/v1/completions", "body": {"prompt": "x", "temperature": -1}},
    {"url": "/v1/completions", "body": {"prompt": ["x"]}},
    {"url": "/v1/chat/completions", "method": "GET", "body": {"messages": []}},
]  # fmt: skip


def write_requests(path: Path) -> list[str]:
    """The requests and a line that is none; the custom ids of all."""
    ids = [f"req-{i}" for i in range(len(REQUESTS))]
    lines = [
        json.dumps({"custom_id": id_, "method": "POST", **r}) for id_, r in zip(ids, REQUESTS, strict=True)
    ]
    path.write_text("\n".join([*lines, "no json"]) + "\n")
    return ids


def run_requests(folder: OutputFolder, plan: Plan, model: Path) -> None:
    renderer = build_renderer(model, SamplingParams(), ChatOptions())
    driver, _ = start_run(folder, plan, renderer=renderer)
    assert driver.run() is Outcome.COMMITTED


def test_batch_requests_become_responses_and_errors(
    tmp_path: Path, folder: OutputFolder, bard_path: Path
) -> None:
    ids = write_requests(tmp_path / "batch.jsonl")
    plan = make_plan(tmp_path / "batch.jsonl", parts=PartOptions(format="openai_batch"))
    run_requests(folder, plan, bard_path)
    assert visible_files(folder.path) == ["errors-00000-of-00001.jsonl", "part-00000-of-00001.jsonl"]
    answered = lines_of(folder.path / "part-00000-of-00001.jsonl")
    failed = lines_of(folder.path / "errors-00000-of-00001.jsonl")
    assert [line["custom_id"] for line in answered] == ids[:3]
    assert [line["custom_id"] for line in failed] == [*ids[3:], None]
    assert [line["error"]["code"] for line in failed] == [
        *("bad_request", "bad_request", "bad_sampling_param", "bad_prompt_type", "bad_request", "bad_request")
    ]
    assert "presence_penalty" in failed[0]["error"]["message"]
    assert all(set(line) == {"id", "custom_id", "response", "error"} for line in answered + failed)
    assert len({line["id"] for line in answered + failed}) == len(REQUESTS) + 1
    text, chat, ids_prompt = (line["response"]["body"] for line in answered)
    assert (text["object"], text["model"], len(text["choices"])) == ("text_completion", "m", 1)
    assert (
        text["usage"]["total_tokens"] == text["usage"]["prompt_tokens"] + text["usage"]["completion_tokens"]
    )
    assert chat["object"] == "chat.completion"
    assert [choice["message"]["role"] for choice in chat["choices"]] == ["assistant", "assistant"]
    assert chat["choices"][1]["logprobs"]["content"][0]["top_logprobs"][0]["token"] == "token_id:0"
    assert ids_prompt["usage"]["prompt_tokens"] == 2
    assert len(ids_prompt["choices"][0]["logprobs"]["top_logprobs"][0]) == 2
    check_folder(folder, plan)


def test_batch_requests_may_become_parquet(tmp_path: Path, folder: OutputFolder, bard_path: Path) -> None:
    ids = write_requests(tmp_path / "batch.jsonl")
    run_requests(folder, make_plan(tmp_path / "batch.jsonl"), bard_path)
    output = read_output(folder.path)
    assert output.column("custom_id").to_pylist() == [*ids, None]
    assert [len(texts or []) for texts in output.column("completion").to_pylist()[:3]] == [1, 2, 1]


@pytest.mark.parametrize("num_links", [0, 1])
def test_a_part_of_two_files_is_whole_after_a_death_between_them(
    tmp_path: Path, folder: OutputFolder, bard_path: Path, monkeypatch: pytest.MonkeyPatch, num_links: int
) -> None:
    ids = write_requests(tmp_path / "batch.jsonl")
    plan = make_plan(tmp_path / "batch.jsonl", parts=PartOptions(format="openai_batch"))
    from pipelines import commits

    give_name, given = commits._give_name, []

    def die_between(*arguments: Any, **options: Any) -> None:
        if len(given) == num_links:
            raise KeyboardInterrupt
        given.append(arguments)
        give_name(*arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(commits, "_give_name", die_between)
        with pytest.raises(KeyboardInterrupt):
            run_requests(folder, plan, bard_path)
    assert len(visible_files(folder.path)) == num_links
    assert try_read_commit(folder, plan, 0) is None
    assert read_status(folder.path).num_rows_committed == 0
    run_requests(folder, plan, bard_path)
    answered = lines_of(folder.path / "part-00000-of-00001.jsonl")
    failed = lines_of(folder.path / "errors-00000-of-00001.jsonl")
    assert [line["custom_id"] for line in answered + failed] == [*ids, None]
    assert not os.listdir(folder.temporary)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["output.format=openai_batch"], "needs input in the format of OpenAI batch requests"),
        (["output.path=s3://box/out"], r"set output\.state_dir"),
        (["output.state_dir=state"], r"output\.state_dir is for output to a URL"),
        (["input.path=batch.jsonl", "output.prefix=x_"], "have no place in output.format openai_batch"),
        (["output.columns=[nope]"], r"output\.columns names 'nope'"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(
    tmp_path: Path, bard_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_requests(tmp_path / "batch.jsonl")
    pq.write_table(pa.table({"prompt": ["a"]}), tmp_path / "in.parquet")
    flags = {"model.path": str(bard_path), "input.path": "in.parquet", "output.path": "out"}
    with pytest.raises(ConfigError, match=says):
        plan_job(with_absolute_paths(load_job(None, overrides, flags)))

"""The whole path as a user types it, with the real engine: Parquet in, Parquet out, one rank and two.

Everything is read back as a user would read it: plain Parquet files, exit codes, the status command.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer

from engine import output_digest
from tests.conftest import ROOT

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]

MODEL = ROOT / "tests" / "data" / "tiny-quant"
BAD_ROWS = {3: "empty_prompt", 10: "null_prompt", 17: "prompt_too_long"}


def batch_generate(*arguments: object) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    command = [sys.executable, "-m", "jobs.cli", *map(str, arguments)]
    environment["PYTHONPATH"] = str(ROOT)
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)


def write_rows(folder: Path) -> pa.Table:
    """Two files: texts (three of them bad), a pass-through column, and per-row sampling overrides."""
    words = [
        "the",
        "cat",
        "sat",
        "on",
        "a",
        "mat",
        "and",
        "then",
        "it",
        "ran",
        "far",
        "away",
        "from",
        "the",
        "old",
        "dog",
    ]
    texts: list[str | None] = [" ".join(words[i % 7 :: 1 + i % 3]) for i in range(24)]
    texts[3], texts[10], texts[17] = "", None, "word " * 3000
    table = pa.table(
        {
            "prompt": texts,
            "tag": pa.array([{"n": i, "even": i % 2 == 0} for i in range(24)]),
            "temperature": pa.array([0.0 if i % 4 == 0 else None for i in range(24)], pa.float64()),
        }
    )
    folder.mkdir()
    pq.write_table(table.slice(0, 13), folder / "a.parquet")
    pq.write_table(table.slice(13), folder / "b.parquet")
    return table


def read(folder: Path) -> list[dict[str, Any]]:
    """A plain read of the output, in the input's order."""
    files = sorted(str(path) for path in folder.glob("*.parquet"))
    return ds.dataset(files).to_table().to_pylist()


def files_of(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def arguments_of(tmp_path: Path, output: Path, num_ranks: int) -> list[object]:
    settings = [
        "sampling.max_tokens=12",
        "sampling.seed=5",
        "engine.max_model_len=512",
        "input.rows_per_shard=5",
    ]
    named = ["--model", MODEL, "--input", tmp_path / "in", "--output", output, "--num-ranks", num_ranks]
    return ["run", *named, *(word for setting in settings for word in ("--set", setting))]


def test_one_rank_and_two_write_the_same_answers(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "in").to_pylist()
    outputs = {}
    for num_ranks in (1, 2):
        output = tmp_path / f"out{num_ranks}"
        done = batch_generate(
            *arguments_of(tmp_path, output, num_ranks), "--set", "output.max_error_rate=0.2"
        )
        assert done.returncode == 0, done.stderr
        assert "21 rows ok, 3 error rows" in done.stderr.splitlines()[-1]
        assert {entry.name for entry in output.iterdir() if entry.suffix != ".parquet"} == {"_overnight"}
        outputs[num_ranks] = read(output)
    answers = outputs[1]
    ignored = {"num_cached_tokens"}  # what is cached depends on who ran before; the answer does not
    without = [[{k: v for k, v in row.items() if k not in ignored} for row in outputs[n]] for n in (1, 2)]
    assert without[0] == without[1]

    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    for index, (given, answer) in enumerate(zip(rows, answers, strict=True)):
        assert {name: answer[name] for name in given} == given
        assert answer["row_id"] == (f"a.parquet#{index}" if index < 13 else f"b.parquet#{index - 13}")
        if index in BAD_ROWS:
            assert (answer["status"], answer["error"]) == ("error", BAD_ROWS[index])
            assert answer["completion"] is None
            assert answer["completion_token_ids"] is None
            continue
        assert (answer["status"], answer["error"], answer["error_message"]) == ("ok", None, None)
        ids = answer["completion_token_ids"]
        assert 1 <= len(ids) == answer["num_completion_tokens"] <= 12
        assert answer["finish_reason"] == ("length" if len(ids) == 12 and ids[-1] != 1 else "stop")
        assert answer["completion"] == tokenizer.decode(ids, skip_special_tokens=True)
        assert len(answer["output_digest"]) == len(output_digest([], []))

    status = batch_generate("status", tmp_path / "out2")
    assert status.returncode == 0
    assert "rows read 24 = ok 21 + error 3 + in flight 0" in status.stdout


def test_a_killed_driver_goes_on_and_too_many_errors_say_3(tmp_path: Path) -> None:
    write_rows(tmp_path / "in")
    output = tmp_path / "out"
    arguments = [*arguments_of(tmp_path, output, 2), "--set", "output.max_error_rate=0.1"]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    environment["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, "-m", "jobs.cli", *map(str, arguments)]
    driver = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not any(path.stat().st_size for path in output.glob("_overnight/journals/**/*.journal")):
        assert driver.poll() is None
        assert time.monotonic() < deadline, "no row was journaled"
        time.sleep(0.02)
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    done = batch_generate(*arguments)
    assert done.returncode == 3, done.stderr
    assert "more than output.max_error_rate (0.1) allows" in done.stderr.splitlines()[-1]
    assert "output.max_error_rate (0.1) allows; to accept" in batch_generate("status", output).stdout
    answers = read(output)
    assert [row["row_id"] for row in answers] == [f"a.parquet#{i}" for i in range(13)] + [
        f"b.parquet#{i}" for i in range(11)
    ]


def test_other_settings_in_a_folder_that_holds_a_job_are_refused_or_replace_it(tmp_path: Path) -> None:
    write_rows(tmp_path / "in")
    output = tmp_path / "out"
    arguments = [*arguments_of(tmp_path, output, 1), "--set", "output.max_error_rate=1.0"]
    assert batch_generate(*arguments).returncode == 0
    before = files_of(output)
    changed = [*arguments, "--set", "sampling.temperature=0.5"]
    refused = batch_generate(*changed)
    assert refused.returncode == 2
    assert "sampling.temperature was 1.0 and is now 0.5" in refused.stderr
    assert before == files_of(output)

    # Whoever finds that the job cannot run, the cluster or a rank: the old one is there until then.
    for setting, says in [
        ("engine.device=cuda", "the cluster has no GPU"),
        ("engine.kernel_impl=triton", "engine.kernel_impl is triton, but this rank has no GPU"),
    ]:
        refused = batch_generate(*changed, "--discard-changed", "--set", setting)
        assert refused.returncode == 2, refused.stderr
        assert says in refused.stderr
        assert before == files_of(output)

    done = batch_generate(*changed, "--discard-changed")
    assert done.returncode == 0, done.stderr
    assert "deleted the job that" in done.stderr
    assert {entry.name for entry in output.iterdir() if entry.suffix != ".parquet"} == {"_overnight"}
    assert len(read(output)) == 24
    assert all(path.read_bytes() != before[path] for path in output.glob("*.parquet"))

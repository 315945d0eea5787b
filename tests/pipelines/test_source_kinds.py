"""Inputs that are no local Parquet: URLs, CSV, JSON lines, API requests, datasets by name."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from engine import ConfigError
from pipelines.source import InputSet, InputUnreadable, RowReader, find_input


def rows_of(
    found: InputSet, path: str, columns: list[str], start: int = 0, stop: int | None = None
) -> list[Any]:
    reader = RowReader(found.root, found.kind, found.files, columns, batch_rows=3)
    (file,) = (file for file in found.files if file.path == path)
    batches = list(reader.read(path, start, file.num_rows if stop is None else stop))
    reader.close()
    return [row for batch in batches for row in batch.to_pylist()]


@pytest.fixture
def memory() -> Any:
    store = fsspec.filesystem("memory")
    store.rm("/", recursive=True) if store.ls("/") else None
    for name, first in (("in/b.parquet", 0), ("in/sub/a.parquet", 10), ("in/_hidden/c.parquet", 20)):
        table = pa.table({"prompt": [f"p{i}" for i in range(first, first + 5)], "v": range(first, first + 5)})
        with store.open(f"/{name}", "wb") as file:
            pq.write_table(table, file, row_group_size=2)
    return store


@pytest.mark.parametrize(
    ("url", "names"),
    [
        ("memory://in", ["b.parquet", "sub/a.parquet"]),
        ("memory://in/b.parquet", ["b.parquet"]),
        ("memory://in/*/a.parquet", ["sub/a.parquet"]),
        ("memory://in/s*/*.parquet", ["sub/a.parquet"]),
    ],
)
def test_a_url_names_rows_as_a_path_does(memory: Any, url: str, names: list[str]) -> None:
    found = find_input(url)
    assert [file.path for file in found.files] == names
    first = 10 if names[-1] == "sub/a.parquet" else 0
    assert rows_of(found, names[-1], ["v"], 1, 4) == [{"v": first + i} for i in (1, 2, 3)]


def test_a_file_url_is_a_path(tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": ["a"]}), tmp_path / "a.parquet")
    assert find_input(f"file://{tmp_path}") == find_input(str(tmp_path))


def test_a_remote_file_that_changes_is_refused(memory: Any) -> None:
    found = find_input("memory://in/b.parquet")
    with memory.open("/in/b.parquet", "wb") as file:
        pq.write_table(pa.table({"prompt": ["x"] * 5, "v": [0] * 5}), file)
    with pytest.raises(ConfigError, match=r"memory://.*b\.parquet' changed"):
        rows_of(found, "b.parquet", ["v"])


@pytest.mark.parametrize(
    ("url", "says"), [("memory://none", "matches no Parquet file"), ("nope://x", "cannot be opened")]
)
def test_urls_that_are_refused(memory: Any, url: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        find_input(url)


def test_csv_columns_are_text_but_for_sampling_parameters(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('id,prompt,max_tokens,temperature\n007,"two\nlines",3,\n,NA,,0.5\n')
    found = find_input(str(tmp_path))
    assert (found.kind, found.files[0].num_rows) == ("csv", 2)
    columns = ["prompt", "max_tokens", "temperature", "id"]
    assert rows_of(found, "a.csv", columns) == [
        {"prompt": "two\nlines", "max_tokens": 3, "temperature": None, "id": "007"},
        {"prompt": "NA", "max_tokens": None, "temperature": 0.5, "id": ""},
    ]


def test_json_lines_keep_texts_and_widen_types(tmp_path: Path) -> None:
    lines = [
        '{"prompt": "a", "when": "2020-01-01", "n_": null, "x": 1}',
        "",
        '{"prompt": "b", "x": 2.5, "y": {"z": [1]}}',
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    found = find_input(str(tmp_path / "*.jsonl"))
    assert rows_of(found, "a.jsonl", ["when", "x", "y", "n_", "prompt"]) == [
        {"when": "2020-01-01", "x": 1.0, "y": None, "n_": None, "prompt": "a"},
        {"when": None, "x": 2.5, "y": {"z": [1]}, "n_": None, "prompt": "b"},
    ]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.jsonl", '{"prompt": "a"}\n{"prompt": ["b"]}\n', "cannot be read as JSON lines.*prompt"),
        ("a.jsonl", "[1]\n", "cannot be read as JSON lines"),
        ("a.csv", "prompt,x\n1\n", "cannot be read as CSV"),
        ("a.csv", "prompt,n\na,many\n", "cannot be read as CSV.*many"),
        ("a.csv", "", "cannot be read as CSV"),
        ("a.csv", "x,x\n1,2\n", "two columns named 'x'"),
        ("a.jsonl", '{"prompt": ' + "[" * 3000 + "]" * 3000 + "}", "nested too deeply"),
        ("\udcff.csv", "prompt\na\n", "a name that is not UTF-8"),
    ],
)
def test_text_files_that_are_refused(tmp_path: Path, name: str, content: str, says: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=says):
        find_input(str(tmp_path))


def test_a_file_whose_content_is_not_what_its_footer_says_is_told_in_one_sentence(tmp_path: Path) -> None:
    # Arrow writes such a column and does not read it.
    broken = pa.DictionaryArray.from_arrays(pa.array([0]), pa.array([b"\xff"]).view(pa.string()))
    pq.write_table(pa.table({"prompt": broken}), tmp_path / "a.parquet")
    found = find_input(str(tmp_path))
    with pytest.raises(InputUnreadable, match=r"a\.parquet' cannot be read: .*UTF8"):
        rows_of(found, "a.parquet", ["prompt"])


@pytest.mark.parametrize("compression", ["snappy", "zstd", "gzip", "lz4", "none"])
def test_damage_anywhere_in_a_file_is_told_by_its_name_or_not_seen(tmp_path: Path, compression: str) -> None:
    random_ = random.Random(compression)
    print("seed", compression)
    table = pa.table({"prompt": [f"hello {i}" for i in range(40)], "ids": [[i] * (i % 3) for i in range(40)]})
    told: list[tuple[Path, str]] = []
    for number in range(25):
        file = tmp_path / f"{number}.parquet"
        pq.write_table(table, file, compression=compression, row_group_size=random_.choice([5, 13, 40]))
        content = bytearray(file.read_bytes())
        footer = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
        for _ in range(random_.choice([1, 3, 30])):
            content[random_.randrange(4, footer)] = random_.randrange(256)
        file.write_bytes(content)
        found = find_input(str(file))
        try:
            assert (
                len(rows_of(found, file.name, random_.choice([["prompt"], ["ids"], ["ids", "prompt"]]))) == 40
            )
        except InputUnreadable as error:
            told.append((file, str(error)))
        except UnicodeDecodeError:
            pass  # a damaged text is read, and its row refused
    assert told
    for file, text in told:
        assert text.startswith(f"input file '{file}' cannot be read: ")
        assert "\n" not in text


def test_lines_that_are_cut_off_while_they_are_read_are_told_by_their_file(tmp_path: Path) -> None:
    content = b"".join(b'{"prompt": "%s"}\n' % (b"x" * 50_000) for _ in range(20))
    (tmp_path / "a.jsonl").write_bytes(content)
    found = find_input(str(tmp_path))
    reader = RowReader(found.root, found.kind, found.files, ["prompt"], batch_rows=3)
    assert next(reader.read("a.jsonl", 0, 3)).num_rows == 3
    (tmp_path / "a.jsonl").write_bytes(content[:50])
    with pytest.raises(InputUnreadable, match=r"a\.jsonl' cannot be read: "):
        list(reader.read("a.jsonl", 3, 20))
    reader.close()


def test_files_of_two_kinds_are_refused_unless_one_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("prompt\na\n")
    (tmp_path / "b.jsonl").write_text('{"prompt": "b"}\n')
    with pytest.raises(ConfigError, match=r"holds csv .* and jsonl .*input\.format"):
        find_input(str(tmp_path))
    assert [file.path for file in find_input(str(tmp_path), format="jsonl").files] == ["b.jsonl"]


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl"])
@pytest.mark.parametrize("seed", range(2))
def test_any_order_of_slices_of_text_files(tmp_path: Path, name: str, seed: int) -> None:
    print("seed", seed)
    random_ = random.Random(seed)
    lines = {
        "a.csv": ["prompt", *map(str, range(40))],
        "a.jsonl": [f'{{"prompt": "{i}"}}' for i in range(40)],
    }
    (tmp_path / name).write_text("\n".join(lines[name]))
    found = find_input(str(tmp_path))
    reader = RowReader(found.root, found.kind, found.files, ["prompt"], batch_rows=random_.randrange(1, 9))
    for _ in range(20):
        start = random_.randrange(40)
        stop = random_.randrange(start, 41)
        batches = reader.read(name, start, stop)
        assert [v for b in batches for v in b.column(0).to_pylist()] == list(map(str, range(start, stop)))


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl"])
def test_a_text_file_that_changes_is_refused(tmp_path: Path, name: str) -> None:
    content = {"a.csv": "prompt\na\n", "a.jsonl": '{"prompt": "a"}\n'}[name]
    (tmp_path / name).write_text(content)
    found = find_input(str(tmp_path))
    (tmp_path / name).write_text(content.replace("a", "b", 1) if name == "a.jsonl" else "prompt\nb\n")
    with pytest.raises(ConfigError, match="changed since the job was planned"):
        rows_of(found, name, ["prompt"])


def test_api_requests_are_known_by_their_first_line_and_no_line_is_lost(tmp_path: Path) -> None:
    request = {"custom_id": "r", "method": "POST", "url": "/v1/completions", "body": {"prompt": "é\ud800"}}
    lines = [json.dumps(request), "", "{broken", json.dumps({"custom_id": 7, "body": []})]
    (tmp_path / "batch.jsonl").write_text("\n".join(lines))
    found = find_input(str(tmp_path / "batch.jsonl"))
    assert found.kind == "openai_batch"
    first, broken, odd = rows_of(found, "batch.jsonl", ["custom_id", "body"])
    assert (first["custom_id"], json.loads(first["body"])) == ("r", request["body"])
    assert set(broken.values()) == set(odd.values()) == {None}


def test_a_dataset_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    from datasets import Dataset

    data = tmp_path / "mine"
    data.mkdir()
    for split, count in (("train", 5), ("test", 2)):
        content = "".join(json.dumps({"prompt": f"{split} {i}"}) + "\n" for i in range(count))
        (data / f"{split}.jsonl").write_text(content)
    found = find_input(f"hf://{data}:test")
    assert (found.kind, [file.path for file in found.files]) == ("named_dataset", ["mine:test"])
    assert rows_of(found, "mine:test", ["prompt"]) == [{"prompt": "test 0"}, {"prompt": "test 1"}]
    with pytest.raises(ConfigError, match=r"has the splits .*add :SPLIT"):
        find_input(f"hf://{data}")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        find_input(f"hf://{data}:nope")
    Dataset.from_dict({"prompt": ["a"]}).save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(ConfigError, match="save_to_disk wrote: give the folder itself"):
        find_input(f"hf://{tmp_path}/saved:train")

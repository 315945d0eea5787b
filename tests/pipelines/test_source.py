"""Finding inputs, cutting them into shards, reading slices."""

from __future__ import annotations

import errno
import glob
import os
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from engine import ConfigError
from pipelines.source import InputFile, RowReader, find_input, plan_shards
from pipelines.source_location import find_files


def write(path: Path, rows: int, first: int = 0, row_group_size: int | None = None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    values = list(range(first, first + rows))
    table = pa.table({"prompt": [f"p{v}" for v in values], "v": values, "fat": ["x" * 50] * rows})
    pq.write_table(table, path, row_group_size=row_group_size)


def test_a_file_a_folder_and_a_glob_name_rows_by_their_root(tmp_path: Path) -> None:
    write(tmp_path / "b.parquet", 2)
    write(tmp_path / "sub" / "a.parquet", 3)
    write(tmp_path / "_overnight" / "x.parquet", 1)
    write(tmp_path / ".hidden.parquet", 1)
    (tmp_path / "notes.txt").write_text("not rows")

    def names(path: Path | str) -> list[str]:
        return [file.path for file in find_input(str(path)).files]

    assert names(tmp_path) == ["b.parquet", "sub/a.parquet"]
    assert names(tmp_path / "b.parquet") == ["b.parquet"]
    assert names(tmp_path / "*.parquet") == ["b.parquet"]
    assert names(tmp_path / "**" / "a.parquet") == ["sub/a.parquet"]
    assert names(tmp_path / "s*" / "*.parquet") == ["sub/a.parquet"]


def test_the_output_inside_the_input_is_not_input(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", 1)
    write(tmp_path / "out" / "part-0.parquet", 1)
    found = find_input(str(tmp_path), exclude=str(tmp_path / "out"))
    assert [file.path for file in found.files] == ["a.parquet"]


def test_an_output_that_a_link_puts_into_the_input_is_not_input(tmp_path: Path) -> None:
    write(tmp_path / "in" / "a.parquet", 1)
    write(tmp_path / "in" / "res" / "part-0.parquet", 1)
    (tmp_path / "outlink").symlink_to(tmp_path / "in" / "res")
    (tmp_path / "inlink").symlink_to(tmp_path / "in")
    write(tmp_path / "far" / "part-0.parquet", 1)
    (tmp_path / "in" / "near").symlink_to(tmp_path / "far")
    for name in ("in", "inlink", "in/**/*.parquet", "in*/*.parquet", "in*/**"):
        for out in ("outlink", "in/res", "inlink/res"):
            found = find_input(str(tmp_path / name), exclude=str(tmp_path / out))
            names = [file.path.removeprefix("in/") for file in found.files]
            assert [name for name in names if name.startswith("res")] == [], (name, out)
            assert "a.parquet" in names
    for out in ("far", "in/near"):
        names = [f.path for f in find_input(str(tmp_path / "in"), exclude=str(tmp_path / out)).files]
        assert names == ["a.parquet", "res/part-0.parquet"]


@pytest.mark.parametrize("link", ["a", "loop", "sub/up", "zz"])
def test_links_in_a_circle_multiply_no_row(
    tmp_path: Path, link: str, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("a.parquet", "b.parquet", "sub/c.parquet"):
        write(tmp_path / "in" / name, 2)
    (tmp_path / "in" / link).symlink_to(tmp_path / "in")
    for path in ("in", "in/**/*.parquet", "in/**", "in/**/**/*"):
        found = find_input(str(tmp_path / path))
        assert [file.path for file in found.files] == ["a.parquet", "b.parquet", "sub/c.parquet"], path
        assert f"{link}/' is" in caplog.text
        caplog.clear()


def test_links_lead_to_files_and_each_is_taken_by_its_first_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("far/x.parquet", "far/deep/y.parquet", "far/_no/z.parquet", "one.parquet", "in/b.parquet"):
        write(tmp_path / name, 1)
    for link, target in (
        ("m", "far"),
        ("n", "far"),
        ("one.parquet", "one.parquet"),
        ("c.parquet", "in/b.parquet"),
    ):
        (tmp_path / "in" / link).symlink_to(tmp_path / target)
    found = find_input(str(tmp_path / "in"))
    assert [f.path for f in found.files] == ["b.parquet", "m/deep/y.parquet", "m/x.parquet", "one.parquet"]
    assert "'c.parquet' is 'b.parquet' by another name" in caplog.text
    assert "'n/' is 'm/' by another name" in caplog.text
    reader = RowReader(found.root, found.kind, found.files, ["v"])
    assert next(reader.read("m/deep/y.parquet", 0, 1)).to_pylist() == [{"v": 0}]
    reader.close()


@pytest.mark.parametrize("target", ["gone.parquet", "c.parquet"])
@pytest.mark.parametrize("path", ["in", "in/*.parquet", "in/**/*.parquet", "i*/*"])
def test_a_link_that_leads_nowhere_is_refused_by_name(tmp_path: Path, path: str, target: str) -> None:
    write(tmp_path / "in" / "a.parquet", 1)
    (tmp_path / "in" / "c.parquet").symlink_to(tmp_path / "in" / target)
    with pytest.raises(ConfigError, match=r"in/c\.parquet' .*link that leads nowhere"):
        find_input(str(tmp_path / path))
    (tmp_path / "in" / "c.parquet").rename(tmp_path / "in" / ".c.parquet")
    assert len(find_input(str(tmp_path / path)).files) == 1


@pytest.mark.parametrize("path", ["in", "in/*/*.parquet", "in/**/*.parquet"])
def test_a_folder_that_may_not_be_listed_is_refused_by_name(
    tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "in" / "a.parquet", 1)
    write(tmp_path / "in" / "sub" / "b.parquet", 1)
    listdir = os.listdir

    def refuse(folder: str) -> list[str]:
        # Not by its mode: who runs tests as root may list all.
        if str(folder).endswith("/sub"):
            raise PermissionError(errno.EACCES, "Permission denied", folder)
        return listdir(folder)

    monkeypatch.setattr(os, "listdir", refuse)
    with pytest.raises(ConfigError, match=r"in/sub' cannot be listed: Permission denied"):
        find_input(str(tmp_path / path))


def test_suffixes_are_compared_without_case(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", 1)
    write(tmp_path / "D.PARQUET", 1)
    assert [file.path for file in find_input(str(tmp_path)).files] == ["D.PARQUET", "a.parquet"]
    (tmp_path / "b.CSV").write_text("prompt\na\n")
    assert find_input(str(tmp_path / "b.CSV")).kind == "csv"
    with pytest.raises(ConfigError, match=r"holds parquet .* and csv \('b\.CSV'\)"):
        find_input(str(tmp_path))


@pytest.mark.parametrize("seed", range(4))
def test_globs_match_what_the_standard_library_matches(tmp_path: Path, seed: int) -> None:
    print("seed", seed)
    random_ = random.Random(seed)
    for _ in range(30):
        folders = random_.choices(["x", "y", "xy", ".h", "_u"], k=random_.randrange(3))
        path = tmp_path.joinpath(*folders, random_.choice(["a.csv", "b.csv", ".c.csv", "_d.csv"]))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("prompt\na\n")
    pieces = ["*", "**", "x*", "?", "[xy]", ".h", "_u", ".*", "x", "..", "*.csv", "a.csv"]
    for _ in range(100):
        pattern = os.path.join(tmp_path, "*", *random_.choices(pieces, k=random_.randrange(4)))
        root = tmp_path
        expected = {
            os.path.relpath(p, root) for p in glob.iglob(pattern, recursive=True) if os.path.isfile(p)
        }
        location, names = find_files(pattern, [])
        assert location.root == str(root)
        assert {os.path.realpath(root / n) for n in names} == {os.path.realpath(root / n) for n in expected}
        assert ".." in pattern or set(names) == expected, pattern


@pytest.mark.parametrize("name", ["nothing", "*.parquet", "empty"])
def test_no_match_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="matches no Parquet file"):
        find_input(str(tmp_path / name))


def test_what_is_not_parquet_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1 but not really")
    with pytest.raises(ConfigError, match=r"a\.parquet.*cannot be read as Parquet"):
        find_input(str(tmp_path))


def test_shards_are_fixed_slices_and_an_empty_file_is_one() -> None:
    files = [
        InputFile(path=path, num_rows=rows, num_bytes=1, footer="")
        for path, rows in (("a", 25), ("b", 0), ("c", 10))
    ]
    shards = plan_shards(files, 10)
    assert [(s.index, s.path, s.start, s.stop) for s in shards] == [
        (0, "a", 0, 10),
        (1, "a", 10, 20),
        (2, "a", 20, 25),
        (3, "b", 0, 0),
        (4, "c", 0, 10),
    ]
    assert shards[1].row_id(3) == "a#13"


@pytest.mark.parametrize("seed", range(6))
def test_any_order_of_slices_reads_the_right_rows(tmp_path: Path, seed: int) -> None:
    print("seed", seed)
    random_ = random.Random(seed)
    for name, first in (("a.parquet", 0), ("b.parquet", 1000)):
        write(tmp_path / name, 100, first, row_group_size=random_.choice([None, 1, 7, 30]))
    found = find_input(str(tmp_path))
    reader = RowReader(
        found.root, found.kind, found.files, ["v", "prompt"], batch_rows=random_.randrange(1, 12)
    )
    for _ in range(40):
        name, first = random_.choice([("a.parquet", 0), ("b.parquet", 1000)])
        start = random_.randrange(100)
        stop = random_.randrange(start, 101)
        batches = list(reader.read(name, start, stop))
        assert all(batch.schema.names == ["v", "prompt"] for batch in batches)
        assert [v for b in batches for v in b.column("v").to_pylist()] == list(
            range(first + start, first + stop)
        )
    reader.close()


def test_a_half_read_slice_does_not_disturb_the_next(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", 50)
    found = find_input(str(tmp_path))
    reader = RowReader(found.root, found.kind, found.files, ["v"], batch_rows=4)
    next(reader.read("a.parquet", 10, 30))
    values = [v for b in reader.read("a.parquet", 11, 20) for v in b.column("v").to_pylist()]
    assert values == list(range(11, 20))


def test_a_file_that_changes_while_the_job_runs_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", 5)
    found = find_input(str(tmp_path))
    write(tmp_path / "a.parquet", 5, first=7)
    reader = RowReader(found.root, found.kind, found.files, ["v"])
    with pytest.raises(ConfigError, match="changed"):
        list(reader.read("a.parquet", 0, 5))


def test_a_saved_dataset_is_a_source(tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict

    dataset = Dataset.from_dict({"prompt": [f"p{i}" for i in range(20)], "v": list(range(20))})
    dataset.shuffle(seed=1).save_to_disk(tmp_path / "ds")
    found = find_input(str(tmp_path / "ds"))
    assert (found.kind, [f.path for f in found.files]) == ("dataset", ["ds"])
    assert found.files[0].num_rows == 20
    reader = RowReader(found.root, found.kind, found.files, ["v"], batch_rows=3)
    values = [v for b in reader.read("ds", 5, 15) for v in b.column("v").to_pylist()]
    assert values == dataset.shuffle(seed=1)["v"][5:15]
    DatasetDict(train=dataset).save_to_disk(tmp_path / "dict")
    with pytest.raises(ConfigError, match="one split"):
        find_input(str(tmp_path / "dict"))

"""Input from and output to a store that speaks S3, with conditional PUT and without."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import s3fs
from moto.server import ThreadedMotoServer

from engine import ConfigError
from pipelines.commits import check_destination, try_read_commit
from pipelines.driver import Outcome
from pipelines.manifest import OutputFolder, check_folder, try_link
from pipelines.object_store import check_store, put_once
from pipelines.plan import PartOptions, Plan
from pipelines.report import read_status
from pipelines.source import RowReader, find_input
from tests.fake_engine import expected_text
from tests.small_jobs import check_answers, make_plan, random_prompts, start_run, write_prompts


@pytest.fixture(scope="module")
def server() -> Iterator[s3fs.S3FileSystem]:
    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    host, port = moto.get_host_and_port()
    with pytest.MonkeyPatch.context() as environment:
        for name, value in {
            "AWS_ENDPOINT_URL": f"http://{host}:{port}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
        }.items():
            environment.setenv(name, value)
        s3fs.S3FileSystem.clear_instance_cache()
        yield s3fs.S3FileSystem()
    s3fs.S3FileSystem.clear_instance_cache()
    moto.stop()


@pytest.fixture
def store(server: s3fs.S3FileSystem) -> s3fs.S3FileSystem:
    """A store with an empty bucket named ``box``."""
    server.invalidate_cache()
    if server.exists("box"):
        server.rm("box", recursive=True)
    server.mkdir("box")
    return server


def read_parts(store: s3fs.S3FileSystem) -> pa.Table:
    store.invalidate_cache()
    return pa.concat_tables(
        [pq.read_table(store.open(path)) for path in sorted(store.glob("box/out/*.parquet"))]
    )


def test_a_job_from_a_store_to_a_store(store: s3fs.S3FileSystem, tmp_path: Path) -> None:
    prompts = random_prompts(random.Random(0), 25)
    write_prompts(tmp_path / "in.parquet", prompts, tag=[f"t{i}" for i in range(25)])
    store.put_file(str(tmp_path / "in.parquet"), "box/in/sub/rows.parquet")
    folder = OutputFolder(tmp_path / "state")
    plan = make_plan("s3://box/in", 10, parts=PartOptions(url="s3://box/out"))
    check_destination(folder, plan)
    driver, _ = start_run(folder, plan)
    assert driver.run() is Outcome.COMMITTED
    output = read_parts(store)
    check_answers(output, prompts)
    assert output.column("row_id").to_pylist() == [f"sub/rows.parquet#{i}" for i in range(25)]
    assert sorted(store.find("box/out")) == [f"box/out/part-0000{i}-of-00003.parquet" for i in range(3)]
    assert read_status(folder.path).num_ok == 25
    check_folder(folder, plan)
    check_destination(folder, plan)
    start_run(folder, plan)[0].run()  # a finished job has nothing to do, and no part is written again
    assert read_status(folder.path).num_run == 0


@pytest.mark.parametrize("seed", range(3))
def test_drivers_and_ranks_are_lost_around_a_store(
    store: s3fs.S3FileSystem, tmp_path: Path, seed: int
) -> None:
    print("seed", seed)
    random_ = random.Random(seed)
    prompts = random_prompts(random_, 40)
    write_prompts(tmp_path / "in.parquet", prompts)
    folder = OutputFolder(tmp_path / "state")
    part_format = random_.choice(["parquet", "jsonl"])
    plan = make_plan(tmp_path / "in.parquet", 10, parts=PartOptions(url="s3://box/out", format=part_format))
    outcome = None
    while outcome is not Outcome.COMMITTED:
        driver, fleet = start_run(folder, plan, random_=random_, chance=0.03)
        wait, num_left = fleet.wait, iter(range(random_.randrange(5, 30), -1, -1))

        def wait_or_die(timeout_s: float, wait: Any = wait, num_left: Any = num_left) -> list[Any]:
            if next(num_left, 0) == 0:
                raise KeyboardInterrupt
            return list(wait(timeout_s))

        fleet.wait = wait_or_die  # type: ignore[method-assign]
        try:
            outcome = driver.run()
        except KeyboardInterrupt:
            continue
    if part_format == "parquet":
        check_answers(read_parts(store), prompts)
    else:
        lines = "".join(store.cat_file(path).decode() for path in sorted(store.find("box/out"))).splitlines()
        assert [f'"row_id": "in.parquet#{i}"' in line for i, line in enumerate(lines)] == [True] * 40
        assert all(expected_text(prompt) in line for prompt, line in zip(prompts, lines, strict=True))


def two_rows(tmp_path: Path) -> tuple[OutputFolder, Plan]:
    """A job of one part, from a folder to the store."""
    write_prompts(tmp_path / "in.parquet", [[1], [2]])
    plan = make_plan(tmp_path / "in.parquet", parts=PartOptions(url="s3://box/out"))
    return OutputFolder(tmp_path / "state"), plan


def test_a_part_that_reached_the_store_before_the_rank_died_is_not_written_again(
    store: s3fs.S3FileSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, plan = two_rows(tmp_path)

    def put_and_die(url: str, source: Path, owner: str) -> None:
        put_once(url, source, owner)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("pipelines.commits.put_once", put_and_die)
        with pytest.raises(KeyboardInterrupt):
            start_run(folder, plan)[0].run()
    first = store.info("box/out/part-00000-of-00001.parquet", refresh=True)
    assert try_read_commit(folder, plan, 0) is None
    assert start_run(folder, plan)[0].run() is Outcome.COMMITTED
    again = store.info("box/out/part-00000-of-00001.parquet", refresh=True)
    assert (again["ETag"], again["LastModified"]) == (first["ETag"], first["LastModified"])
    assert read_status(folder.path).num_ok == 2


def test_a_part_whose_file_a_newer_run_took_away_is_not_said_to_be_published(
    store: s3fs.S3FileSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run begins by removing what is half written, also while a rank of an older one publishes."""
    folder, plan = two_rows(tmp_path)
    num_links = 0

    def link_and_lose(source: Path, target: Path) -> bool:
        nonlocal num_links
        is_first = try_link(source, target)
        num_links += 1
        if num_links == 1:
            for leftover in folder.temporary.iterdir():
                leftover.unlink()
        return is_first

    monkeypatch.setattr("pipelines.commits.try_link", link_and_lose)
    assert start_run(folder, plan)[0].run() is Outcome.COMMITTED
    assert num_links > 1
    check_answers(read_parts(store), [[1], [2]])


def test_a_name_is_written_once(store: s3fs.S3FileSystem, tmp_path: Path) -> None:
    (tmp_path / "one").write_bytes(b"one")
    (tmp_path / "two").write_bytes(b"two")
    put_once("s3://box/x", tmp_path / "one", "me")
    put_once("s3://box/x", tmp_path / "one", "me")
    for source, owner in (("two", "me"), ("one", "you")):
        with pytest.raises(ConfigError, match="did not write"):
            put_once("s3://box/x", tmp_path / source, owner)
    assert store.cat_file("box/x") == b"one"


def test_a_store_that_ignores_the_condition_is_refused(
    store: s3fs.S3FileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe_file = store.pipe_file

    def ignore(path: str, value: bytes, mode: str = "overwrite") -> Any:
        return pipe_file(path, value)

    check_store("s3://box/out")
    monkeypatch.setattr(store, "pipe_file", ignore)
    with pytest.raises(ConfigError, match="this store ignores If-None-Match"):
        check_store("s3://box/out")
    assert not store.find("box"), "the probe is gone"


@pytest.mark.parametrize(
    ("url", "says"),
    [("s3://nobucket/out", "cannot be written"), ("memory://out", "a store with conditional PUT")],
)
def test_stores_that_are_refused(store: s3fs.S3FileSystem, url: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        check_store(url)


def test_what_else_lies_there_is_refused(store: s3fs.S3FileSystem, tmp_path: Path) -> None:
    write_prompts(tmp_path / "in.parquet", [[1]])
    plan = make_plan(tmp_path / "in.parquet", parts=PartOptions(url="s3://box/out"))
    store.pipe_file("box/out/_SUCCESS", b"")
    check_destination(OutputFolder(tmp_path / "state"), plan)
    store.pipe_file("box/out/part-00000-of-00001.parquet", b"of another job")
    with pytest.raises(ConfigError, match=r"holds 'part-00000-of-00001\.parquet', which is not this job's"):
        check_destination(OutputFolder(tmp_path / "state"), plan)


def test_text_files_in_a_store(store: s3fs.S3FileSystem) -> None:
    store.pipe_file("box/in/a.csv", b"prompt\n" + b"".join(b"%d\n" % i for i in range(500)))
    store.pipe_file("box/in/a.jsonl", b"".join(b'{"prompt": "%d"}\n' % i for i in range(500)))
    for name in ("a.csv", "a.jsonl"):
        found = find_input(f"s3://box/in/{name}")
        reader = RowReader(found.root, found.kind, found.files, ["prompt"])
        for start, stop in ((400, 440), (7, 8)):
            values = [v for batch in reader.read(name, start, stop) for v in batch.column(0).to_pylist()]
            assert values == list(map(str, range(start, stop)))
        reader.close()


@pytest.mark.parametrize("url", ["s3://nobucket/in", "s3://nobucket/in/*.parquet"])
def test_a_bucket_that_is_not_there(store: s3fs.S3FileSystem, url: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot be listed|matches no Parquet file"):
        find_input(url)

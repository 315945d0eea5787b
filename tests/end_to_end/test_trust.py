"""What a job trusts: nothing in a model folder or a dataset is run, nothing is written elsewhere, no port is open."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from engine import ConfigError, EngineConfig
from engine.llm_engine import LLMEngine
from jobs.config import load_job
from jobs.job_plan import plan_job
from pipelines.commits import try_read_commit
from pipelines.manifest import OutputFolder, load_plan, write_plan
from pipelines.plan import PartOptions
from pipelines.source import find_input
from tests.conftest import ROOT
from tests.marked_processes import marked_processes
from tests.small_jobs import make_plan, random_prompts, start_run, write_prompts

LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
TINY = ROOT / "tests" / "data" / "tiny"


class Bomb:
    """Unpickled, it leaves a file behind."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self._path,))


def test_pickles_and_code_in_a_model_folder_are_never_opened(tmp_path: Path) -> None:
    model, boom = tmp_path / "model", tmp_path / "boom"
    shutil.copytree(TINY, model, ignore=shutil.ignore_patterns("golden"))
    pickle.loads(pickle.dumps(Bomb(boom)))
    boom.unlink()  # it works
    for name in ("pytorch_model.bin", "model.pt", "consolidated.00.pth", "tokenizer.pkl", "data.pickle"):
        (model / name).write_bytes(pickle.dumps(Bomb(boom)))
    for name in ("modeling_evil.py", "configuration_evil.py", "tokenization_evil.py", "conftest.py"):
        (model / name).write_text(f"open({str(boom)!r}, 'w').close()\n")
    config = json.loads((model / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "configuration_evil.E", "AutoModelForCausalLM": "modeling_evil.E"}
    (model / "config.json").write_text(json.dumps(config))
    write_prompts(tmp_path / "in" / "a.parquet", [[1, 2]])
    flags = {
        "model.path": str(model),
        "input.path": str(tmp_path / "in"),
        "output.path": str(tmp_path / "out"),
    }
    plan_job(load_job(None, [], flags))
    LLMEngine.build(EngineConfig(model=str(model), device="cpu", max_num_seqs=1, max_model_len=64))
    assert not boom.exists()


def test_code_in_a_dataset_is_not_run(tmp_path: Path) -> None:
    boom, data = tmp_path / "boom", tmp_path / "data"
    data.mkdir()
    (data / "data.py").write_text(f"open({str(boom)!r}, 'w').close()\n")
    (data / "a.pkl").write_bytes(pickle.dumps(Bomb(boom)))
    for path in (str(data), f"hf://{data}", f"hf://{data}:train", str(data / "a.pkl")):
        with pytest.raises(ConfigError):
            find_input(path)
    assert not boom.exists()


@pytest.mark.parametrize(
    "tag", ["!!python/object/apply:os.mkdir", "!!python/object/new:os.mkdir", "!!python/name:os.mkdir"]
)
def test_a_job_file_makes_no_objects(tmp_path: Path, tag: str) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(f"model: {tag} [{tmp_path}/boom]\n")
    with pytest.raises(ConfigError, match="not valid YAML"):
        load_job(file)
    with pytest.raises(ConfigError, match="not valid YAML"):
        load_job(None, [f"model.path={tag} [{tmp_path}/boom]"])
    assert not (tmp_path / "boom").exists()


@pytest.mark.parametrize(
    "name", ["../evil.parquet", "/tmp/evil.parquet", "a/../../evil.parquet", "../x", "a//b"]
)
def test_names_in_a_manifest_stay_in_the_output_folder(tmp_path: Path, name: str) -> None:
    folder = OutputFolder(tmp_path / "deep" / "out")
    write_prompts(tmp_path / "in" / "a.parquet", [[1]])
    plan = make_plan(tmp_path / "in", parts=PartOptions(layout="mirror"))
    write_plan(folder, plan)
    tree = json.loads(folder.plan_file.read_text())
    tree["files"][0]["path"] = name
    folder.plan_file.write_text(json.dumps(tree))
    with pytest.raises(ConfigError, match="leads out of the output folder"):
        try_read_commit(folder, load_plan(folder), 0)


def test_a_commit_record_names_no_file_but_its_own(tmp_path: Path) -> None:
    folder = OutputFolder(tmp_path / "out")
    write_prompts(tmp_path / "in" / "a.parquet", [[1]])
    plan = make_plan(tmp_path / "in", parts=PartOptions(format="jsonl"))
    start_run(folder, plan)[0].run()
    record = json.loads(folder.commit_file(0).read_text())
    (own,) = record["files"]
    for files, says in (
        ({"../evil.jsonl": "x"}, "no part of it"),
        ({"part-00007-of-00008.jsonl": "x"}, "no part of it"),
    ):
        folder.commit_file(0).write_text(json.dumps({**record, "files": files}))
        with pytest.raises(ConfigError, match=says):
            try_read_commit(folder, plan, 0)
    folder.part_file(own).unlink()
    unpublished = {**record, "files": {own: "../../../etc/hostname"}, "is_published": False}
    folder.commit_file(0).write_text(json.dumps(unpublished))
    with pytest.raises(ConfigError, match="leads out of the folder"):
        folder.temporary_file("../../../etc/hostname")


def listening(pids: list[int]) -> dict[str, str]:
    """The addresses that these processes listen on, and who does."""
    owners: dict[str, int] = {}
    for pid in pids:
        try:
            links = [os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()]
        except OSError:
            continue
        owners |= {link[8:-1]: pid for link in links if link.startswith("socket:[")}
    found = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and words[9] in owners:
                title = Path(f"/proc/{owners[words[9]]}/cmdline").read_bytes()[:80]
                found[words[1].rpartition(":")[0]] = str(title)
    return found


@pytest.mark.ray
@pytest.mark.timeout(300)
def test_a_ray_of_our_own_listens_on_the_loopback_alone(tmp_path: Path) -> None:
    write_prompts(tmp_path / "in" / "a.parquet", random_prompts(random.Random(1), 400))
    mark = uuid.uuid4().hex
    dropped = ("RAY_ADDRESS", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER")
    environment = {k: v for k, v in os.environ.items() if k not in dropped}
    environment |= {"PYTHONPATH": str(ROOT), "TEST_JOB_MARK": mark}
    module = ["-m", "tests.end_to_end.run_fake_job", "build_slow"]
    arguments = [str(ROOT / "examples" / "bard" / "model"), str(tmp_path / "in"), str(tmp_path / "out"), "2"]
    driver = subprocess.Popen([sys.executable, *module, *arguments], cwd=ROOT, env=environment)
    try:
        deadline = time.monotonic() + 120
        while not list(tmp_path.glob("out/_overnight/journals/*/*.journal")):
            assert driver.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        found = listening(marked_processes(mark))
        assert found, "Ray listens somewhere"
        assert found.keys() <= LOOPBACK, found
    finally:
        driver.send_signal(signal.SIGTERM)
        assert driver.wait(60) in (0, 75)

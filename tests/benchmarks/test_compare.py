"""Two sides in turns: revisions or folders, each with its own code, and what is said about their bits."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from benchmarks import compare

SUITE = """
import json, sys
from pathlib import Path
log, value = Path(sys.argv[-1]), {value}
log.write_text(log.read_text() + str(value))
if value == 9:
    sys.exit("no such GPU")
print("a line")
print(json.dumps({{"workload": {{}}, "figures": {{"ms": value}}, "hashes": {{"tokens": "t", "layer 1": "{bits}"}}}}))
"""


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A git repository of three revisions, and the log in which their suites write."""
    root = tmp_path / "repository"
    (root / "benchmarks").mkdir(parents=True)
    (root / "benchmarks" / "__init__.py").touch()
    (tmp_path / "log").write_text("")

    def git(*words: str) -> None:
        identity = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
        subprocess.run(["git", *identity, *words], cwd=root, check=True, capture_output=True)

    git("init")
    for value, bits in ((1, "same"), (2, "same"), (3, "other"), (9, "")):
        (root / "benchmarks" / "__main__.py").write_text(SUITE.format(value=value, bits=bits))
        git("add", ".")
        git("commit", "-m", str(value))
        git("tag", f"v{value}")
    monkeypatch.setattr(compare, "ROOT", root)
    return tmp_path


def run(repository: Path, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[str, dict[str, object]]:
    compare.main([*words, "--suite", "step", "--log", str(repository / "log")])
    output = capsys.readouterr().out
    return output, json.loads(output.splitlines()[-1])


def test_revisions_run_in_turns_and_agree(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output, result = run(repository, capsys, "v1", "v2", "--rounds", "3")
    assert (repository / "log").read_text() == "122112"
    assert "2.000" in output
    assert "tokens: all 1 agree" in output
    assert "layer: all 1 agree" in output
    assert [run["figures"]["ms"] for run in result["results"]["B"]] == [2, 2, 2]  # type: ignore[index]
    listed = subprocess.run(
        ["git", "worktree", "list"], cwd=compare.ROOT, capture_output=True, text=True
    ).stdout
    assert len(listed.splitlines()) == 1, "the worktrees are gone"


def test_other_bits_are_named(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output, _ = run(repository, capsys, "v1", "v3", "--rounds", "1")
    assert "tokens: all 1 agree" in output
    assert "layer: 1 of 1 DIFFER, the first is 'layer 1'" in output


def test_a_folder_stands_for_itself(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = repository / "copy"
    (folder / "benchmarks").mkdir(parents=True)
    (folder / "benchmarks" / "__init__.py").touch()
    (folder / "benchmarks" / "__main__.py").write_text(SUITE.format(value=4, bits="same"))
    output, _ = run(repository, capsys, "v2", str(folder), "--rounds", "1")
    assert (repository / "log").read_text() == "24"
    assert "layer: all 1 agree" in output


@pytest.mark.parametrize(("side", "said"), [("v9", "no such GPU"), ("nothing", "neither a folder")])
def test_a_side_that_cannot_run_ends_it(repository: Path, side: str, said: str) -> None:
    with pytest.raises(SystemExit) as ended:
        compare.main(["v1", side, "--suite", "step", "--rounds", "1", "--log", str(repository / "log")])
    assert said in str(ended.value.code)
    assert not list((compare.ROOT / ".git").glob("worktrees/*"))


def test_a_side_that_differs_from_itself_and_other_workloads_are_told() -> None:
    def side(*hashes: str, layers: int = 1) -> list[dict[str, object]]:
        return [{"workload": {"layers": layers}, "hashes": {"tokens": value}} for value in hashes]

    lines = compare.agreement({"A": side("x", "y"), "B": side("x", "x")})
    assert lines[0].startswith("A DIFFERS FROM ITSELF")
    assert lines[1] == "tokens: all 1 agree"
    assert "workloads differ" in compare.agreement({"A": side("x"), "B": side("x", layers=2)})[0]

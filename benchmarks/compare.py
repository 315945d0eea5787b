"""Two revisions, one suite: run in turns on one machine, so that what disturbs one disturbs the other.

Each side is a git revision, checked out into a temporary folder, or a folder with the project in it (on a
machine without git, or for what is not committed yet). Each runs its own engine, kernels and suite; options
that are not listed here go to the suite. Prints the median and spread of every figure, their ratio, and
whether the two agree in tokens, in layers' outputs and in what the cache holds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.environment import describe

SUITES = ("step", "tiny", "kernels")
ROOT = Path(__file__).resolve().parents[1]
HASH_GROUPS = ("tokens", "logits", "layer", "cache")


class SuiteFailed(Exception):
    """A side's suite ended without a result."""


@contextlib.contextmanager
def checked_out(side: str, scratch: Path, name: str) -> Iterator[Path]:
    """The folder of a side: itself, or a worktree that lives as long as the comparison."""
    if (Path(side) / "benchmarks" / "__main__.py").is_file():
        yield Path(side).resolve()
        return
    folder = scratch / name
    added = _git("worktree", "add", "--detach", str(folder), side)
    if added.returncode:
        raise SuiteFailed(
            f"{side} is neither a folder with the project nor a revision: {added.stderr.strip()}"
        )
    try:
        yield folder
    finally:
        _git("worktree", "remove", "--force", str(folder))


def _git(*words: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:
        return subprocess.CompletedProcess(words, 1, "", "git is not installed")


def run_suite(folder: Path, suite: str, options: list[str]) -> dict[str, Any]:
    """The suite's last line as JSON. Raises ``SuiteFailed`` with the end of what it said."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", suite, *options],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": _python_path(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise SuiteFailed(f"{suite} in {folder} ended with {done.returncode}:\n{done.stdout[-3000:]}")
    result: dict[str, Any] = json.loads(lines[-1])
    return result


def _python_path(folder: Path) -> str:
    """The side's own code first; of what is there already, this checkout must not stand before it."""
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join([str(folder), *(p for p in inherited if p and Path(p).resolve() != ROOT)])


def measure(folders: dict[str, Path], suite: str, options: list[str], rounds: int) -> dict[str, list[Any]]:
    """Every side's results, run A B, then B A, then A B ..."""
    results: dict[str, list[Any]] = {name: [] for name in folders}
    for number in range(rounds):
        for name in sorted(folders, reverse=number % 2 == 1):
            results[name].append(run_suite(folders[name], suite, options))
            print(f"round {number + 1} of {rounds}: {name} done", flush=True)
    return results


def print_figures(results: dict[str, list[Any]]) -> None:
    """Median, lowest and highest of each figure on both sides, and B's median over A's."""
    common = [name for name in results["A"][0]["figures"] if name in results["B"][0]["figures"]]
    print(f"{'figure':44} {'A median (lowest..highest)':>34} {'B median (lowest..highest)':>34} {'B / A':>7}")
    for name in common:
        cells, medians = [], []
        for side in ("A", "B"):
            values = [result["figures"][name] for result in results[side]]
            medians.append(statistics.median(values))
            cells.append(f"{medians[-1]:.4g} ({min(values):.4g}..{max(values):.4g})")
        ratio = f"{medians[1] / medians[0]:7.3f}" if medians[0] else "      -"
        print(f"{name:44} {cells[0]:>34} {cells[1]:>34} {ratio}")
    for side in ("A", "B"):
        alone = sorted(set(results[side][0]["figures"]) - set(common))
        if alone:
            print(f"only {side} has: {', '.join(alone)}")


def agreement(results: dict[str, list[Any]]) -> list[str]:
    """In a line each: does a side agree with itself, and do the sides with each other?"""
    lines = []
    for side, runs in results.items():
        if any(run["hashes"] != runs[0]["hashes"] for run in runs):
            lines.append(f"{side} DIFFERS FROM ITSELF between rounds: its bits are not reproducible")
    first = {side: runs[0] for side, runs in results.items()}
    if first["A"]["workload"] != first["B"]["workload"]:
        return [*lines, f"workloads differ, hashes are not compared: {first['A']['workload']} and "
                f"{first['B']['workload']}"]  # fmt: skip
    hashes = {side: run["hashes"] for side, run in first.items()}
    if not hashes["A"] and not hashes["B"]:
        return [*lines, "this suite has no hashes: each op's contract compares its bits"]
    for group in HASH_GROUPS:
        names = [name for name in {**hashes["A"], **hashes["B"]} if name.split()[0] == group]
        differing = [name for name in names if hashes["A"].get(name) != hashes["B"].get(name)]
        if differing:
            lines.append(f"{group}: {len(differing)} of {len(names)} DIFFER, the first is {differing[0]!r}")
        elif names:
            lines.append(f"{group}: all {len(names)} agree")
    return lines


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("a", metavar="REV_A", help="a git revision or a folder")
    parser.add_argument("b", metavar="REV_B", help="the same")
    parser.add_argument("--suite", choices=SUITES, required=True)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each side (3)")
    args, options = parser.parse_known_args(arguments)
    if args.rounds < 1:
        parser.error(f"--rounds is {args.rounds}, expected at least 1")
    print(describe(), flush=True)
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        try:
            folders = {
                name: stack.enter_context(checked_out(side, Path(scratch), name))
                for name, side in (("A", args.a), ("B", args.b))
            }
            results = measure(folders, args.suite, options, args.rounds)
        except SuiteFailed as error:
            sys.exit(str(error))
    print(f"A is {args.a}, B is {args.b}; {args.suite} {' '.join(options)}".rstrip())
    print_figures(results)
    print("\n".join(agreement(results)))
    print(json.dumps({"suite": args.suite, "a": args.a, "b": args.b, "results": results}))


if __name__ == "__main__":
    main()

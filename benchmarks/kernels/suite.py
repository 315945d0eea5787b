"""Runs every op's benchmark, each in a process of its own, and gathers what they measured.

A benchmark runs its op's contract before it times anything and ends with one JSON line. Public kernels are
timed in the same process as ours where their packages are importable (``deep_gemm``, ``triton_kernels``) or
named (``FLASHMLA_C``, a library's path).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.environment import describe, device_name

HERE = Path(__file__).parent


def benchmark_names() -> list[str]:
    """Ops that have a benchmark."""
    return sorted(path.stem.removeprefix("bench_") for path in HERE.glob("bench_*.py"))


def figures_of(result: Any, prefix: str) -> dict[str, float]:
    """Every number of a nested result by its dotted path; what was not measured (null) is left out."""
    if isinstance(result, bool) or result is None or isinstance(result, str):
        return {}
    if isinstance(result, (int, float)):
        return {prefix: float(result)}
    items = result.items() if isinstance(result, dict) else enumerate(result)
    return {k: v for name, value in items for k, v in figures_of(value, f"{prefix}.{name}").items()}


def run_benchmark(name: str, options: list[str]) -> dict[str, Any] | None:
    """Run it, show what it prints, and return its last JSON line; None where it failed."""
    command = [sys.executable, "-u", "-m", f"benchmarks.kernels.bench_{name}", *options]
    last = None
    with subprocess.Popen(command, cwd=HERE.parents[1], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                last = line
            else:
                print(line, end="", flush=True)
    return json.loads(last) if process.returncode == 0 and last else None


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks kernels",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", default="", help=f"some of {', '.join(benchmark_names())}, with commas")
    parser.add_argument("--timing-only", action="store_true", help="no contracts first")
    args = parser.parse_args(arguments)
    names = args.only.split(",") if args.only else benchmark_names()
    unknown = sorted(set(names) - set(benchmark_names()))
    if unknown:
        parser.error(f"no benchmark is named {', '.join(unknown)}: there are {', '.join(benchmark_names())}")
    if not torch.cuda.is_available():
        sys.exit("kernels are timed on a GPU, and this machine has none that torch can use")
    print(describe(), flush=True)
    figures: dict[str, float] = {}
    failed = []
    for name in names:
        print(f"--- {name}", flush=True)
        result = run_benchmark(name, ["--timing-only"] if args.timing_only else [])
        if result is None:
            failed.append(name)
        else:
            figures |= figures_of(result, name)
    for figure, value in figures.items():
        print(f"{figure:64} {value:12.4f}")
    if failed:
        print(f"FAILED, no figures: {', '.join(failed)}")
    facts = {"suite": "kernels", "device": device_name(), "workload": {"ops": names}}
    print(json.dumps(facts | {"figures": figures, "hashes": {}}))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()

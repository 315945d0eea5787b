"""What every op's benchmark does first: the op's contract tests, on this GPU. A wrong kernel has no speed."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
MAX_WORKERS = 12
"""Most of a contract's time goes into compiling, one process a kernel."""


def require_contracts(description: str | None, *ops: str) -> None:
    """Read the command line, and end here if there is no GPU or a test in tests/kernels/test_OP.py is red."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.kernels.{Path(sys.argv[0]).stem}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--timing-only", action="store_true", help="no contract tests first")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("kernels are timed on a GPU, and this machine has none that torch can use")
    if args.timing_only:
        return
    files = [str(Path("tests") / "kernels" / f"test_{op}.py") for op in ops]
    workers = str(min(MAX_WORKERS, len(os.sched_getaffinity(0))))
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-n", workers, *files]
    if subprocess.run(command, cwd=ROOT, env=os.environ | {"REQUIRE_GPU": "1"}).returncode:
        sys.exit("a contract is red: nothing is timed")

"""A run of GPU tests on a machine without a GPU is green only when nobody asked for one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize(("required", "exit_code"), [("0", 0), ("1", 1)])
def test_a_skip_for_want_of_a_gpu_fails_where_one_is_required(required: str, exit_code: int) -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "REQUIRE_GPU": required}
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-m", "gpu", "tests/engine/test_sampler.py"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == exit_code, done.stdout
    assert "needs 1 CUDA device(s), this machine has 0" in done.stdout

"""The installed Triton compiles Hopper's kernels, on a machine without a GPU too: Gluon's names change."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.hopper_compilation import CASES


@pytest.mark.parametrize("name", CASES)
def test_a_kernel_compiles_to_machine_code(name: str, tmp_path: Path) -> None:
    settings = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.kernels.hopper_compilation", name]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, env=os.environ | settings, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    assert f"{name}: " in done.stdout

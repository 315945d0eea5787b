"""Some of ``make torture`` for every change: thirty harms, without Ray."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest

from tests.conftest import ROOT


@pytest.mark.kill
@pytest.mark.slow
def test_thirty_harms_lose_and_double_nothing() -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    print("seed", seed)
    command = [sys.executable, "-m", "tests.torture", "--scripted", "30", "--seed", str(seed)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)
    assert "each row in its output once" in done.stdout

"""What all tests share: one CPU thread each, the folders of test data, and the rule for GPU tests.

A GPU test is skipped where there are too few devices, and says so; under REQUIRE_GPU=1 it fails instead,
whatever it is that skips it.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path

import pytest

# Before anything imports torch: row-invariant CPU arithmetic needs one intra-op thread.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"
# Ray's workers are nicer than all else by 15: ranks would hardly get on beside another process of the tests.
os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 (this is how Ray spells it)
if not any(Path("/dev").glob("nvidia[0-9]*")):
    # Before anything imports triton: without a GPU its interpreter runs the kernels that it can.
    os.environ.setdefault("TRITON_INTERPRET", "1")
    # It multiplies by numpy, whose OpenBLAS has kernels (Haswell's, Zen's) that give a row other bits at another
    # place of a tile. These do not, and every x86-64 has them; nothing else here multiplies by numpy.
    os.environ["OPENBLAS_CORETYPE"] = "Nehalem"

ROOT = Path(__file__).resolve().parents[1]
NUM_GPUS_NEEDED = {"gpu": 1, "multi_gpu": 2}


@pytest.fixture(scope="session")
def bard_path() -> Path:
    """The small trained model."""
    return ROOT / "examples" / "bard" / "model"


def is_gpu_required() -> bool:
    return os.environ.get("REQUIRE_GPU") == "1"


def pytest_runtest_setup(item: pytest.Item) -> None:
    needed = max((n for marker, n in NUM_GPUS_NEEDED.items() if item.get_closest_marker(marker)), default=0)
    if not needed:
        return
    import torch

    present = torch.cuda.device_count()
    if present < needed:
        pytest.skip(f"needs {needed} CUDA device(s), this machine has {present}")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.CallInfo[None], None]:  # type: ignore[type-arg]
    outcome = yield
    report = outcome.get_result()
    is_gpu_test = any(item.get_closest_marker(marker) for marker in NUM_GPUS_NEEDED)
    if is_gpu_test and report.skipped and is_gpu_required():
        report.outcome = "failed"
        report.longrepr = f"skipped under REQUIRE_GPU=1: {call_reason(report.longrepr)}"


def call_reason(longrepr: object) -> str:
    return str(longrepr[2]) if isinstance(longrepr, tuple) else str(longrepr)

"""The import rule, read off the source: jobs -> pipelines -> engine's public face -> kernels.

Every import statement counts, also one inside a function; an import under TYPE_CHECKING is one too.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import engine

ROOT = Path(__file__).resolve().parents[1]
OURS = ("jobs", "pipelines", "engine", "kernels")
MAY_IMPORT = {
    "jobs": {"jobs", "pipelines", "engine"},
    "pipelines": {"pipelines", "engine"},
    "engine": {"engine", "kernels"},
    "kernels": {"kernels"},
}
PUBLIC_FACE = {"engine", "engine.api", "engine.config", "engine.errors"}
BUILDS_ENGINES = {"jobs/rank.py"}
"""The rank actor alone may name the real engine's module."""

HOST_ROOTS = ("api", "config", "errors", "sequence", "block_manager", "scheduler", "layer_rows")
"""These files of the engine, and every file of ours that they reach, import neither torch nor triton."""

DEVICE_LIBRARIES = {"torch", "triton"}


def source_files() -> list[str]:
    paths = (path for folder in OURS for path in (ROOT / folder).rglob("*.py"))
    return sorted(str(path.relative_to(ROOT)) for path in paths)


def imported_modules(source: str) -> Iterator[str]:
    """Absolute names of imported modules; ``from a import b`` yields ``a`` and ``a.b``."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def file_of(name: str) -> str | None:
    """The file of a module of ours; None for what is no module of ours."""
    path = ROOT.joinpath(*name.split("."))
    for candidate in (path.with_suffix(".py"), path / "__init__.py"):
        if name.split(".")[0] in OURS and candidate.is_file():
            return str(candidate.relative_to(ROOT))
    return None


def host_side() -> set[str]:
    reached: set[str] = set()
    waiting = [f"engine/{name}.py" for name in HOST_ROOTS] + ["engine/__init__.py"]
    while waiting:
        path = waiting.pop()
        reached.add(path)
        found = map(file_of, imported_modules((ROOT / path).read_text(encoding="utf-8")))
        waiting += [file for file in found if file is not None and file not in reached]
    return reached


def is_public(name: str) -> bool:
    """Whether ``name`` is the engine's public face, or something that it exports."""
    parent, _, attribute = name.rpartition(".")
    return name in PUBLIC_FACE or parent in PUBLIC_FACE - {"engine"} or attribute in engine.__all__


def violations(path: str, source: str) -> list[str]:
    folder = path.split("/")[0]
    is_driver_side = folder in ("jobs", "pipelines")
    found = []
    for name in imported_modules(source):
        top = name.split(".")[0]
        if top in OURS and top not in MAY_IMPORT[folder]:
            found.append(f"{folder} may not import {name}")
        is_the_builder = path in BUILDS_ENGINES and name.startswith(
            ("engine.llm_engine", "engine.device", "engine.parallel")
        )
        if top == "engine" and is_driver_side and not is_public(name) and not is_the_builder:
            found.append(f"{folder} knows the engine by its public face, not {name}")
        if top in DEVICE_LIBRARIES and is_driver_side:
            found.append(f"{folder} may not import {name}")
        if folder == "kernels" and top not in {*sys.stdlib_module_names, "kernels", *DEVICE_LIBRARIES}:
            found.append(f"kernels may not import {name}")
    return found


@pytest.mark.parametrize("path", source_files())
def test_a_file_imports_only_what_it_may(path: str) -> None:
    assert violations(path, (ROOT / path).read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("pipelines/x.py", "import jobs.config"),
        ("pipelines/x.py", "import torch"),
        ("jobs/x.py", "def f():\n    import torch"),
        ("jobs/x.py", "from kernels.tree_sum import tree_sum"),
        ("jobs/cli.py", "from engine import llm_engine"),
        ("pipelines/x.py", "from engine.sampler import Sampler"),
        ("engine/x.py", "from pipelines.prompt import render"),
        ("kernels/x.py", "import numpy"),
        ("kernels/x.py", "import engine"),
    ],
)
def test_the_rule_sees_a_breach(path: str, source: str) -> None:
    assert violations(path, source)


def test_the_engines_host_side_reaches_no_device_library() -> None:
    files = host_side()
    assert "engine/scheduler.py" in files
    imports = {(path, name) for path in files for name in imported_modules((ROOT / path).read_text())}
    assert {(path, name) for path, name in imports if name.split(".")[0] in DEVICE_LIBRARIES} == set()


def test_importing_the_driver_side_loads_no_device_library() -> None:
    folders = ("jobs", "pipelines")
    modules = [path[:-3].replace("/", ".") for path in source_files() if path.split("/")[0] in folders]
    code = (
        f"import sys, {', '.join(modules)}; sys.exit(not sys.modules.keys().isdisjoint({DEVICE_LIBRARIES}))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=150).returncode == 0

"""What a number was measured on: printed by every benchmark before its results."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from datetime import date
from pathlib import Path

import torch
import triton


def device_name() -> str:
    """The GPU's name, or the CPU's architecture and core count (an engine computes on one thread there)."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{platform.processor() or platform.machine()} CPU, {os.cpu_count()} core(s)"


def commit() -> str:
    """The checkout's commit, with + for uncommitted changes; "unknown" in a copy."""
    root = Path(__file__).resolve().parents[1]

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True).stdout.strip()

    is_checkout = git("rev-parse", "--show-toplevel") == str(root)
    name = git("rev-parse", "--short", "HEAD") if is_checkout else ""
    return (name + ("+" if git("status", "--porcelain") else "")) if name else "unknown"


def describe() -> str:
    """Two lines: when, where, which versions; and the command."""
    versions = f"torch {torch.__version__}, triton {triton.__version__}, python {platform.python_version()}"
    command = " ".join(["python", "-m", _module(), *sys.argv[1:]])
    return f"{date.today()}, {device_name()}, {versions}, commit {commit()}\n{command}"


def _module() -> str:
    """The name by which the running script was called."""
    script, root = Path(sys.argv[0]).resolve(), Path(__file__).resolve().parents[1]
    if not script.is_relative_to(root):
        return script.stem
    return ".".join(script.relative_to(root).with_suffix("").parts).removesuffix(".__main__")

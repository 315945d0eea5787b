"""What a rank's bits depend on besides the job: the device, the versions, our own sources.

Owns how these facts are gathered and how two sets of them are told apart. It must not know what is done
about a difference.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from engine import ResolvedConfig

DEVICE_FACTS = ("device_kind", "device")
"""Known once an engine is built; all other facts are known before."""

SPEED_ONLY = frozenset(
    {
        "model",
        "device",
        "device_name",
        "exchange",
        "engram",
        "cuda_graphs",
        "max_num_seqs",
        "max_num_batched_tokens",
        "num_kv_blocks",
        "host_memory_bytes",
        "num_host_kv_blocks",
        "num_host_states",
        "enable_prefix_caching",
        "preemption",
        "max_num_preemptions",
        "gpu_memory_utilization",
    }
)
"""Engine settings, asked or resolved, that may differ between two runs of one job: they change no bit of an
answer, or are told apart elsewhere (the model and the device)."""

_DISTRIBUTIONS = ("overnight", "torch", "triton")
_SOURCE_PACKAGES = ("engine", "kernels")


def describe_environment(resolved: ResolvedConfig, model: str) -> dict[str, str]:
    """The facts of a built engine. ``model`` is the model folder's fingerprint."""
    return {
        **describe_versions(),
        "device_kind": resolved.device,
        "device": resolved.device_name,
        "model": model,
    }


@functools.cache
def describe_versions() -> Mapping[str, str]:
    """The facts that need no engine: versions, and a hash of the sources that compute bits."""
    found = {"python": platform.python_version(), "kernels": _hash_sources()}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def _hash_sources() -> str:
    digest = hashlib.blake2b(digest_size=8)
    for package in _SOURCE_PACKAGES:
        spec = importlib.util.find_spec(package)  # finds it without importing it
        assert spec is not None, package
        assert spec.submodule_search_locations, package
        folder = Path(next(iter(spec.submodule_search_locations)))
        for path in sorted(folder.rglob("*.py")):
            digest.update(f"{package}/{path.relative_to(folder).as_posix()}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def settings_that_matter(resolved: ResolvedConfig) -> dict[str, Any]:
    """The resolved engine settings that change answers."""
    return {name: value for name, value in asdict(resolved).items() if name not in SPEED_ONLY}


def find_differences(recorded: Sequence[Mapping[str, Any]], here: Mapping[str, Any]) -> list[str]:
    """In words, each fact of ``here`` that some of ``recorded`` has another value for, or lacks."""
    differences = []
    for name, value in here.items():
        others = {str(facts.get(name, "unknown")) for facts in recorded} - {str(value)}
        differences += [f"{name} was {other} and is here {value}" for other in sorted(others)]
    return differences

"""An engine that notes its steps in a file, for benchmarks that run it in another process.

The file is that of the environment variable ``NOTES``, which a local Ray hands on to its ranks.
"""

from __future__ import annotations

import os
import struct
import time
from pathlib import Path
from typing import Any

from engine import Engine, EngineConfig, Request, RequestOutput
from engine.llm_engine import LLMEngine

NOTES = "BENCHMARK_STEP_NOTES"
NOTE = struct.Struct("<dddq")
"""When a step began and ended, its thread's CPU seconds, tokens so far. The first is of the first request."""


class NotedEngine:
    """An engine that appends to a file, step by step, when it began and ended."""

    def __init__(self, engine: Engine, path: Path) -> None:
        self._engine = engine
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 (lives as long as the engine)
        self._has_requests = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def add_request(self, request: Request) -> None:
        if not self._has_requests:
            self._has_requests = True
            now = time.perf_counter()
            self._file.write(NOTE.pack(now, now, 0.0, 0))
        self._engine.add_request(request)

    def step(self) -> list[RequestOutput]:
        started, cpu_started = time.perf_counter(), time.thread_time()
        outputs = self._engine.step()
        ended, cpu_s = time.perf_counter(), time.thread_time() - cpu_started
        stats = self._engine.stats()
        num_tokens = stats.num_prefill_tokens + stats.num_decode_tokens + stats.num_replayed_tokens
        self._file.write(NOTE.pack(started, ended, cpu_s, num_tokens))
        return outputs


def build_noted(config: EngineConfig) -> Engine:
    """The real engine, which notes its steps where the environment says."""
    engine: Any = NotedEngine(LLMEngine.build(config), Path(os.environ[NOTES]))
    return engine  # type: ignore[no-any-return]

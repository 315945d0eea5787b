"""Which rows were in flight on ranks that died, and how far each was, kept across runs.

Owns the file of that; it must not know what a death means for a row.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

from pipelines.manifest import OutputFolder
from pipelines.plan import Plan


class DeathLog:
    """A row that kills ranks is not innocent again in the next run. A driver writes its own run's file."""

    def __init__(self, folder: OutputFolder, plan: Plan, run: int) -> None:
        self._folder = folder.deaths
        self._path = self._folder / f"{run:06d}.jsonl"
        self._fingerprint = plan.fingerprint

    def add(self, shard_index: int, num_tokens: Mapping[int, int | None]) -> None:
        """Note one death, durably: the rows that were there, and how many tokens each had."""
        if not num_tokens:
            return
        rows, counts = list(num_tokens), list(num_tokens.values())
        record = {"fingerprint": self._fingerprint, "shard": shard_index, "rows": rows, "tokens": counts}
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(f"\n{json.dumps(record)}\n")  # a line of its own, whatever a kill left before it
            file.flush()
            os.fsync(file.fileno())

    def read(self) -> dict[tuple[int, int], list[int | None]]:
        """How many tokens each (shard, row) had at each death; a line that a kill cut short says nothing."""
        found: dict[tuple[int, int], list[int | None]] = {}
        texts = [path.read_text(encoding="utf-8") for path in sorted(self._folder.glob("*.jsonl"))]
        for line in "\n".join(texts).splitlines():
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if record["fingerprint"] == self._fingerprint:
                for row, num_tokens in zip(record["rows"], record["tokens"], strict=True):
                    found.setdefault((record["shard"], row), []).append(num_tokens)
        return found

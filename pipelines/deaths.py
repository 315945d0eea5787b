"""Which rows were in flight on ranks that died, kept across runs.

Owns the file of that; it must not know what a death means for a row.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

from pipelines.manifest import OutputFolder
from pipelines.plan import Plan


class DeathLog:
    """A row that kills ranks is not innocent again in the next run. A driver writes its own run's file."""

    def __init__(self, folder: OutputFolder, plan: Plan, run: int) -> None:
        self._folder = folder.deaths
        self._path = self._folder / f"{run:06d}.jsonl"
        self._fingerprint = plan.fingerprint

    def add(self, shard_index: int, rows: Sequence[int]) -> None:
        """Note one death, durably."""
        if not rows:
            return
        record = {"fingerprint": self._fingerprint, "shard": shard_index, "rows": list(rows)}
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(f"\n{json.dumps(record)}\n")  # a line of its own, whatever a kill left before it
            file.flush()
            os.fsync(file.fileno())

    def read(self) -> dict[tuple[int, int], int]:
        """At how many deaths each (shard, row) was there; a line that a kill cut short counts for nothing."""
        counts: dict[tuple[int, int], int] = {}
        texts = [path.read_text(encoding="utf-8") for path in sorted(self._folder.glob("*.jsonl"))]
        for line in "\n".join(texts).splitlines():
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if record["fingerprint"] == self._fingerprint:
                for row in record["rows"]:
                    counts[record["shard"], row] = counts.get((record["shard"], row), 0) + 1
        return counts

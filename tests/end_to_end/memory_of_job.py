"""A process for tests: one job over in-process ranks, and what it held of memory while it went on.

Called as ``python -m tests.end_to_end.memory_of_job INPUT OUTPUT ROWS_PER_SHARD``; prints the MiB held before
the job, then at each commit, then the peak.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from pipelines.manifest import OutputFolder
from tests.small_jobs import make_plan, start_run

COLUMNS = ("prompt_token_ids",)


def resident_mib(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))


def main(input_path: str, output: str, rows_per_shard: str) -> None:
    plan = make_plan(input_path, int(rows_per_shard), contract={"columns": COLUMNS})
    driver, _ = start_run(OutputFolder(Path(output)), plan, num_slots=1, capacity=64)
    samples = [resident_mib("RssAnon")]
    commit = driver._commit

    def commit_and_look(*arguments: Any) -> None:
        commit(*arguments)
        samples.append(resident_mib("RssAnon"))

    driver._commit = commit_and_look  # type: ignore[method-assign]
    driver.run()
    print(*samples, resident_mib("VmHWM"))


if __name__ == "__main__":
    main(*sys.argv[1:])

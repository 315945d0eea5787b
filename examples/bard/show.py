"""Prints five prompts with their completions from the demo's output folder, and where the Parquet is.

Shows that the output is plain Parquet: it uses pyarrow alone and nothing of this project.
"""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import pyarrow.parquet as pq


def main(folder: str, num_shown: int = 5) -> None:
    parts = sorted(Path(folder).glob("*.parquet"))
    table = pq.read_table(parts, columns=["row_id", "prompt", "completion", "status"])
    finished = [row for row in table.to_pylist() if row["status"] == "ok"]
    for row in finished[:: max(1, len(finished) // num_shown)][:num_shown]:
        print(f"\n{row['row_id']}")
        print(textwrap.indent(row["prompt"], "  > "))
        print(textwrap.indent(row["completion"].strip("\n"), "  | "))
    print(f"\n{len(finished)} of {table.num_rows} rows finished ok, in {len(parts)} Parquet files:")
    print(f"  {Path(folder).resolve()}/*.parquet")


if __name__ == "__main__":
    main(sys.argv[1])

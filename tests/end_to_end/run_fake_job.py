"""A driver process for tests: a whole job on a real local Ray, with a fake engine in every rank.

Called as ``python -m tests.end_to_end.run_fake_job BUILDER MODEL INPUT OUTPUT NUM_RANKS [KEY=VALUE ...]``.
"""

from __future__ import annotations

import logging
import os
import sys

from engine import ConfigError
from jobs.cluster import leave_if_stopped, run_job
from jobs.config import load_job
from tests import fake_engine


def main(builder: str, model: str, input_path: str, output: str, num_ranks: str, *overrides: str) -> int:
    logging.basicConfig(level=logging.INFO)
    flags = {
        "model.path": model,
        "input.path": input_path,
        "output.path": output,
        "cluster.num_ranks": int(num_ranks),
        "engine.device": "cpu",
        "engine.max_num_seqs": 4,
    }
    try:
        limit_s = os.environ.get("TEST_LIMIT_S")
        code = run_job(
            load_job(None, overrides, flags),
            limit_s=None if limit_s is None else float(limit_s),
            build_engine=getattr(fake_engine, builder),
        )
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return leave_if_stopped(code)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

"""The exit codes of batch-generate, and what its help says of them.

Owns the numbers. It must not know when which one is returned.
"""

from __future__ import annotations

EXIT_COMMITTED = 0
EXIT_FAILED = 1
EXIT_REFUSED = 2
EXIT_TOO_MANY_ERRORS = 3
EXIT_STOPPED = 75

EXIT_CODES = {
    "run": """\
exit codes:
  0   every shard (with --slice, of that slice) is committed; once all of the job's are, with no more
      error rows than output.max_error_rate allows
  1   anything else
  2   refused: the config or the input is wrong; what was answered by then stays
  3   more error rows than output.max_error_rate allows when every shard is committed, or more than
      output.max_errors allows: then the job was stopped there
  75  stopped cleanly; run the same command again to go on
""",
    "plan": """\
exit codes:
  0   the job can run
  1   anything else
  2   refused: the config or the input is wrong, or the job cannot succeed as it is
""",
    "slurm": """\
exit codes:
  0   the script is written, or with --submit handed to sbatch
  1   anything else
  2   refused: the config or a flag is wrong, or sbatch did not take the script
""",
    "status": """\
exit codes:
  0   said, however far the job is
  1   anything else
  2   refused: the folder holds no job
""",
    "verify": """\
exit codes:
  0   every digest is equal
  1   a digest differs, or anything else
  2   refused: nothing was compared
""",
}
"""What the help of each command says of them."""

STOPPED_SENTENCE = "batch-generate: stopped cleanly; run the same command again to go on"
"""What a run says last that ends with ``EXIT_STOPPED``."""

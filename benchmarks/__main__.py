"""``python -m benchmarks``: what can be measured, and the way to it. It measures nothing itself."""

from __future__ import annotations

import sys
from importlib import import_module

COMMANDS = {
    "step": "the shared workload: 4,096 new tokens at context 131,072, with a table of stages",
    "tiny": "goodput of the small trained model: throughput, TTFT, TPOT, good requests a second",
    "kernels": "every op's benchmark, its contract first, public kernels beside it where they are installed",
    "compare": "one of these on two revisions or folders in turns: medians, ratios, are the bits the same?",
}
OTHERS = (
    "decode_steps, decoder_prefill, engram, engram_rows, exactness_cost, host_memory, job_overhead, "
    "make_checkpoint, peer_rows, scaling: python -m benchmarks.NAME --help"
)


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name not in COMMANDS:
        print("usage: python -m benchmarks COMMAND [options]    (COMMAND --help says more)\n")
        for command, text in COMMANDS.items():
            print(f"  {command:8} {text}")
        print(f"\nOne question each: {OTHERS}")
        sys.exit(0 if name in ("-h", "--help") else 2)
    module = import_module(f"benchmarks.{'kernels.suite' if name == 'kernels' else name}")
    module.main(sys.argv[2:])


if __name__ == "__main__":
    main()

"""Hyper-connections at the release's shape, 4,096 rows x 4 streams x 5,120, against their byte floors.

The contract comes first: nothing is timed when a gate is red. The floor is each byte once at the measured
rate of a large copy in the same process. Run from the root:
``python -m benchmarks.kernels.bench_hyper_connections``.
"""

from __future__ import annotations

import json

import torch

from benchmarks.kernels.captured import captured_ms
from benchmarks.kernels.contracts import require_contracts
from benchmarks.kernels.timing import sustained_ms
from kernels.hyper_connections import collapse_norm, expand_streams, mix_streams, read_streams, update_streams
from kernels.rms_norm import rms_norm
from tests.kernels.hyper_connections_cases import OPTIONS, WEIGHTS, old_mix, stream_inputs

WIDTH = 5120


def copy_rate() -> float:
    """Bytes read plus written a millisecond, of a 2 GiB copy."""
    source = torch.empty(1 << 30, dtype=torch.int16, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * source.nbytes / sustained_ms(lambda: target.copy_(source), 0.5)


def measure(num_rows: int, rate: float) -> dict[str, dict[str, float]]:
    i = stream_inputs(0, torch.device("cuda"), num_rows, WIDTH, torch.bfloat16)
    weights = [i[name] for name in WEIGHTS]
    row, streams = 2 * WIDTH * num_rows, 8 * WIDTH * num_rows
    out, x = torch.empty_like(i["streams"]), torch.empty_like(i["streams"][:, 0])
    mix = old_mix({k: v.clone() for k, v in i.items()})
    fused = {"out_streams": out, "out_x": x, "out_mix": mix}
    ops = {
        "rms_norm": (2 * row, lambda: rms_norm(i["y"], i["norm_weight"], eps=1e-20, out=x)),
        "mix": (streams, lambda: mix_streams(i["streams"], *weights, **OPTIONS, out=mix)),
        "collapse_norm": (streams + row, lambda: collapse_norm(
            i["streams"], i["pre"], i["norm_weight"], eps=1e-20, out=x)),
        "expand": (2 * streams + row, lambda: expand_streams(
            i["y"], i["streams"], i["post"], i["comb"], out=out)),
        "read": (streams + row, lambda: read_streams(
            i["streams"], i["pre"], i["norm_weight"], *weights, **OPTIONS, out_x=x, out_mix=mix)),
        "update": (2 * streams + 2 * row, lambda: update_streams(
            i["y"], i["streams"], old_mix(i), i["pre"], i["norm_weight"], *weights, **OPTIONS, **fused)),
    }  # fmt: skip
    results = {}
    for name, (num_bytes, launch) in ops.items():
        ms, floor = captured_ms(launch), num_bytes / rate
        results[name] = {"ms": ms, "floor_ms": floor, "ratio": ms / floor}
        print(f"{num_rows:>6} {name:14} {ms:9.4f} ms  floor {floor:8.4f}  {ms / floor:5.2f} x")
    return results


def main() -> None:
    require_contracts(__doc__, "rms_norm", "hyper_connections")
    rate = copy_rate()
    results = {str(n): measure(n, rate) for n in (4096, 64)}
    facts = {"op": "hyper_connections", "gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    print(json.dumps(facts | {"copy_tb_s": rate / 1e9, "results": results}))


if __name__ == "__main__":
    main()

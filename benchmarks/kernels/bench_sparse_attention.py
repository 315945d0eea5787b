"""Attention at the release's shape: 4,096 rows, 64 heads x 512, 128 window rows and 512 of 131,072 entries.

The contract comes first: nothing is timed when a gate is red. FlashMLA, where ``FLASHMLA_C`` names its
library, reads the same keys already widened to bfloat16. Run from the root:
``python -m benchmarks.kernels.bench_sparse_attention``.
"""

from __future__ import annotations

import json
import os

import torch

from benchmarks.kernels.contracts import require_contracts
from benchmarks.kernels.timing import sustained_ms
from kernels.number_formats import unpack_fp4_entry, unpack_fp8
from kernels.sparse_attention import paged_sparse_attention
from tests.kernels.sparse_attention_cases import attention_inputs

SHAPE = {"num_heads": 64, "head_dim": 512, "window": 128, "dtype": torch.bfloat16, "is_packed": True}


def time_ours(num_rows: int, num_slots: int, num_selected: int) -> float:
    inputs = attention_inputs(
        0,
        torch.device("cuda"),
        num_rows=num_rows,
        num_slots=num_slots,
        num_selected=num_selected,
        is_full=True,
        **SHAPE,
    )
    out = torch.empty_like(inputs["q"])
    return sustained_ms(lambda: paged_sparse_attention(**inputs, out=out))


def time_flashmla(num_rows: int, num_slots: int, num_selected: int) -> float | None:
    """The anchor's own format: one bfloat16 table and 640 indices a row."""
    library = os.environ.get("FLASHMLA_C")
    if not library:
        return None
    torch.ops.load_library(library)
    i = attention_inputs(
        0,
        torch.device("cuda"),
        num_rows=num_rows,
        num_slots=num_slots,
        num_selected=num_selected,
        is_full=True,
        **SHAPE,
    )
    window = unpack_fp8(torch.cat([i["ring"], i["chunk"]])).bfloat16()
    table = torch.cat([window, unpack_fp4_entry(i["entries"]).bfloat16()])[:, None].contiguous()
    indices = torch.cat([i["window_rows"], i["slots"] + len(window)], 1).int()[:, None].contiguous()
    call = torch.ops._flashmla_C.sparse_prefill_fwd
    return sustained_ms(lambda: call(i["q"], table, indices, i["scale"], 512, i["sink"], None, None))


def main() -> None:
    require_contracts(__doc__, "sparse_attention")
    results = {
        "prefill_4096x640_of_131072": time_ours(4096, 131_072, 512),
        "prefill_4096x640_of_65536": time_ours(4096, 65_536, 512),
        "prefill_4096x128": time_ours(4096, 64, 0),
        "decode_64x640": time_ours(64, 131_072, 512),
        "decode_1x640": time_ours(1, 131_072, 512),
        "flashmla_4096x640_of_131072": time_flashmla(4096, 131_072, 512),
    }
    for name, value in results.items():
        print(f"{name:32} {value if value is None else round(value, 4)}")
    print(
        json.dumps(
            {
                "op": "sparse_attention",
                "gpu": torch.cuda.get_device_name(),
                "torch": torch.__version__,
                "ms": results,
            }
        )
    )


if __name__ == "__main__":
    main()

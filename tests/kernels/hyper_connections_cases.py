"""Contract cases of the hyper-connection ops."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.float_pieces import split_float32
from kernels.hyper_connections import (
    StreamMix,
    collapse_norm,
    collapse_norm_reference,
    expand_streams,
    expand_streams_reference,
    mix_streams,
    mix_streams_reference,
    read_streams,
    update_streams,
    update_streams_reference,
)
from tests.kernels.contract import Inputs, OpCase, Outputs, Tolerance

FP32 = Tolerance(3e-6, 6e-6, "fp32 sums in another order; approximate divisions and exponentials")
MIX = Tolerance(2e-5, 4e-5, "20480-long fp32 sums in another order, through sigmoids and 20 Sinkhorn rounds")
UPDATED_MIX = Tolerance(
    2e-4, 1e-3, "as MIX, of updated streams in which some values are one bfloat16 step off"
)
BF16 = Tolerance(4e-4, 8e-3, "as fp32; where that crosses a rounding boundary, one bfloat16 step")
NORMED = Tolerance(1e-3, 8e-3, "one bfloat16 step in the collapsed row, and one in the normed one")
OPTIONS = {"num_iterations": 20, "eps": 1e-6, "norm_eps": 1e-20}
MIX_NAMES = ("mix_pre", "mix_post", "mix_comb")
WEIGHTS = ("fn", "base", "scale")


def stream_inputs(
    seed: int, device: torch.device, num_rows: int, width: int, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Streams of different sizes, a sublayer's output, an earlier mix and the mixing weights."""
    g = torch.Generator(device).manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, device=device)

    comb = torch.softmax(randn(num_rows, 4, 4), -1)
    fn = randn(24, 4 * width) * (4 * width) ** -0.5
    return {
        "y": randn(num_rows, width + 8).to(dtype)[:, :width],
        "streams": (randn(num_rows, 4, width) * torch.exp2(randn(num_rows, 4, 1))).to(dtype),
        "pre": torch.sigmoid(randn(num_rows, 4)),
        "post": 2 * torch.sigmoid(randn(num_rows, 4)),
        "comb": comb,
        "norm_weight": 1 + 0.1 * randn(width),
        "fn": split_float32(fn) if dtype == torch.bfloat16 else fn,
        "base": randn(24) * 0.5,
        "scale": 1 + 0.2 * randn(3),
    }


def old_mix(inputs: Inputs) -> StreamMix:
    return StreamMix(inputs["pre"], inputs["post"], inputs["comb"])


def mix_outputs(device: torch.device, n: int) -> Outputs:
    shapes = {"mix_pre": (n, 4), "mix_post": (n, 4), "mix_comb": (n, 4, 4)}
    return {name: torch.empty(shape, device=device) for name, shape in shapes.items()}


def mix_of(out: Outputs, n: int) -> StreamMix:
    return StreamMix(out["mix_pre"][:n], out["mix_post"][:n], out["mix_comb"][:n])


def named_mix(mix: StreamMix) -> Outputs:
    return {"mix_pre": mix.pre, "mix_post": mix.post, "mix_comb": mix.comb}


def stream_cases(
    suffix: str, num_rows: int, width: int, dtype: torch.dtype, row_counts: tuple[int, ...], needs_gpu: bool
) -> list[OpCase]:
    """Every op of the folder on one shape."""

    def build(seed: int, device: torch.device) -> Inputs:
        return stream_inputs(seed, device, num_rows, width, dtype)

    def like(n: int, device: torch.device) -> Outputs:
        return {
            "streams": torch.empty(n, 4, width, dtype=dtype, device=device),
            "x": torch.empty(n, width, dtype=dtype, device=device),
        } | mix_outputs(device, n)

    def weights(inputs: Inputs) -> list[Tensor]:
        return [inputs[name] for name in WEIGHTS]

    def run_mix(i: Inputs, out: Outputs) -> None:
        mix_streams(i["streams"], *weights(i), **OPTIONS, out=mix_of(out, len(i["streams"])))

    def run_expand(i: Inputs, out: Outputs) -> None:
        expand_streams(i["y"], i["streams"], i["post"], i["comb"], out=out["streams"][: len(i["y"])])

    def run_collapse(i: Inputs, out: Outputs) -> None:
        collapse_norm(i["streams"], i["pre"], i["norm_weight"], eps=1e-20, out=out["x"][: len(i["pre"])])

    def run_read(i: Inputs, out: Outputs) -> None:
        n = len(i["pre"])
        read_streams(
            i["streams"],
            i["pre"],
            i["norm_weight"],
            *weights(i),
            **OPTIONS,
            out_x=out["x"][:n],
            out_mix=mix_of(out, n),
        )

    def run_update(i: Inputs, out: Outputs) -> None:
        n = len(i["pre"])
        update_streams(
            i["y"], i["streams"], old_mix(i), i["pre"], i["norm_weight"], *weights(i), **OPTIONS,
            out_streams=out["streams"][:n], out_x=out["x"][:n], out_mix=mix_of(out, n),
        )  # fmt: skip

    def reference_update(i: Inputs) -> Outputs:
        streams, x, mix = update_streams_reference(
            i["y"], i["streams"], old_mix(i), i["pre"], i["norm_weight"], *weights(i), **OPTIONS
        )
        return {"streams": streams, "x": x} | named_mix(mix)

    def reference_mix(i: Inputs) -> Outputs:
        return named_mix(mix_streams_reference(i["streams"], *weights(i), **OPTIONS))

    def reference_collapse(i: Inputs) -> Outputs:
        return {"x": collapse_norm_reference(i["streams"], i["pre"], i["norm_weight"], eps=1e-20)}

    def reference_expand(i: Inputs) -> Outputs:
        return {"streams": expand_streams_reference(i["y"], i["streams"], i["post"], i["comb"])}

    exact = dtype == torch.float32
    tolerances = {
        "streams": FP32 if exact else BF16,
        "x": FP32 if exact else NORMED,
    } | dict.fromkeys(MIX_NAMES, MIX)
    kinds = {
        "mix": (run_mix, reference_mix, ("mix_pre", "mix_post", "mix_comb")),
        "expand": (run_expand, reference_expand, ("streams",)),
        "collapse": (run_collapse, reference_collapse, ("x",)),
        "read": (
            run_read,
            lambda i: reference_collapse(i) | reference_mix(i),
            ("x", "mix_pre", "mix_post", "mix_comb"),
        ),
        "update": (run_update, reference_update, ("streams", "x", "mix_pre", "mix_post", "mix_comb")),
    }
    return [
        OpCase(
            name=f"{kind}-{suffix}",
            build=build,
            row_inputs=("y", "streams", "pre", "post", "comb"),
            outputs=lambda i, n, names=names: {k: v for k, v in like(n, i["y"].device).items() if k in names},
            run=run,
            reference=reference,
            tolerances=tolerances | ({} if kind != "update" else dict.fromkeys(MIX_NAMES, UPDATED_MIX)),
            row_counts=row_counts,
            needs_gpu=needs_gpu,
        )
        for kind, (run, reference, names) in kinds.items()
    ]


CASES = [
    *stream_cases("fp32-96", 7, 96, torch.float32, (1, 5), False),
    # Widths in one launch, a last part that is smaller included, and in two.
    *stream_cases("bf16-352", 70, 352, torch.bfloat16, (1, 5, 17), True),
    *stream_cases("bf16-80", 70, 80, torch.bfloat16, (1, 5, 17), True),
    *stream_cases("bf16-5120", 300, 5120, torch.bfloat16, (1, 2, 3, 5, 16, 17, 64, 257), True),
]

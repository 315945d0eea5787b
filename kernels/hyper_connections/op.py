"""Hyper-connections on the device: mix, collapse + norm, expand, and all of them in one pass.

Owns checks, tile choice and launches. Which site's ``pre`` collapses which site is the model's business.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from kernels.argument_checks import FLOATS, expect_dense, expect_output, expect_tensor
from kernels.hyper_connections.kernel import (
    PARTIAL_WIDTH,
    collapse_norm_kernel,
    expand_streams_kernel,
    finish_mix_kernel,
    mix_product_kernel,
    stream_pass_kernel,
)
from kernels.hyper_connections.one_pass import ROWS, STEP, one_pass_kernel
from kernels.hyper_connections.reference import SiteInput, StreamMix

NUM_STREAMS = 4
FINISH_ROWS = 16
NORM_ROWS = 1


class MixConfig(NamedTuple):
    """Tiles of the pass and of the product, where they are two launches: functions of the width alone."""

    pass_rows: int
    pass_block: int
    product_rows: int
    product_block: int
    product_part: int


def choose_config(width: int) -> MixConfig:
    """The product's rows are one tile whatever their number; its depth is cut into ten parts at most."""
    depth = NUM_STREAMS * width
    block = min(128, triton.next_power_of_2(depth))
    part = triton.cdiv(triton.cdiv(depth, 10), block) * block
    return MixConfig(4, min(512, triton.next_power_of_2(width)), 128, block, part)


def choose_part(width: int) -> int | None:
    """Columns of a part of ``one_pass_kernel``: a function of the width alone. None where it cannot run."""
    return None if width % STEP.value else min(320, width)


def mix_streams(
    streams: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    *,
    num_iterations: int,
    eps: float,
    norm_eps: float,
    out: StreamMix | None = None,
) -> StreamMix:
    """Mixing weights of every row from its own streams.

    Args:
        streams: [num_rows, 4, hidden], float32 or bfloat16.
        fn: stream-major; for float32 streams [24, 4 * hidden] fp32, for bfloat16 ones its pieces
            [3, 24, 4 * hidden] from ``split_float32``.
        base: [24] fp32; scale: [3] fp32, for pre, post and comb.
        num_iterations: Sinkhorn rounds, the first one being softmax over rows + column division.
        eps: added inside the Sinkhorn and to ``pre``; norm_eps: of the RMS over all streams.
        out: where to write; None allocates.

    Returns:
        pre [num_rows, 4], post [num_rows, 4], comb [num_rows, 4, 4], fp32. The model page's section 7.

    Raises:
        ValueError: an argument is not as described.
    """
    return _run_pass(
        streams, fn, base, scale, num_iterations=num_iterations, eps=eps, norm_eps=norm_eps, out_mix=out
    )[2]


def read_streams(
    streams: Tensor,
    pre: Tensor,
    norm_weight: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    *,
    num_iterations: int,
    eps: float,
    norm_eps: float,
    out_x: Tensor | None = None,
    out_mix: StreamMix | None = None,
) -> SiteInput:
    """``mix_streams`` and ``collapse_norm`` in one pass over the streams.

    Args:
        pre: [num_rows, 4] fp32, the site before's; norm_weight: [hidden] fp32. The rest as ``mix_streams``.

    Returns:
        The streams unchanged, the sublayer's input and the site's mix.

    Raises:
        ValueError: an argument is not as described.
    """
    return SiteInput(
        *_run_pass(
            streams, fn, base, scale, pre=pre, norm_weight=norm_weight,
            num_iterations=num_iterations, eps=eps, norm_eps=norm_eps, out_x=out_x, out_mix=out_mix,
        )
    )  # fmt: skip


def update_streams(
    y: Tensor,
    streams: Tensor,
    mix: StreamMix,
    pre: Tensor,
    norm_weight: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    *,
    num_iterations: int,
    eps: float,
    norm_eps: float,
    out_streams: Tensor | None = None,
    out_x: Tensor | None = None,
    out_mix: StreamMix | None = None,
) -> SiteInput:
    """``expand_streams`` by one site's mix and ``read_streams`` for the next, in one pass over the streams.

    Args:
        y: [num_rows, hidden], the sublayer's output, dtype of ``streams``; rows may lie apart (bfloat16 ones
            that do not begin at 16 bytes are copied first).
        mix: of the site that ends (``post`` and ``comb`` are read).
        pre: [num_rows, 4] fp32, what collapses for the next sublayer. The rest as ``read_streams``.
        out_streams: may be ``streams`` itself.

    Returns:
        The new streams, the next sublayer's input and the next site's mix.

    Raises:
        ValueError: an argument is not as described.
    """
    return SiteInput(
        *_run_pass(
            streams, fn, base, scale, y=y, old_mix=mix, pre=pre, norm_weight=norm_weight,
            num_iterations=num_iterations, eps=eps, norm_eps=norm_eps,
            out_streams=out_streams, out_x=out_x, out_mix=out_mix,
        )
    )  # fmt: skip


def expand_streams(
    y: Tensor, streams: Tensor, post: Tensor, comb: Tensor, *, out: Tensor | None = None
) -> Tensor:
    """``out[k] = post[k] y + sum_j comb[j, k] streams[j]`` in fp32, cast to the streams' dtype.

    Args:
        y: [num_rows, hidden], dtype of ``streams``; rows may lie apart.
        streams: [num_rows, 4, hidden]; post: [num_rows, 4] fp32; comb: [num_rows, 4, 4] fp32.
        out: like ``streams``, and may be ``streams`` itself; None allocates.

    Raises:
        ValueError: an argument is not as described.
    """
    num_rows, width = _expect_streams(streams)
    out = expect_output("out", out, streams.shape, streams.dtype, streams)
    _expect_expansion(y, streams, post, comb, "out", out)
    if num_rows:
        rows, block = 4, min(1024, triton.next_power_of_2(width))
        expand_streams_kernel[(triton.cdiv(width, block), triton.cdiv(num_rows, rows))](
            y,
            streams,
            post,
            comb,
            out,
            num_rows,
            y.stride(0),
            WIDTH=width,
            ROWS=rows,
            BLOCK=block,
            num_warps=8,
        )
    return out


def collapse_norm(
    streams: Tensor, pre: Tensor, norm_weight: Tensor | None, *, eps: float, out: Tensor | None = None
) -> Tensor:
    """``sum_k pre[k] streams[k]`` in fp32, cast to the streams' dtype; then RMSNorm where a weight is given.

    Args:
        streams: [num_rows, 4, hidden], float32 or bfloat16; pre: [num_rows, 4] fp32.
        norm_weight: [hidden] fp32 or None; eps: of the norm.
        out: [num_rows, hidden]; None allocates.

    Raises:
        ValueError: an argument is not as described.
    """
    num_rows, width = _expect_streams(streams)
    expect_tensor("pre", pre, (num_rows, NUM_STREAMS), (torch.float32,), like=streams)
    if norm_weight is not None:
        expect_tensor("norm_weight", norm_weight, (width,), (torch.float32,), like=streams)
    out = expect_output("out", out, (num_rows, width), streams.dtype, streams)
    expect_dense("out", out)
    if num_rows:
        block = triton.next_power_of_2(width)
        collapse_norm_kernel[(num_rows,)](
            streams, pre, pre if norm_weight is None else norm_weight, out, eps,
            WIDTH=width, BLOCK=block, HAS_NORM=norm_weight is not None,
            num_warps=min(16, max(1, block // 512)),
        )  # fmt: skip
    return out


def _expect_streams(streams: Tensor) -> tuple[int, int]:
    expect_tensor("streams", streams, (None, NUM_STREAMS, None), FLOATS)
    return streams.shape[0], streams.shape[2]


def _expect_expansion(
    y: Tensor, streams: Tensor, post: Tensor, comb: Tensor, out_name: str, out: Tensor
) -> None:
    num_rows, width = _expect_streams(streams)
    expect_tensor("y", y, (num_rows, width), (streams.dtype,), like=streams, is_strided=True)
    expect_tensor("post", post, (num_rows, NUM_STREAMS), (torch.float32,), like=streams)
    expect_tensor("comb", comb, (num_rows, NUM_STREAMS, NUM_STREAMS), (torch.float32,), like=streams)
    expect_dense(out_name, out)


def _expect_mix(mix: StreamMix | None, num_rows: int, like: Tensor) -> StreamMix:
    vector = (num_rows, NUM_STREAMS)
    shapes = (vector, vector, (*vector, NUM_STREAMS))
    parts = []
    for name, shape in zip(StreamMix._fields, shapes, strict=True):
        given = None if mix is None else getattr(mix, name)
        parts.append(expect_output(f"out_mix.{name}", given, shape, torch.float32, like))
        expect_dense(f"out_mix.{name}", parts[-1])
    return StreamMix(*parts)


def _run_pass(
    streams: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    *,
    y: Tensor | None = None,
    old_mix: StreamMix | None = None,
    pre: Tensor | None = None,
    norm_weight: Tensor | None = None,
    num_iterations: int,
    eps: float,
    norm_eps: float,
    out_streams: Tensor | None = None,
    out_x: Tensor | None = None,
    out_mix: StreamMix | None = None,
) -> tuple[Tensor, Tensor, StreamMix]:
    """All launches: ``y`` and ``old_mix`` expand first, ``pre`` and ``norm_weight`` collapse and norm.

    Returns (streams, x, mix); x is ``streams`` where nothing is collapsed.
    """
    num_rows, width = _expect_streams(streams)
    size = 2 * NUM_STREAMS + NUM_STREAMS**2
    is_bf16 = streams.dtype == torch.bfloat16
    depth = NUM_STREAMS * width
    expect_tensor("fn", fn, (3, size, depth) if is_bf16 else (size, depth), (streams.dtype,), like=streams)
    expect_tensor("base", base, (size,), (torch.float32,), like=streams)
    expect_tensor("scale", scale, (3,), (torch.float32,), like=streams)
    if num_iterations < 1:
        raise ValueError(f"num_iterations: expected at least 1, got {num_iterations}")
    new_streams, x = streams, streams
    if y is not None and old_mix is not None:
        new_streams = expect_output("out_streams", out_streams, streams.shape, streams.dtype, streams)
        _expect_expansion(y, streams, old_mix.post, old_mix.comb, "out_streams", new_streams)
    if pre is not None and norm_weight is not None:
        expect_tensor("pre", pre, (num_rows, NUM_STREAMS), (torch.float32,), like=streams)
        expect_tensor("norm_weight", norm_weight, (width,), (torch.float32,), like=streams)
        x = expect_output("out_x", out_x, (num_rows, width), streams.dtype, streams)
        expect_dense("out_x", x)
    mix = _expect_mix(out_mix, num_rows, streams)
    if num_rows == 0:
        return new_streams, x, mix
    # What runs is a matter of width, dtype and device; the interpreter cannot run the one pass.
    part = choose_part(width) if is_bf16 and streams.is_cuda else None
    config = choose_config(width)
    num_parts = triton.cdiv(width, part) if part else triton.cdiv(depth, config.product_part)
    num_squares = triton.cdiv(width, part or config.pass_block)
    shape = (num_parts, num_rows, PARTIAL_WIDTH.value)
    partial = torch.empty(shape, dtype=torch.float32, device=streams.device)
    squares = torch.empty(num_squares, num_rows, 2, dtype=torch.float32, device=streams.device)
    old = mix if old_mix is None else old_mix
    if part and y is not None and (y.stride(0) % 8 or y.data_ptr() % 16):
        y = y.contiguous()  # the one pass copies 16 bytes at a time
    inputs = (streams if y is None else y, streams, old.post, old.comb, mix.pre if pre is None else pre)
    steps = {"HAS_EXPAND": y is not None, "HAS_COLLAPSE": pre is not None}
    stride_y = 0 if y is None else y.stride(0)
    if part:
        one_pass_kernel[(num_parts, triton.cdiv(num_rows, ROWS.value))](
            *inputs, fn, new_streams, x, squares, partial, num_rows, stride_y // 8,
            WIDTH=width, PART=part, **steps, num_warps=4,
        )  # fmt: skip
    else:
        stream_pass_kernel[(num_squares, triton.cdiv(num_rows, config.pass_rows))](
            *inputs, new_streams, x, squares, num_rows, stride_y,
            WIDTH=width, ROWS=config.pass_rows, BLOCK=config.pass_block, **steps, IS_BF16=is_bf16,
            num_warps=4,
        )  # fmt: skip
        mix_product_kernel[(num_parts, triton.cdiv(num_rows, config.product_rows))](
            new_streams, fn, partial, num_rows,
            DEPTH=depth, PART=config.product_part, ROWS=config.product_rows, BLOCK=config.product_block,
            IS_BF16=is_bf16, num_warps=8 if is_bf16 else 4, num_stages=3 if is_bf16 else 1,
        )  # fmt: skip
    num_programs = triton.cdiv(num_rows, FINISH_ROWS)
    if pre is not None:
        num_programs += triton.cdiv(num_rows, NORM_ROWS)
    finish_mix_kernel[(num_programs,)](
        partial, squares, base, scale, base if norm_weight is None else norm_weight,
        mix.pre, mix.post, mix.comb, x, num_rows, eps, norm_eps,
        WIDTH=width, NUM_PARTS=num_parts, NUM_SQUARES=num_squares, NUM_ITERATIONS=num_iterations,
        MIX_ROWS=FINISH_ROWS, NORM_ROWS=NORM_ROWS, BLOCK=triton.next_power_of_2(width), num_warps=4,
    )  # fmt: skip
    return new_streams, x, mix

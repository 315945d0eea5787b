"""Compiles a kernel for Hopper, whatever this machine has: ``python -m tests.kernels.hopper_compilation NAME``.

The installed Triton does all it does on a GPU, down to machine code, at shapes of the release. Nothing is run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime import driver

from kernels.hyper_connections.one_pass import one_pass_kernel
from kernels.linear.hopper import STORE_ROWS, hopper_linear_kernel
from kernels.linear.tiles import HOPPER_TILES, HopperConfig
from kernels.moe.hopper import hopper_expert_kernel
from kernels.moe.hopper_op import STAGES
from kernels.moe.hopper_sums import TAIL
from kernels.sparse_attention.hopper import hopper_attention_kernel

FP8, BF16, INT32, UINT8 = torch.float8_e4m3fn, torch.bfloat16, torch.int32, torch.uint8


class HopperDriver:
    """What the compiler asks of a device."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0


def boxes(shape: tuple[int, int], dtype: torch.dtype, box: list[int], *, swizzle: int = 128) -> Any:
    """A descriptor of rows that lie anywhere."""
    layout = gl.NVMMASharedLayout(swizzle, 8 * dtype.itemsize, 2)
    return TensorDescriptor.from_tensor(torch.empty(shape, dtype=dtype), box, layout)


def linear(config: HopperConfig, *, is_even: bool) -> Any:
    num_out, width, num_rows = 5120, 8192, 4096
    return hopper_linear_kernel.warmup(
        boxes((num_rows, width), FP8, [config.block_rows, 128]),
        boxes((num_out, width), FP8, [config.block_out, 128]),
        boxes((num_rows, num_out), BF16, [min(STORE_ROWS.value, config.block_rows), 64]),
        INT32, UINT8, num_rows, OUT=num_out, K_TILES=width // 128, GROUP_OUT=num_out,
        STAGES=config.num_stages, BAND=config.band, IS_EVEN=is_even, num_warps=4,
        maxnreg=128 if config.per_processor == 2 else None, grid=(132,),
    )  # fmt: skip


def experts(dtype: torch.dtype, *, box: int, is_gated: bool) -> Any:
    depth, width = (5120, 2304) if is_gated else (2304, 5120)
    block = 128 // dtype.itemsize
    return hopper_expert_kernel.warmup(
        boxes((24576, depth), dtype, [box, block]), boxes((24576, depth), dtype, [TAIL.value, block]),
        boxes((1024, 128), UINT8, [32, 128]), boxes((1024, 8), INT32, [8, 8], swizzle=32),
        UINT8, UINT8, torch.float32, INT32, INT32, torch.float32, BF16, BF16, 0, 16, 10.0,
        WIDTH=width, NUM_COLUMNS=width // (64 if is_gated else 128), NUM_BLOCKS=depth // 128,
        STAGES=STAGES[box, dtype], BOX=box, IS_GATED=is_gated, IS_FP8=dtype == FP8, HAS_ROW_SCALE=dtype == FP8,
        HAS_HOMES=False, HAS_WIDE=False, WANT_WIDE=False, num_warps=4, grid=(132,),
    )  # fmt: skip


def attention() -> Any:
    return hopper_attention_kernel.warmup(
        INT32, UINT8, UINT8, INT32, UINT8, INT32, torch.float32, torch.float32, torch.float32, INT32,
        4096, 128, 1.0, 16384, 16384, NUM_SELECTED=512, BLOCK_SELECTED=512, WINDOW_TILES=2, ROPE_HALF=32,
        num_warps=8, grid=(132,),
    )  # fmt: skip


def hyper_connections() -> Any:
    return one_pass_kernel.warmup(
        BF16, BF16, torch.float32, torch.float32, torch.float32, BF16, BF16, BF16, torch.float32, torch.float32,
        4096, 640, WIDTH=5120, PART=640, HAS_EXPAND=True, HAS_COLLAPSE=True, num_warps=4, grid=(8, 64),
    )  # fmt: skip


FEW, _, _, MANY = HOPPER_TILES
CASES: dict[str, Callable[[], Any]] = {
    "linear, many rows of an even weight": lambda: linear(MANY, is_even=True),
    "linear, many rows": lambda: linear(MANY, is_even=False),
    "linear, few rows": lambda: linear(FEW, is_even=False),
    "experts, e4m3": lambda: experts(FP8, box=64, is_gated=False),
    "experts, gated, bfloat16": lambda: experts(BF16, box=16, is_gated=True),
    "attention": attention,
    "hyper-connections": hyper_connections,
}


def main() -> None:
    driver.set_active(HopperDriver())
    compiled = CASES[sys.argv[1]]()
    print(f"{sys.argv[1]}: {len(compiled.asm['cubin'])} bytes by Triton {triton.__version__}")


if __name__ == "__main__":
    main()
